"""Scopes of the calling thread: its current context, or its capture mode, is another one within a ``with``."""

from __future__ import annotations

from ctypes import c_int, c_void_p
from types import TracebackType
from typing import Protocol

from kvplan.cuda.driver import RELAXED, Driver


class HasDriver(Protocol):
    """An object that holds the driver, such as a :class:`~kvplan.cuda.device.Device`."""

    driver: Driver


class Current:
    """A ``with`` in which a context is current for the calling thread."""

    __slots__ = ("_before", "_context", "_driver")

    def __init__(self, driver: Driver, context: int | None) -> None:
        self._driver = driver
        self._context = context
        self._before: int | None = None

    def __enter__(self) -> None:
        cu, before = self._driver, c_void_p()
        cu.cuCtxGetCurrent(before)  # ctypes passes its address, as byref(before) does in twice the time
        self._before = before.value
        if self._before != self._context:
            try:
                cu.check("cuCtxSetCurrent", cu.cuCtxSetCurrent(self._context))
            except BaseException:  # a signal handler may raise here: restore the previous context
                cu.cuCtxSetCurrent(self._before)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before != self._context:
            self._driver.cuCtxSetCurrent(self._before)


class Uncaptured:
    """A ``with`` in which this thread may make calls that a graph capture in any thread would forbid."""

    __slots__ = ("_driver", "_mode")

    def __init__(self, device: HasDriver) -> None:
        self._driver = device.driver
        self._mode = c_int(RELAXED)

    def __enter__(self) -> None:
        try:
            self._driver.cuThreadExchangeStreamCaptureMode(self._mode)
        except BaseException:  # a signal handler may raise here: restore the previous mode
            self._driver.cuThreadExchangeStreamCaptureMode(self._mode)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._driver.cuThreadExchangeStreamCaptureMode(self._mode)

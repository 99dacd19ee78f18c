"""One GPU through the CUDA driver: copies, launches and lists of calls, in its context, and its peers.

The methods call the entry points of ``driver.py`` with plain integers: addresses and handles. They pass arrays of
descriptors to the driver without a Python object for each descriptor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import byref, c_size_t, c_void_p
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.cuda import peer_access
from kvplan.cuda.call_list import ENDED, FAILED, Segment
from kvplan.cuda.context import Context
from kvplan.cuda.driver import (
    ACCESS_FLAGS,
    DEFAULT_SHARED,
    DEVICE_MAP,
    DEVICE_POINTER,
    HOST_MEMORY,
    INVALID_VALUE,
    MAX_DYNAMIC_SHARED,
    MEMORY_TYPE,
    NOT_READY,
    ORDER_STREAM,
    PORTABLE,
    RANGE_SIZE,
    RANGE_START,
    SUCCESS,
    Attributes,
    Driver,
    DriverError,
    driver,
    loaded,
)
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array

if TYPE_CHECKING:
    from kvplan.cuda.issuer import Issuer

__all__ = [
    "ACCESS_FLAGS", "DEVICE_MAP", "DEVICE_POINTER", "HOST_MEMORY", "INVALID_VALUE", "MEMORY_TYPE", "NOT_READY",
    "PORTABLE", "RANGE_SIZE", "RANGE_START", "SUCCESS", "Device", "Driver", "DriverError", "Uncaptured", "driver",
    "loaded",
]  # fmt: skip

WATCH_NAPS = 50  # naps of 20 us after which a waiting thread lets Python handle signals


class Device(Context):
    """One GPU: copies, launches and lists of calls in its context, and its peers.

    Args:
        ordinal: number of the GPU among the visible ones.

    Raises:
        TransferError: there is no driver, or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._others: dict[int, Device] = {}
        self._peers: dict[int, str] = {ordinal: ""}  # by ordinal: why this GPU cannot reach the memory, or ""

    def beside(self, ordinal: int) -> Device:
        """Return another GPU of the process, opened once.

        Raises:
            TransferError: there is no such device.
        """
        found = self._others.get(ordinal)
        return self._others.setdefault(ordinal, Device(ordinal)) if found is None else found

    def enable_peer(self, ordinal: int) -> str:
        """Let this GPU's context reach the memory of another GPU; return "", or the reason why it cannot.

        The first call opens the peer's primary context, and enables access in one direction, for the whole process.
        Later calls return the first answer. Any thread may call it, also while another captures a graph.

        Args:
            ordinal: number of the peer among the visible GPUs.

        >>> try:
        ...     Device(0).enable_peer(0)  # its own memory needs nothing
        ... except TransferError:  # no GPU here
        ...     ""
        ''
        """
        why = self._peers.get(ordinal)
        if why is not None:
            return why
        cannot = f"cuda:{self.ordinal} cannot reach the memory of cuda:{ordinal}"
        try:
            why = peer_access.refusal(self.driver, self.ordinal, ordinal)
            if not why:
                with self.current(), Uncaptured(self):
                    why = peer_access.enable(self.driver, ordinal)
        except TransferError as error:  # not kept: with more free memory, the next call may succeed
            return f"{cannot}: {error}"
        # No lock: two threads may both enable access, and the driver accepts that.
        why = self._peers[ordinal] = f"{cannot}: {why}. {peer_access.REMEDY}" if why else ""
        return why

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        """Load a compiled module with ``shared`` bytes of shared memory; return the handles of module and function."""
        cu, module, function = self.driver, c_void_p(), c_void_p()
        cu.check("cuModuleLoadData", cu.cuModuleLoadData(byref(module), image))
        try:
            cu.check("cuModuleGetFunction", cu.cuModuleGetFunction(byref(function), module, name.encode()))
            if shared > DEFAULT_SHARED:
                cu.check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared))
        except TransferError:
            cu.cuModuleUnload(module)
            raise
        return module.value or 0, function.value or 0

    def launch_recorded(
        self, begin: int, end: int, kernel: tuple[int, int, int], programs: int, stream: int, argument: int,
        source: int = 0, nbytes: int = 0,
    ) -> None:  # fmt: skip
        """Record an event, copy ``nbytes`` bytes to ``argument``, launch a kernel, and record a second event: in one
        compiled call.
        """
        function, threads, shared = kernel
        which, code = self._short_calls.launch_recorded(
            self.entries, begin, end, function, programs, threads, shared, stream, argument, source, nbytes
        )
        if code:
            self._check_launch(which, code, argument, source, nbytes)

    def launch_units(
        self, begin: int, end: int, kernel: tuple[int, int, int], programs: int, stream: int, argument: int,
        source: int, nbytes: int, units: Int64Array, table: Int64Array,
    ) -> None:  # fmt: skip
        """Write a header and its units to pinned memory, then do as :meth:`launch_recorded`, in one compiled call.

        Args:
            begin, end, kernel, programs, stream, argument, nbytes: as in :meth:`launch_recorded`.
            source: address of the pinned memory.
            units: (2, n) int64: source and destination addresses.
            table: header words of the run table.
        """
        function, threads, shared = kernel
        which, code = self._short_calls.launch_units(
            self.entries, begin, end, function, programs, threads, shared, stream, argument, source, nbytes, units,
            table,
        )  # fmt: skip
        if code:
            self._check_launch(which, code, argument, source, nbytes)

    def _check_launch(self, which: int, code: int, argument: int, source: int, nbytes: int) -> None:
        what = f"{nbytes} bytes from {source:#x} to {argument:#x}"
        self.driver.check(self._calls.NAMES[which], code, what if which == self._calls.COPY else "")

    def write_behind(self, event: int, stream: int, addresses: tuple[int, ...], values: tuple[int, ...]) -> None:
        """Let a stream wait for an event, if it is not 0, and then write one word or two of pinned memory."""
        which, code = self._short_calls.write_behind(self.entries, event, stream, addresses, values)
        if code:
            name = "cuStreamWriteValue64" if which == self._short_calls.WRITE else self._calls.NAMES[which]
            self.driver.check(name, code)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` bytes, on a stream."""
        code = self.driver.cuMemcpyAsync(dst, src, nbytes, stream)
        if code:
            self.driver.check("cuMemcpyAsync", code, f"{nbytes} bytes from {src:#x} to {dst:#x}")

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int) -> None:
        """Make independent copies in one call; ``dst``, ``src``, ``size`` are addresses of ``count`` int64 numbers.

        Raises:
            DriverError: the call failed; ``at`` is the index of the first copy with an error, if the driver names it.
        """
        failed = c_size_t(count)
        code = self.driver.cuMemcpyBatchAsync(
            dst, src, size, count, _ATTRIBUTES_AT, _FIRST_AT, 1, byref(failed), stream
        )
        if code:
            at = failed.value if failed.value < count else None
            self.driver.check("cuMemcpyBatchAsync", code, f"of {count} copies" if at is None else "", at)

    def play(self, segments: Iterable[Segment], state: Int64Array) -> None:
        """Make the calls of a list in the calling thread, until a call fails.

        It is one compiled call per segment, which keeps the interpreter: the list is short.

        Args:
            segments: the list.
            state: (8,) int64: the list's state, written; see :mod:`kvplan.cuda.calls`.
        """
        base = 0
        for segment in segments:
            self._calls.play(self.entries, *segment, _ATTRIBUTES_AT, _FIRST_AT, state.ctypes.data, base)
            if state[FAILED]:
                return
            base += len(segment.rows)
        state[ENDED] = 1

    def issuer(self, name: str, inside: set[int]) -> Issuer:
        """Make a thread that plays lists of calls, in the device's context, without the interpreter."""
        from kvplan.cuda.issuer import Issuer

        return Issuer(self, name, inside)

    def watch(self, state: Int64Array, rows: int, *, hurry: bool = True) -> bool:
        """Block, without the interpreter, until rows of a list have been played or it has ended; at most about 3 ms.

        Args:
            state: (8,) int64: the list's state.
            rows: the number of rows.
            hurry: whether these rows are played without waiting for the GPU.

        Returns:
            Whether the wait is over. Otherwise, Python may handle signals, and the caller calls again.
        """
        return bool(self._calls.watch(state.ctypes.data, rows, hurry, self.entries[self._calls.NAP], WATCH_NAPS))

    def load_loops(self) -> None:
        """Load the compiled loops. Compile them if that has not been done."""
        self._calls.load()

    @cached_property
    def _calls(self) -> ModuleType:
        """Return the module of the compiled loops. The first use imports it."""
        from kvplan.cuda import calls

        return calls

    @cached_property
    def _short_calls(self) -> ModuleType:
        """Return the module of the loops for one submit. The first use imports it."""
        from kvplan.cuda import short_calls

        return short_calls

    @cached_property
    def entries(self) -> Int64Array:
        """Return the addresses of the functions that the loops call; 0 for a function that the driver does not have."""
        entries = [getattr(self.driver, name) for name in self._calls.NAMES]
        entries += [_USLEEP, self.driver.cuStreamWriteValue64_v2]
        return np.array([ctypes.cast(entry, c_void_p).value if entry else 0 for entry in entries], dtype=np.int64)

    @property
    def attributes(self) -> tuple[int, int]:
        """Return the addresses of the attributes of batched copies, and of the index of the first copy."""
        return _ATTRIBUTES_AT, _FIRST_AT


_USLEEP = ctypes.CDLL(None).usleep
_ATTRIBUTES = Attributes(ORDER_STREAM)
_FIRST = c_size_t(0)
_ATTRIBUTES_AT, _FIRST_AT = ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FIRST)

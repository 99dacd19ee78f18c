"""CUDA events that streams of several processes record and wait for, so that no side waits on the CPU."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import Self

from kvplan.base.process import generation
from kvplan.cuda.device import NOT_READY, Device
from kvplan.cuda.driver import IpcHandle
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import LayoutError, TransferError

DISABLE_TIMING, INTERPROCESS = 2, 4  # CUevent_flags


class InterprocessEvent:
    """An event of one GPU that two processes share. ``submit(plan, after=event)`` takes it as any CUDA event.

    One process makes it, and sends :attr:`handle` to the other. A wait is for the last record before the wait, by
    whichever process: first record, then tell the other process, then wait there.

    Args:
        device: the GPU; in the process that opens the event, the same GPU, or one that reaches it.

    Attributes:
        device: the GPU.
        handle: 64 bytes, from which another process opens the event.
        cuda_event: the driver's handle in this process; 0 once it is closed.

    Raises:
        TransferError: the driver cannot make the event.
    """

    def __init__(self, device: Device) -> None:
        made, handle, cu = c_void_p(), IpcHandle(), device.driver
        with device.current(), Uncaptured(device):
            cu.check("cuEventCreate", cu.cuEventCreate(byref(made), INTERPROCESS | DISABLE_TIMING))
            try:
                cu.check("cuIpcGetEventHandle", cu.cuIpcGetEventHandle(byref(handle), made.value))
            except BaseException:
                cu.cuEventDestroy_v2(made.value)
                raise
        self._set(device, bytes(handle), made.value or 0)

    def _set(self, device: Device, handle: bytes, event: int) -> None:
        self.device = device
        self.handle = handle
        self.cuda_event = event
        self._made_in = generation()

    @classmethod
    def opened(cls, device: Device, handle: bytes) -> Self:
        """Open an event that another process made.

        Args:
            device: the GPU whose streams record it and wait for it.
            handle: the other process's :attr:`handle`.

        Raises:
            LayoutError: the handle has another size.
            TransferError: the driver refuses the handle, for example because the other process has ended.
        """
        self, made, cu = cls.__new__(cls), c_void_p(), device.driver
        if len(handle) != 64:
            raise LayoutError(f"the handle of an event has {len(handle)} bytes; expected 64")
        with device.current(), Uncaptured(device):
            code = cu.cuIpcOpenEventHandle(byref(made), IpcHandle.from_buffer_copy(handle))
            cu.check("cuIpcOpenEventHandle", code)
        self._set(device, handle, made.value or 0)
        return self

    def record(self, stream: int) -> None:
        """Record the event on a stream of its GPU, behind all work that was issued on it so far."""
        with self.device.current():
            self.device.record(self._here(), stream)

    def wait(self, stream: int) -> None:
        """Let later work on a stream of this process wait for the last record; return at once."""
        with self.device.current():
            self.device.wait(stream, self._here())

    def passed(self) -> bool:
        """Return whether the last record has passed; never block.

        Raises:
            TransferError: the event is closed, or work on the GPU failed.
        """
        cu = self.device.driver
        code = int(cu.cuEventQuery(self._here()))
        if code != NOT_READY:
            cu.check("cuEventQuery", code)
        return code != NOT_READY

    def synchronize(self) -> None:
        """Block the calling thread, without the interpreter, until the last record has passed."""
        self.device.synchronize(self._here())

    def close(self) -> None:
        """Destroy this process's end. The other process's end stays. In a child of a fork it does nothing."""
        event, self.cuda_event = self.cuda_event, 0
        if event and self._made_in == generation():
            with self.device.current(), Uncaptured(self.device):
                self.device.driver.cuEventDestroy_v2(event)

    def _here(self) -> int:
        if not self.cuda_event or self._made_in != generation():
            raise TransferError("the event is closed, or it is of the parent of this process")
        return self.cuda_event

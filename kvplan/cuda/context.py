"""One GPU's primary context: whose it is, its streams, events and memory.

The methods call the entry points of ``driver.py`` with plain integers: addresses and handles.
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int, c_uint64, c_void_p

from kvplan.cuda.driver import (
    DEVICE_MAP,
    MAJOR,
    MAX_PITCH,
    MINOR,
    MULTIPROCESSORS,
    NON_BLOCKING,
    PORTABLE,
    SUCCESS,
    driver,
)
from kvplan.cuda.scopes import Current, Uncaptured


class Context:
    """A GPU's primary context, which torch and other libraries share.

    Args:
        ordinal: number of the GPU among the visible ones.

    Attributes:
        driver: the driver's entry points.
        ordinal: as given.
        context: the driver's handle.
        arch: compute capability, such as 90.
        multiprocessors: number of SMs.
        max_pitch: most bytes between two rows of a 2-D copy.

    Raises:
        TransferError: there is no driver, or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        self.driver = cu = driver()
        self.ordinal = ordinal
        context = c_void_p()
        self._handle = cu.handle(ordinal)
        cu.check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(byref(context), self._handle))
        self.context = context.value
        self.arch = 10 * self.attribute(MAJOR) + self.attribute(MINOR)
        self.multiprocessors = self.attribute(MULTIPROCESSORS)
        self.max_pitch = self.attribute(MAX_PITCH)

    def attribute(self, which: int) -> int:
        """Return an attribute of the device."""
        value = c_int()
        self.driver.check("cuDeviceGetAttribute", self.driver.cuDeviceGetAttribute(byref(value), which, self._handle))
        return value.value

    def current(self) -> Current:
        """Make it the calling thread's current device within a ``with``. Afterwards the previous device is current."""
        return Current(self.driver, self.context)

    def enter(self) -> None:
        """Make it the calling thread's current device from now on, for a thread of kvplan's own.

        Raises:
            TransferError: the driver refuses it.
        """
        self.driver.check("cuCtxSetCurrent", self.driver.cuCtxSetCurrent(self.context))

    def is_current(self) -> bool:
        """Return whether it is the calling thread's current device, so that :meth:`current` would change nothing."""
        now = c_void_p()
        self.driver.cuCtxGetCurrent(now)  # ctypes passes the address of `now`, as byref(now) does in twice the time
        return now.value == self.context

    def stream(self, *, urgent: bool = False, made: c_void_p | None = None) -> int:
        """Create a stream that does not wait for the legacy default stream, and return its handle.

        Args:
            urgent: whether it has the highest priority.
            made: a cell for the handle, so that no exception after the call loses it.
        """
        cu, least, greatest, made = self.driver, c_int(), c_int(), c_void_p() if made is None else made
        cu.check("cuCtxGetStreamPriorityRange", cu.cuCtxGetStreamPriorityRange(byref(least), byref(greatest)))
        priority = greatest.value if urgent else least.value
        with Uncaptured(self):
            code = cu.cuStreamCreateWithPriority(byref(made), NON_BLOCKING, priority)
        cu.check("cuStreamCreateWithPriority", code)
        return made.value or 0

    def event(self, made: c_void_p | None = None) -> int:
        """Create an event that records the time, and return its handle; ``made`` is as in :meth:`stream`."""
        made = c_void_p() if made is None else made
        self.driver.check("cuEventCreate", self.driver.cuEventCreate(byref(made), 0))
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream, behind all work issued on it so far."""
        code = self.driver.cuEventRecord(event, stream)
        if code:
            self.driver.check("cuEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for the last record of an event."""
        code = self.driver.cuStreamWaitEvent(stream, event, 0)
        if code:
            self.driver.check("cuStreamWaitEvent", code)

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds between two events that have passed."""
        taken = c_float()
        self.driver.check("cuEventElapsedTime", self.driver.cuEventElapsedTime(taken, begin, end))  # see is_current()
        return max(taken.value, 0.0) / 1e3

    def synchronize(self, event: int) -> None:
        """Block the calling thread, without the interpreter, until an event has passed."""
        self.driver.check("cuEventSynchronize", self.driver.cuEventSynchronize(event))

    def capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a graph."""
        status = c_int()
        return self.driver.cuStreamIsCapturing(stream, status) == SUCCESS and status.value != 0  # see is_current()

    def allocate(self, nbytes: int) -> int:
        """Allocate GPU memory, and return its address."""
        made = c_uint64()
        with Uncaptured(self):
            code = self.driver.cuMemAlloc_v2(byref(made), nbytes)
        self.driver.check("cuMemAlloc", code, f"{nbytes} bytes")
        return made.value

    def free(self, address: int) -> None:
        """Free GPU memory."""
        self.driver.cuMemFree_v2(address)

    def allocate_host(self, nbytes: int) -> int:
        """Allocate pinned memory that every device reaches at the same address, and return this address."""
        made = c_void_p()
        with Uncaptured(self):
            code = self.driver.cuMemHostAlloc(byref(made), nbytes, PORTABLE | DEVICE_MAP)
        self.driver.check("cuMemHostAlloc", code, f"{nbytes} bytes")
        return made.value or 0

    def free_host(self, address: int) -> None:
        """Free pinned memory."""
        self.driver.cuMemFreeHost(address)

    def pointer(self, address: int, attribute: int) -> int | None:
        """Return an attribute of an address; None if the driver does not know the address."""
        value = c_uint64()
        code = self.driver.cuPointerGetAttribute(byref(value), attribute, address)
        return value.value if code == SUCCESS else None

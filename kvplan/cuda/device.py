"""One GPU through the CUDA driver: its primary context, streams, events, memory and peers, and lists of calls.

The methods call the entry points of ``driver.py`` with plain integers: addresses and handles. They pass arrays of
descriptors to the driver without a Python object for each descriptor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from functools import partial
from types import ModuleType

import numpy as np

from kvplan.base.process import cached_property
from kvplan.cuda.driver import DEVICE_MAP, NOT_READY, PORTABLE, SUCCESS, Driver, driver
from kvplan.cuda.peers import check_reach
from kvplan.cuda.rows import FAILED, NAMES, error_of, new_state
from kvplan.errors import PathError, TransferError
from kvplan.layout.strides import Int64Array

__all__ = ["NOT_READY", "Device", "Uncaptured"]

MAX_PITCH, MULTIPROCESSORS, MAJOR, MINOR = 11, 16, 75, 76  # CUdevice_attribute
MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a kernel gets without asking
NON_BLOCKING = 1  # CUstream_flags
RELAXED = 2  # CUstreamCaptureMode
PEER_ALREADY_ENABLED = 704

WATCH_NAPS = 50  # naps of 20 us after which a waiting thread lets Python handle signals


class Current:
    """A ``with`` in which a context is current for the calling thread."""

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        before = c_void_p()
        self._driver.cuCtxGetCurrent(before)  # ctypes passes its address, as byref(before) does in twice the time
        self._before = before.value
        if self._before != self._context:
            self._driver.call("cuCtxSetCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        if self._before != self._context:
            self._driver.cuCtxSetCurrent(self._before)


class Uncaptured:
    """A ``with`` in which this thread may make calls that a graph capture in any thread would forbid."""

    def __init__(self, device: Device) -> None:
        self._driver, self._mode = device.driver, c_int(RELAXED)

    def __enter__(self) -> None:
        self._driver.cuThreadExchangeStreamCaptureMode(self._mode)

    def __exit__(self, *_: object) -> None:
        self._driver.cuThreadExchangeStreamCaptureMode(self._mode)


class Device:
    """One GPU in its primary context, which torch and other libraries share.

    Args:
        ordinal: number of the GPU among the visible ones.

    Attributes:
        driver: the driver's entry points.
        ordinal: as given.
        context: the driver's handle of the primary context.
        arch: compute capability, such as 90.
        multiprocessors: number of SMs.
        max_pitch: most bytes between two rows of a 2-D copy.

    Raises:
        TransferError: there is no driver, or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        self.driver = cu = driver()
        self.ordinal = ordinal
        handle = cu.handle(ordinal)
        self.context: int = cu.get("cuDevicePrimaryCtxRetain", handle)
        major, minor, self.multiprocessors, self.max_pitch = (
            cu.get("cuDeviceGetAttribute", which, handle) for which in (MAJOR, MINOR, MULTIPROCESSORS, MAX_PITCH)
        )
        self.arch: int = 10 * major + minor
        self._others: dict[int, Device] = {}
        self._peers = {ordinal}  # GPUs whose memory this one reaches

    def current(self) -> Current:
        """Make it the calling thread's current device within a ``with``. Afterwards the previous device is current."""
        return Current(self.driver, self.context)

    def enter(self) -> None:
        """Make it the calling thread's current device from now on, for a thread of kvplan's own.

        Raises:
            TransferError: the driver refuses it.
        """
        self.driver.call("cuCtxSetCurrent", self.context)

    def is_current(self) -> bool:
        """Return whether it is the calling thread's current device, so that :meth:`current` would change nothing."""
        now = c_void_p()
        self.driver.cuCtxGetCurrent(now)  # ctypes passes the address of `now`, as byref(now) does in twice the time
        return now.value == self.context

    def beside(self, ordinal: int) -> Device:
        """Return another GPU of the process, opened once.

        Raises:
            TransferError: there is no such device.
        """
        if ordinal not in self._others:
            self._others[ordinal] = Device(ordinal)
        return self._others[ordinal]

    def enable_peer(self, ordinal: int) -> str:
        """Let this GPU's context reach the memory of another GPU; return "", or the reason why it cannot.

        The first call opens the peer's primary context, and enables access in one direction, for the whole process.
        Any thread may call it, also while another captures a graph.

        Args:
            ordinal: number of the peer among the visible GPUs.

        >>> try:
        ...     Device(0).enable_peer(0)  # its own memory needs nothing
        ... except TransferError:  # no GPU here
        ...     ""
        ''
        """
        if ordinal in self._peers:
            return ""
        try:
            check_reach(self.driver, self.ordinal, ordinal)
            with self.current(), Uncaptured(self):
                code = self.driver.cuCtxEnablePeerAccess(self.beside(ordinal).context, 0)
            if code != PEER_ALREADY_ENABLED:  # by torch, NCCL or another thread
                self.driver.check("cuCtxEnablePeerAccess", code)
        except PathError as error:
            return str(error)
        except TransferError as error:
            return f"cuda:{self.ordinal} cannot reach the memory of cuda:{ordinal}: {error}"
        self._peers.add(ordinal)
        return ""

    def stream(self, *, urgent: bool = False) -> int:
        """Create a stream that does not wait for the legacy default stream, and return its handle.

        Args:
            urgent: whether it has the highest priority.
        """
        least, greatest = self.driver.get("cuCtxGetStreamPriorityRange")
        with Uncaptured(self):
            return int(self.driver.get("cuStreamCreateWithPriority", NON_BLOCKING, greatest if urgent else least))

    def event(self) -> int:
        """Create an event that records the time, and return its handle."""
        return int(self.driver.get("cuEventCreate", 0))

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream, behind all work issued on it so far."""
        self.driver.check("cuEventRecord", self.driver.cuEventRecord(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for the last record of an event."""
        self.driver.check("cuStreamWaitEvent", self.driver.cuStreamWaitEvent(stream, event, 0))

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds between two events that have passed."""
        taken = c_float()
        self.driver.check("cuEventElapsedTime", self.driver.cuEventElapsedTime(taken, begin, end))  # see is_current()
        return max(taken.value, 0.0) / 1e3

    def synchronize(self, event: int) -> None:
        """Block the calling thread, without the interpreter, until an event has passed."""
        self.driver.call("cuEventSynchronize", event)

    def capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a graph."""
        status = c_int()
        return self.driver.cuStreamIsCapturing(stream, status) == SUCCESS and status.value != 0  # see is_current()

    def allocate(self, nbytes: int) -> int:
        """Allocate GPU memory, and return its address."""
        with Uncaptured(self):
            return int(self.driver.get("cuMemAlloc_v2", nbytes, what=f"{nbytes} bytes"))

    def free(self, address: int) -> None:
        """Free GPU memory."""
        self.driver.cuMemFree_v2(address)

    def allocate_host(self, nbytes: int) -> int:
        """Allocate pinned memory that every device reaches at the same address, and return this address."""
        with Uncaptured(self):
            return int(self.driver.get("cuMemHostAlloc", nbytes, PORTABLE | DEVICE_MAP, what=f"{nbytes} bytes"))

    def free_host(self, address: int) -> None:
        """Free pinned memory."""
        self.driver.cuMemFreeHost(address)

    def pointer(self, address: int, attribute: int) -> int | None:
        """Return an attribute of an address; None if the driver does not know the address."""
        value = c_uint64()
        code = self.driver.cuPointerGetAttribute(byref(value), attribute, address)
        return value.value if code == SUCCESS else None

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        """Load a compiled module with ``shared`` bytes of shared memory; return the handles of module and function."""
        module = self.driver.get("cuModuleLoadData", image)
        try:
            function = self.driver.get("cuModuleGetFunction", module, name.encode())
            if shared > DEFAULT_SHARED:
                self.driver.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        except TransferError:
            self.driver.cuModuleUnload(module)
            raise
        return module, function

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` bytes, on a stream."""
        what = f"{nbytes} bytes from {src:#x} to {dst:#x}"
        self.driver.call("cuMemcpyAsync", dst, src, nbytes, stream, what=what)

    @cached_property
    def play(self) -> Callable[[Int64Array, Int64Array], None]:
        """Return the function that makes the calls of a short list in the calling thread, until a call fails.

        It keeps the interpreter.

        Args:
            rows: (n, 8) int64; see :mod:`kvplan.cuda.rows`.
            state: (6,) int64: the list's state, written.
        """
        return partial(self._player.play, self.entries)

    def issue(self, rows: Int64Array) -> None:
        """Make the calls of a short list, and raise the error of a call that fails."""
        state = new_state()
        self.play(rows, state)
        if state[FAILED]:
            raise error_of(self.driver, rows, state)

    def watch(self, state: Int64Array, rows: int, *, hurry: bool = True) -> bool:
        """Block, without the interpreter, until rows of a list have been played or it has ended; at most about 1 ms.

        Args:
            state: (6,) int64: the list's state.
            rows: the number of rows.
            hurry: whether these rows are played without waiting for the GPU.

        Returns:
            Whether the wait is over. Otherwise, Python may handle signals, and the caller calls again.
        """
        return bool(self._player.watch(self.entries, state, rows, WATCH_NAPS, hurry))

    def load_loops(self) -> None:
        """Load the compiled loops. Compile them if that has not been done."""
        self._player.load()

    @cached_property
    def _player(self) -> ModuleType:
        """Return the module of the compiled loops. The first use imports it, and numba."""
        from kvplan.cuda import player

        return player

    @cached_property
    def entries(self) -> Int64Array:
        """Return the addresses that the loops need; 0 for a function that the driver does not have."""
        functions = [*(getattr(self.driver, name) for name in NAMES), _LIBRARY.usleep, _LIBRARY.sem_wait]
        addresses = [ctypes.cast(one, c_void_p).value if one else 0 for one in functions]
        return np.array([*addresses, ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FIRST)], dtype=np.int64)


_LIBRARY = ctypes.CDLL(None)
# CUmemcpyAttributes: source access order; kind and number of a location, for the source and for the destination; flags.
# In the order of the stream: to read the source early (ANY) was not measurably faster.
_ATTRIBUTES = (c_int * 6)(1)
_FIRST = c_size_t(0)

"""The CUDA driver, called by address: contexts, streams, events, memory, copies, launches.

The one file that touches the driver. It takes and gives plain integers (addresses and handles), so that arrays of
descriptors go to the driver as they are, without an object for each.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import TracebackType
from typing import Any

from kvplan.errors import TransferError

SUCCESS, INVALID_VALUE, NOT_READY = 0, 1, 600
BATCH_VERSION = 12080  # the entry point of 12.8, which says where a batch failed; later forms do not
PORTABLE, DEVICE_MAP = 1, 2
MEMORY_TYPE, DEVICE_POINTER, RANGE_START, RANGE_SIZE = 2, 3, 11, 12  # CUpointer_attribute
HOST_MEMORY = 1  # CUmemorytype
MAX_PITCH, MULTIPROCESSORS, MAJOR, MINOR = 11, 16, 75, 76  # CUdevice_attribute
MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a kernel gets without asking
NON_BLOCKING = 1
RELAXED = 2  # CUstreamCaptureMode
ORDER_STREAM = 1  # of CUmemcpySrcAccessOrder; ANY reads early, and gains nothing that could be measured

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
}
# Calls of less than a microsecond that never wait. They keep the interpreter's lock: letting go of it and taking it
# again costs more, and much more where other threads want it.
_BRIEF = frozenset({
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuEventQuery", "cuEventRecord", "cuStreamIsCapturing", "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
})  # fmt: skip
_BATCH = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, POINTER(c_size_t), c_void_p
)


class DriverError(TransferError):
    """A call of the driver that failed.

    Attributes:
        call: its name.
        code: what it returned.
        at: index of the first offending copy of a batch, where the driver knows it.
    """

    def __init__(self, message: str, call: str, code: int, at: int | None = None) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.at = at


class Driver:
    """The entry points of one loaded driver, as attributes by their names."""

    def __init__(self, path: str) -> None:
        library, brief = ctypes.CDLL(path), ctypes.PyDLL(path)
        for name, types in _SIGNATURES.items():
            entry = getattr(brief if name in _BRIEF else library, name)
            entry.argtypes, entry.restype = types, c_int
            setattr(self, name, entry)
        self.check("cuInit", self.cuInit(0))
        version = c_int()
        self.check("cuDriverGetVersion", self.cuDriverGetVersion(byref(version)))
        self.version = version.value
        self.cuMemcpyBatchAsync = self._entry(b"cuMemcpyBatchAsync", BATCH_VERSION)

    def __getattr__(self, name: str) -> Any:  # what __init__ sets, for type checkers
        raise AttributeError(name)

    def _entry(self, symbol: bytes, version: int) -> Any:
        """An entry point by name and version, or None. The driver may say success and give NULL."""
        address, status = c_void_p(), c_int()
        code = self.cuGetProcAddress_v2(symbol, byref(address), version, 0, byref(status))
        return _BATCH(address.value) if code == SUCCESS and address.value else None

    def check(self, call: str, code: int, what: str = "", at: int | None = None) -> None:
        """Raise a :class:`DriverError` unless ``code`` is success."""
        if code != SUCCESS:
            raise DriverError(f"{call} returned {self.name(code)}{what and ': '}{what}", call, code, at)

    def name(self, code: int) -> str:
        """The error's name, number and meaning."""
        name, meaning = c_char_p(), c_char_p()
        self.cuGetErrorName(code, byref(name))
        self.cuGetErrorString(code, byref(meaning))
        return f"{(name.value or b'an unknown error').decode()} ({code}, {(meaning.value or b'').decode()})"


@functools.cache
def driver() -> Driver:
    """The driver of this process.

    Raises:
        TransferError: there is none, or it does not start.
    """
    try:
        return Driver("libcuda.so.1")
    except OSError as error:
        raise TransferError(f"there is no CUDA driver: {error}") from None
    except AttributeError as error:
        raise TransferError(f"the CUDA driver is too old (12.0 is the first that serves): {error}") from None


class Device:
    """One GPU through its primary context, which torch and others share.

    Args:
        ordinal: its number among those visible.

    Raises:
        TransferError: no driver, or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        self.driver = cu = driver()
        self.ordinal = ordinal
        count, number, context = c_int(), c_int(), c_void_p()
        cu.check("cuDeviceGetCount", cu.cuDeviceGetCount(byref(count)))
        if not 0 <= ordinal < count.value:
            raise TransferError(f"there is no CUDA device {ordinal}; {count.value} are visible")
        cu.check("cuDeviceGet", cu.cuDeviceGet(byref(number), ordinal))
        cu.check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(byref(context), number))
        self.context = context.value
        self._number = number.value
        self.arch = 10 * self.attribute(MAJOR) + self.attribute(MINOR)
        self.multiprocessors = self.attribute(MULTIPROCESSORS)
        self.max_pitch = self.attribute(MAX_PITCH)
        self._cell = threading.local()

    def attribute(self, which: int) -> int:
        """A number that the driver knows of the device."""
        value = c_int()
        self.driver.check("cuDeviceGetAttribute", self.driver.cuDeviceGetAttribute(byref(value), which, self._number))
        return value.value

    def current(self) -> _Current:
        """Make it the calling thread's device within a ``with``, and what was before afterwards."""
        return _Current(self)

    def stream(self, *, urgent: bool = False) -> int:
        """A stream that does not wait for the legacy default stream; an urgent one of the highest priority."""
        cu, least, greatest, made = self.driver, c_int(), c_int(), c_void_p()
        cu.check("cuCtxGetStreamPriorityRange", cu.cuCtxGetStreamPriorityRange(byref(least), byref(greatest)))
        priority = greatest.value if urgent else least.value
        cu.check("cuStreamCreateWithPriority", cu.cuStreamCreateWithPriority(byref(made), NON_BLOCKING, priority))
        return made.value or 0

    def event(self) -> int:
        """An event that keeps the time."""
        made = c_void_p()
        self.driver.check("cuEventCreate", self.driver.cuEventCreate(byref(made), 0))
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Record an event behind what the stream has."""
        code = self.driver.cuEventRecord(event, stream)
        if code:
            self.driver.check("cuEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for what the event was last recorded behind."""
        code = self.driver.cuStreamWaitEvent(stream, event, 0)
        if code:
            self.driver.check("cuStreamWaitEvent", code)

    def seconds(self, begin: int, end: int) -> float:
        """Between two events that have passed."""
        taken = c_float()
        self.driver.check("cuEventElapsedTime", self.driver.cuEventElapsedTime(byref(taken), begin, end))
        return max(taken.value, 0.0) / 1e3

    def capturing(self, stream: int) -> bool:
        """Whether a stream is being captured into a graph."""
        status = c_int()
        code = self.driver.cuStreamIsCapturing(stream, byref(status))
        return code == SUCCESS and status.value != 0

    def allocate(self, nbytes: int) -> int:
        """Memory of the device."""
        made = c_uint64()
        self.driver.check("cuMemAlloc", self.driver.cuMemAlloc_v2(byref(made), nbytes), f"{nbytes} bytes")
        return made.value

    def free(self, address: int) -> None:
        """Give memory of the device back."""
        self.driver.cuMemFree_v2(address)

    def allocate_host(self, nbytes: int) -> int:
        """Pinned memory that every device reaches under the same address."""
        made = c_void_p()
        code = self.driver.cuMemHostAlloc(byref(made), nbytes, PORTABLE | DEVICE_MAP)
        self.driver.check("cuMemHostAlloc", code, f"{nbytes} bytes")
        return made.value or 0

    def free_host(self, address: int) -> None:
        """Give pinned memory back."""
        self.driver.cuMemFreeHost(address)

    def pointer(self, address: int, attribute: int) -> int | None:
        """What the driver knows of an address, or None where it knows nothing."""
        value = c_uint64()
        code = self.driver.cuPointerGetAttribute(byref(value), attribute, address)
        return value.value if code == SUCCESS else None

    def load(self, image: bytes, name: str, shared: int) -> tuple[int, int]:
        """A compiled module and its function, which may use ``shared`` bytes of dynamic shared memory."""
        cu, module, function = self.driver, c_void_p(), c_void_p()
        cu.check("cuModuleLoadData", cu.cuModuleLoadData(byref(module), image))
        cu.check("cuModuleGetFunction", cu.cuModuleGetFunction(byref(function), module, name.encode()))
        if shared > DEFAULT_SHARED:
            cu.check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared))
        return module.value or 0, function.value or 0

    def launch(self, function: int, programs: int, threads: int, shared: int, stream: int, argument: int) -> None:
        """Launch a kernel of one pointer argument.

        Triton's kernels may declare scratch pointers behind their own; two null ones stand ready for those that do.
        """
        cell = getattr(self._cell, "arguments", None)
        if cell is None:
            values = (c_uint64 * 3)()
            first = ctypes.addressof(values)
            pointers = (c_void_p * 3)(first, first + 8, first + 16)
            cell = self._cell.arguments = (values, pointers, ctypes.addressof(pointers))
        cell[0][0] = argument  # copied by the driver before the launch returns
        code = self.driver.cuLaunchKernel(function, programs, 1, 1, threads, 1, 1, shared, stream, cell[2], None)
        if code:
            self.driver.check("cuLaunchKernel", code)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """One copy."""
        code = self.driver.cuMemcpyAsync(dst, src, nbytes, stream)
        if code:
            self.driver.check("cuMemcpyAsync", code, f"{nbytes} bytes from {src:#x} to {dst:#x}")

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int) -> None:
        """Independent copies in one call; ``dst``, ``src``, ``size`` are addresses of int64 arrays of ``count``.

        Raises:
            DriverError: with ``at``, the index of the first copy that is wrong.
        """
        failed = c_size_t(count)
        code = self.driver.cuMemcpyBatchAsync(
            dst, src, size, count, _ATTRIBUTES_AT, _FIRST_AT, 1, byref(failed), stream
        )
        if code:
            at = failed.value if failed.value < count else None
            self.driver.check("cuMemcpyBatchAsync", code, f"of {count} copies" if at is None else "", at)

    def copy_2d(self, parameters: int, stream: int) -> int:
        """One 2-D copy; ``parameters`` is the address of a CUDA_MEMCPY2D. Returns what the driver returns."""
        return int(self.driver.cuMemcpy2DAsync_v2(parameters, stream))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: source access order, location hints (none), flags."""

    _fields_ = (
        ("order", c_int),
        ("src_type", c_int),
        ("src_id", c_int),
        ("dst_type", c_int),
        ("dst_id", c_int),
        ("flags", c_uint),
    )


_ATTRIBUTES = _Attributes(ORDER_STREAM)
_FIRST = c_size_t(0)
_ATTRIBUTES_AT, _FIRST_AT = ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FIRST)


class _Current:
    """A device made current, for the calling thread."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before: int | None = None

    def __enter__(self) -> None:
        cu, before = self._device.driver, c_void_p()
        cu.cuCtxGetCurrent(byref(before))
        self._before = before.value
        if self._before != self._device.context:
            cu.check("cuCtxSetCurrent", cu.cuCtxSetCurrent(self._device.context))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before != self._device.context:
            self._device.driver.cuCtxSetCurrent(self._before)


class Uncaptured:
    """Within a ``with``, calls that a capture in any thread would forbid are allowed to this one."""

    __slots__ = ("_driver", "_mode")

    def __init__(self, device: Device) -> None:
        self._driver = device.driver
        self._mode = c_int(RELAXED)

    def __enter__(self) -> None:
        self._driver.cuThreadExchangeStreamCaptureMode(byref(self._mode))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._driver.cuThreadExchangeStreamCaptureMode(byref(self._mode))

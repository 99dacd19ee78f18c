"""The entry points of the CUDA driver, with their types; and the error that names a call that failed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from kvplan.errors import TransferError

SUCCESS, NOT_READY = 0, 600
BATCH_VERSION = 12080  # the entry point of 12.8 tells which copy of a batch failed; later versions do not
PORTABLE, DEVICE_MAP = 1, 2
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12  # CUpointer_attribute
ACCESS_FLAGS = 16  # CUpointer_attribute: what the current context may do, 0 nothing, 1 read, 3 read and write
LEGACY_IPC, HANDLE_TYPES, MEMORY_POOL = 10, 14, 17  # CUpointer_attribute: how another process may open the memory
HOST_MEMORY = 1  # CUmemorytype
POSIX_FD, FABRIC = 1, 8  # CUmemAllocationHandleType, as bits


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes that another process opens. The driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


# The types of the arguments of each entry point. The first pointers are results: see Driver.get.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_void_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
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
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_uint64),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_uint64, c_int),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuStreamWaitValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
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
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
}
# Calls of less than 1 us. They only wait if about 1,000 calls are pending on a stream. They keep the interpreter's
# lock: to release and take it takes longer than the call, and much longer if other threads wait for it.
_BRIEF = frozenset({
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuEventElapsedTime", "cuEventQuery", "cuEventRecord", "cuStreamIsCapturing",
    "cuStreamWaitEvent", "cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2", "cuThreadExchangeStreamCaptureMode",
})  # fmt: skip


class Driver:
    """The entry points of one driver, as attributes with their names.

    Args:
        library: the library, or an object that stands for it: see :func:`use`.
        brief: the same library, for calls that keep the interpreter's lock.

    Attributes:
        compile_kernel: compiles the copy kernel instead of Triton, for a library that runs no machine code; or None.
    """

    def __init__(self, library: Any, brief: Any) -> None:
        self.compile_kernel = getattr(library, "compile_kernel", None)
        for name, types in SIGNATURES.items():
            entry = getattr(brief if name in _BRIEF else library, name)
            entry.argtypes, entry.restype = types, c_int
            setattr(self, name, entry)
        self.call("cuInit", 0)
        self.version: int = self.get("cuDriverGetVersion")
        # The driver may return success, but no address.
        address, status = c_void_p(), c_int()
        code = self.cuGetProcAddress_v2(b"cuMemcpyBatchAsync", byref(address), BATCH_VERSION, 0, byref(status))
        self.cuMemcpyBatchAsync = address if code == SUCCESS and address.value else None  # called by address

    def __getattr__(self, name: str) -> Any:  # for type checkers: __init__ sets the attributes
        raise AttributeError(name)

    def call(self, name: str, *arguments: Any, what: str = "") -> None:
        """Call an entry point by its name; raise TransferError unless it returns success."""
        self.check(name, getattr(self, name)(*arguments), what)

    def get(self, name: str, *arguments: Any, what: str = "") -> Any:
        """Call an entry point that writes its results through its first parameters, and return them.

        Args:
            name: name of the entry point.
            arguments: the parameters behind those of the results.
            what: more words for the error.
        """
        types = SIGNATURES[name]
        results = [kind._type_() for kind in types[: len(types) - len(arguments)]]
        self.call(name, *map(byref, results), *arguments, what=what)
        values = [result.value or 0 for result in results]
        return values[0] if len(values) == 1 else values

    def check(self, call: str, code: int, what: str = "") -> None:
        """Raise TransferError unless ``code`` is success."""
        if code != SUCCESS:
            raise TransferError(f"{call.removesuffix('_v2')} returned {self.name(code)}{what and ': '}{what}")

    def devices(self) -> int:
        """Return the number of visible GPUs."""
        return int(self.get("cuDeviceGetCount"))

    def handle(self, ordinal: int) -> int:
        """Return the driver's handle of a visible GPU.

        Raises:
            TransferError: there is no such GPU.
        """
        visible = self.devices()
        if not 0 <= ordinal < visible:
            raise TransferError(f"there is no CUDA device {ordinal}; {visible} are visible")
        return int(self.get("cuDeviceGet", ordinal))

    def name(self, code: int) -> str:
        """Return the name, number and meaning of an error code."""
        name, meaning = c_char_p(), c_char_p()
        self.cuGetErrorName(code, byref(name))
        self.cuGetErrorString(code, byref(meaning))
        return f"{(name.value or b'an unknown error').decode()} ({code}, {(meaning.value or b'').decode()})"


_handed_in: list[Driver] = []  # by calls of use() that have not ended, the last one first


@contextmanager
def use(library: Any) -> Iterator[None]:
    """Let an object stand for the CUDA driver within a ``with``, in all threads.

    It is for tests, and for machines without a GPU. Executors, agents and pools that are made within the ``with`` call
    this object, and keep it until they are closed.

    Args:
        library: an object with CUDA's entry points as attributes, by the names that kvplan looks up (a missing one is
            an AttributeError): ``cuInit``, ``cuDeviceGetCount``, ``cuMemcpyAsync``, and so on. Each is a ctypes
            function, such as ``ctypes.CFUNCTYPE`` makes, because compiled loops call it by its address. kvplan sets its
            ``argtypes``. It does what CUDA's manual says, and returns a CUresult. ``cuGetProcAddress_v2`` may find
            ``cuMemcpyBatchAsync``.

            A library that runs no machine code also has ``compile_kernel(shape, arch)``, which returns an object with
            what Triton would make: ``image`` and ``name`` for ``cuModuleLoadData`` and ``cuModuleGetFunction``, and
            the ``shared`` bytes and ``threads`` of a launch.

    Raises:
        TransferError: the object is not a driver that starts.

    >>> try:
    ...     with use(ctypes.CDLL(None)):  # the C library has no cuInit
    ...         pass
    ... except TransferError as error:
    ...     "cuInit" in str(error)
    True
    """
    _handed_in.insert(0, made := _started(library, library))
    try:
        yield
    finally:
        _handed_in.remove(made)


def driver() -> Driver:
    """Return the driver that :func:`use` was given; otherwise load the machine's driver, once per process.

    Raises:
        TransferError: there is no driver, or it does not start.
    """
    return _handed_in[0] if _handed_in else loaded()


@functools.cache
def loaded() -> Driver:
    """Load the machine's driver, once per process.

    Raises:
        TransferError: there is no driver, or it does not start.
    """
    try:
        library, brief = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise TransferError(f"there is no CUDA driver: {error}") from None
    return _started(library, brief)


def _started(library: Any, brief: Any) -> Driver:
    try:
        return Driver(library, brief)
    except AttributeError as error:
        raise TransferError(f"the CUDA driver is too old (12.0 is the first that serves): {error}") from None

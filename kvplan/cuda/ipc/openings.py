"""GPU memory of other processes, opened in the context of the GPU whose kernels read and write it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64
from dataclasses import dataclass, field

from kvplan.base.process import generation
from kvplan.cuda.device import Device
from kvplan.cuda.driver import INVALID_VALUE, LAZY_PEER_ACCESS, POSIX_FD, DriverError, IpcHandle
from kvplan.cuda.ipc.exports import Export
from kvplan.cuda.ipc.gpu_uuids import check_reach, ordinal_here
from kvplan.cuda.ipc.mapped_bytes import MappedBytes
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import LayoutError, PathError, TransferError

PORTION = 64  # descriptors that are open at a time
READ_WRITE = 3  # CUmemAccess_flags
ON_DEVICE = 1  # CUmemLocationType

Fetch = Callable[[int, int], Sequence[int]]  # descriptors of the pieces from one index up to another


class _Access(ctypes.Structure):
    """CUmemAccessDesc: a GPU, and what it may do."""

    _fields_ = (("kind", c_int), ("ordinal", c_int), ("flags", c_int))


@dataclass(eq=False, slots=True)
class _Mapping:
    """One mapping of this process: the context, the address, and how many openings use it."""

    device: Device
    address: int
    nbytes: int
    unmap: Callable[[], None]
    made_in: int
    users: int = 1


@dataclass(slots=True)
class _Process:
    """All mappings of this process. A handle opens once in a process and context, so openings share its mapping.

    Attributes:
        made_in: the number of the process; a child of a fork has none of its parent's mappings.
        lock: lock for the others.
        by_handle: mappings by context and handle.
        alive: all mappings, also those without a handle.
    """

    made_in: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    by_handle: dict[tuple[int | None, bytes], _Mapping] = field(default_factory=dict)
    alive: list[_Mapping] = field(default_factory=list)


_processes = [_Process(generation())]


def _here() -> _Process:
    """Return the mappings of this process. A child takes a new lock: a thread of its parent may have held the old."""
    now = generation()
    if _processes[0].made_in != now:
        _processes[0] = _Process(now)
    return _processes[0]


class Opening:
    """Memory of another process, mapped here until :meth:`close`.

    Attributes:
        address: address of the first byte in this process.
        nbytes: bytes that may be read and written.
        owner: this process's number of the GPU that has the memory.
        ordinal: number of the GPU in whose context it is mapped; only kernels of this GPU reach it.
    """

    __slots__ = ("_key", "_mapping", "address", "nbytes", "ordinal", "owner")

    def __init__(self, mapping: _Mapping, key: tuple[int | None, bytes] | None, export: Export, owner: int) -> None:
        self._mapping: _Mapping | None = mapping
        self._key = key
        self.address, self.nbytes = mapping.address, export.nbytes
        self.owner, self.ordinal = owner, mapping.device.ordinal

    def bytes_at(self, address: int, nbytes: int) -> MappedBytes:
        """Return some of its bytes, to be read and written by the CPU.

        Raises:
            LayoutError: it is closed.
        """
        mapping = self._mapping
        if mapping is None:
            raise LayoutError(f"memory of another process at {address:#x} is no longer mapped")
        return MappedBytes(mapping.device, address, nbytes)

    def present(self) -> int:
        """Return the address; 0 once it is closed, so that an executor refuses plans over this memory."""
        return 0 if self._mapping is None else self.address

    def close(self) -> None:
        """Unmap the memory once its last opening is closed; no transfer may be in flight. A second call does nothing.

        In a child of a fork it does nothing: the mapping is the parent's.
        """
        process = _here()
        with process.lock:
            mapping, self._mapping = self._mapping, None
            if mapping is None or mapping.made_in != process.made_in:
                return
            mapping.users -= 1
            if mapping.users:
                return
            if self._key is not None:
                process.by_handle.pop(self._key, None)
            process.alive.remove(mapping)
            with mapping.device.current(), Uncaptured(mapping.device):
                mapping.unmap()

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else f"{self.nbytes} bytes at {self.address:#x}"
        return f"Opening(cuda:{self.ordinal}, {state})"


def opened(device: Device, export: Export, fetch: Fetch | None = None) -> Opening:
    """Map the memory of another process in the context of a GPU.

    Args:
        device: the GPU whose kernels will read and write the memory.
        export: the other process's description, whose types and sizes have been checked.
        fetch: function that returns file descriptors of some pieces, by the indexes of the first piece and behind the
            last; this function closes none of them. Needed if the export has pieces.

    Raises:
        PathError: the GPU is not visible here, or cannot reach the memory.
        LayoutError: the handle, or a descriptor, maps another number of bytes than the export says.
        TransferError: the driver refuses the handle or a descriptor.
    """
    cu = device.driver
    owner = ordinal_here(cu, export.gpu)
    check_reach(cu, device.ordinal, owner)
    if not export.handle and (fetch is None or sum(export.pieces) != export.nbytes):
        raise PathError(f"an export of {export.nbytes} bytes needs a handle, or pieces with their descriptors")
    process = _here()
    key = (device.context, export.handle) if export.handle else None
    with process.lock:
        mapping = process.by_handle.get(key) if key else None
        if mapping is not None:
            _check_size(mapping.nbytes, export)
            mapping.users += 1
        else:
            with device.current(), Uncaptured(device):
                if fetch is None or key:
                    mapping = _open_handle(device, export, process.made_in)
                else:
                    mapping = _map_pieces(device, export, fetch, process.made_in)
            process.alive.append(mapping)
            if key:
                process.by_handle[key] = mapping
        return Opening(mapping, key, export, owner)


def mappings() -> int:
    """Return the number of mappings of other processes' GPU memory that this process has.

    >>> mappings()
    0
    """
    return len(_here().alive)


def mapped_on(address: int) -> int | None:
    """Return the number of the GPU whose kernels reach an address of another process's memory; None for other memory.

    >>> mapped_on(0x1000)
    """
    for mapping in list(_here().alive):  # another thread may close one meanwhile
        if mapping.address <= address < mapping.address + mapping.nbytes:
            return mapping.device.ordinal
    return None


def _open_handle(device: Device, export: Export, made_in: int) -> _Mapping:
    cu, made, start, held = device.driver, c_uint64(), c_uint64(), c_size_t()
    handle = IpcHandle.from_buffer_copy(export.handle)
    try:
        cu.check("cuIpcOpenMemHandle", cu.cuIpcOpenMemHandle_v2(byref(made), handle, LAZY_PEER_ACCESS))
    except DriverError as error:
        raise TransferError(
            f"the handle of {export.nbytes} bytes of another process does not open on cuda:{device.ordinal}: {error}; "
            "the process must live, and be another one, and must not have freed the memory"
        ) from error
    address = made.value

    def unmap() -> None:
        cu.cuIpcCloseMemHandle(address)

    try:
        cu.check("cuMemGetAddressRange", cu.cuMemGetAddressRange_v2(byref(start), byref(held), address))
        _check_size(start.value + held.value - address, export)
    except BaseException:
        unmap()
        raise
    return _Mapping(device, address, start.value + held.value - address, unmap, made_in)


def _check_size(held: int, export: Export) -> None:
    if held < export.nbytes:
        raise LayoutError(f"the handle of another process maps {held} bytes; its card promises {export.nbytes}")


def _check_count(descriptors: Sequence[int], pieces: Sequence[int]) -> None:
    if len(descriptors) != len(pieces):
        raise LayoutError(f"{len(descriptors)} descriptors came for {len(pieces)} pieces of memory")


def _map_pieces(device: Device, export: Export, fetch: Fetch, made_in: int) -> _Mapping:
    cu, reserved = device.driver, c_uint64()
    cu.check("cuMemAddressReserve", cu.cuMemAddressReserve(byref(reserved), export.nbytes, 0, 0, 0))
    start, mapped = reserved.value, list[tuple[int, int]]()

    def unmap() -> None:
        for at, nbytes in mapped:
            cu.cuMemUnmap(at, nbytes)
        cu.cuMemAddressFree(start, export.nbytes)

    try:
        at = start
        for first in range(0, len(export.pieces), PORTION):
            some = export.pieces[first : first + PORTION]
            descriptors = fetch(first, first + len(some))
            _check_count(descriptors, some)
            for nbytes, descriptor in zip(some, descriptors, strict=True):
                _map_piece(device, at, nbytes, descriptor)
                mapped.append((at, nbytes))
                at += nbytes
        access = _Access(ON_DEVICE, device.ordinal, READ_WRITE)
        cu.check("cuMemSetAccess", cu.cuMemSetAccess(start, export.nbytes, byref(access), 1))
    except BaseException:
        unmap()
        raise
    return _Mapping(device, start, export.nbytes, unmap, made_in)


def _map_piece(device: Device, at: int, nbytes: int, descriptor: int) -> None:
    """Map one piece. The driver refuses a piece that has fewer bytes."""
    cu, handle = device.driver, c_uint64()
    code = cu.cuMemImportFromShareableHandle(byref(handle), descriptor, POSIX_FD)
    cu.check("cuMemImportFromShareableHandle", code, f"a piece of {nbytes} bytes")
    try:
        code = cu.cuMemMap(at, nbytes, 0, handle.value, 0)
    finally:
        cu.cuMemRelease(handle.value)  # a mapping keeps the memory
    if code == INVALID_VALUE:
        raise LayoutError(f"a piece of another process has fewer than the {nbytes} bytes that its card promises")
    cu.check("cuMemMap", code, f"a piece of {nbytes} bytes")

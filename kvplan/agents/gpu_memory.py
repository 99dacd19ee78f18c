"""The transport ``cuda_ipc``: GPU memory of processes of one machine, over NVLink or PCIe, or within one GPU."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

from kvplan.agents.board import MOST_GPUS
from kvplan.agents.identity import this_process
from kvplan.agents.transport import Mapped, Offer, Opened, Owner, Table, close_all
from kvplan.cuda.device import Device
from kvplan.cuda.driver import driver
from kvplan.cuda.ipc import Export, Opening, descriptors, exported
from kvplan.cuda.machine import ordinal_here
from kvplan.cuda.peers import check_reach
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import PathError, TransferError
from kvplan.layout.components import Region

SPARE_DESCRIPTORS = 256  # that the rest of the process may open while all pieces are offered


class GpuMemory:
    """The transport of GPU memory; see :class:`kvplan.agents.transport.Transport`.

    Args:
        device: the GPU whose kernels read and write other processes' memory, ``"cuda:0"``; by default the GPU of the
            first layout that this agent offers, or else the GPU that has the other process's memory.

    Raises:
        PathError: there is no GPU here.
    """

    name = "cuda_ipc"

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        try:
            if not driver().devices():
                raise PathError("no GPU is visible to this process")
        except TransferError as error:
            raise PathError(str(error)) from None

    def refuse(self, region: Region) -> str | None:
        """See :meth:`kvplan.agents.transport.Transport.refuse`."""
        if not region.device.startswith("cuda"):
            return f"memory of {region.device} is not a GPU's; transport 'shm' offers host memory"
        try:
            exported(Device(ordinal_of(region.device)), region.address, region.nbytes)
        except (PathError, TransferError) as error:
            return str(error)
        if self._device is None:
            self._device = region.device
        return None

    def offer(self, regions: Sequence[Region]) -> Offer:
        """See :meth:`kvplan.agents.transport.Transport.offer`."""
        try:
            exports = _exports(regions)
            gpus = tuple(dict.fromkeys(device.ordinal for device, _ in exports))
            if max(gpus) >= MOST_GPUS:
                raise PathError(f"the memory is of GPU {max(gpus)}; GPUs have numbers below {MOST_GPUS}")
            _check_descriptors(sum(len(export.pieces) for _, export in exports))
            with ExitStack() as undo:
                opened: list[int] = []
                undo.callback(close_all, opened)
                for device, export in exports:
                    opened += descriptors(device, export)
                undo.pop_all()
        except TransferError as error:
            raise PathError(str(error)) from error
        return Offer({"memory": [_document(export) for _, export in exports], "gpus": gpus}, opened, gpus)

    def check(self, part: Table, owner: Owner) -> tuple[int, Any]:
        """See :meth:`kvplan.agents.transport.Transport.check`."""
        exports = [_export(**row) for row in part["memory"]]
        if any(export.handle for export in exports):
            _check_number(owner)
        for gpu in {export.gpu for export in exports}:
            try:
                theirs = ordinal_here(driver(), gpu)
                check_reach(driver(), self._ordinal(theirs), theirs)
            except TransferError as error:
                raise PathError(str(error)) from error
        return sum(len(export.pieces) for export in exports), (exports, part["gpus"])

    def open(self, data: Any, descriptors: Sequence[int], owner: Owner) -> Opened:
        """See :meth:`kvplan.agents.transport.Transport.open`."""
        del owner
        exports, gpus = data
        try:
            gpu = self._ordinal(ordinal_here(driver(), exports[0].gpu))
            return Opened(_mapped(Device(gpu), exports, list(descriptors)), gpu, gpus)
        except TransferError as error:
            raise PathError(str(error)) from error

    def _ordinal(self, theirs: int) -> int:
        """Return the number of the GPU that runs the kernels."""
        return theirs if self._device is None else ordinal_of(self._device)


def _exports(regions: Sequence[Region]) -> list[tuple[Device, Export]]:
    """Return the allocations that hold some regions, ascending and without overlap, each with its GPU."""
    exports: list[tuple[Device, Export]] = []
    for name, some in groupby(sorted(regions, key=lambda one: (one.device, one.address)), lambda one: one.device):
        device = Device(ordinal_of(name))
        for region in some:
            last = exports[-1][1] if exports and exports[-1][0] is device else None
            if last is None or region.address >= last.end:
                exports.append((device, exported(device, region.address, region.nbytes)))
            elif region.address + region.nbytes > last.end:
                exports[-1] = device, exported(device, last.address, region.address + region.nbytes - last.address)
    return sorted(exports, key=lambda pair: pair[1].address)


def _check_descriptors(pieces: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
    if pieces > most >= 0:
        raise PathError(
            f"the memory has {pieces} pieces, each with a file descriptor, and this process may open {most} more; "
            "raise the limit (ulimit -n), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )


def _check_number(owner: Owner) -> None:
    """Raise PathError if CUDA would take the owner's handles for this process's own, which it does not open."""
    me = this_process()
    if owner.pid == me.pid and owner.pids != me.host.pids:
        raise PathError(
            f"{owner.name!r} and this process both have the number {me.pid} in their containers, and CUDA then opens "
            "no handle; start one of them behind an init process (docker run --init) or by another entry point, or set "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where {owner.name!r} runs"
        )


def _mapped(device: Device, exports: Sequence[Export], files: list[int]) -> list[Mapped]:
    mapped: list[Mapped] = []
    with ExitStack() as undo:
        for export in exports:
            mine, files = files[: len(export.pieces)], files[len(export.pieces) :]
            opening = Opening(device, export, mine)
            undo.callback(opening.close)
            mapped.append(Mapped(export.address, export.nbytes, opening.address, f"cuda:{opening.owner}", opening))
        undo.pop_all()
    return mapped


def _document(export: Export) -> Table:
    """Return an allocation as a card holds it: its pieces are runs of a size and a count."""
    runs = [[nbytes, len(list(some))] for nbytes, some in groupby(export.pieces)]
    return {"gpu": export.gpu, "address": export.address, "nbytes": export.nbytes, "handle": export.handle.hex(),
            "pieces": runs}  # fmt: skip


def _export(gpu: str, address: int, nbytes: int, handle: str, pieces: list[list[int]]) -> Export:
    sizes = [size for size, count in pieces for _ in range(count)]
    return Export(gpu, address, nbytes, bytes.fromhex(handle), tuple(sizes))

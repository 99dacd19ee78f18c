"""``cuda_ipc``: GPU memory of several processes of one machine, over NVLink or PCIe, or within one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.agents.cuda_ipc.cuda_ipc_owner import CudaIpcOffer
from kvplan.agents.cuda_ipc.cuda_ipc_visitor import OpenedByCudaIpc
from kvplan.agents.identity import this_process
from kvplan.agents.way import Checked, Origin, Table, Tell
from kvplan.cuda.device import Device
from kvplan.cuda.driver import driver
from kvplan.cuda.ipc.exports import Export, exported
from kvplan.cuda.machine import ordinal_here
from kvplan.cuda.peers import check_reach
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import PathError, TransferError
from kvplan.layout.components import Region


class CudaIpcWay:
    """The transport of GPU memory. See :class:`kvplan.agents.way.Way`.

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
        """See :meth:`kvplan.agents.way.Way.refuse`."""
        if not region.device.startswith("cuda"):
            return f"memory of {region.device} is not a GPU's; transport 'shm' offers host memory"
        try:
            exported(Device(ordinal_of(region.device)), region.address, region.nbytes)
        except (PathError, TransferError) as error:
            return str(error)
        if self._device is None:
            self._device = region.device
        return None

    def offer(self, regions: Sequence[Region]) -> CudaIpcOffer:
        """See :meth:`kvplan.agents.way.Way.offer`."""
        try:
            return CudaIpcOffer(regions)
        except TransferError as error:
            raise PathError(str(error)) from error

    def check(self, part: Table, regions: Sequence[Region], origin: Origin) -> Checked:
        """See :meth:`kvplan.agents.way.Way.check`."""
        del regions
        exports = tuple([_export(**row) for row in part["memory"]])
        if any(export.handle for export in exports):
            _check_number(origin)
        for gpu in {export.gpu for export in exports}:
            try:
                owner = ordinal_here(driver(), gpu)
                check_reach(driver(), self._ordinal(owner), owner)
            except TransferError as error:
                raise PathError(str(error)) from error
        return Checked(sum(len(export.pieces) for export in exports) + 1, exports)

    def open(self, checked: Checked, descriptors: Sequence[int], tell: Tell, origin: Origin) -> OpenedByCudaIpc:
        """See :meth:`kvplan.agents.way.Way.open`."""
        del origin
        exports: tuple[Export, ...] = checked.data
        try:
            ordinal = self._ordinal(ordinal_here(driver(), exports[0].gpu))
            return OpenedByCudaIpc(Device(ordinal), exports, descriptors, tell)
        except TransferError as error:
            raise PathError(str(error)) from error

    def _ordinal(self, owner: int) -> int:
        """Return the number of the GPU that runs the kernels."""
        return owner if self._device is None else ordinal_of(self._device)


def _check_number(origin: Origin) -> None:
    """Raise PathError if CUDA would take the owner's handles for this process's own, which it does not open."""
    me = this_process()
    if origin.pid == me.pid and origin.pids != me.host.pids:
        raise PathError(
            f"{origin.name!r} and this process both have the number {me.pid} in their containers, and CUDA then opens "
            "no handle; start one of them behind an init process (docker run --init) or by another entry point, or set "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where {origin.name!r} runs"
        )


def _export(gpu: str, address: int, nbytes: int, handle: str, pieces: list[list[int]]) -> Export:
    """Read an allocation of a card, whose pieces are runs of a size and a count."""
    sizes = [size for size, count in pieces for _ in range(count)]
    return Export(gpu, address, nbytes, bytes.fromhex(handle), tuple(sizes))

"""``cuda_ipc``: GPU memory of several processes of one machine, over NVLink or PCIe, or within one GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_owner import CudaIpcOffer
from kvplan.agents.cuda_ipc.cuda_ipc_visitor import OpenedByCudaIpc
from kvplan.agents.way import Checked, Origin, Tell
from kvplan.base.integers import integer
from kvplan.base.quoting import quoted
from kvplan.cuda.device import Device, driver
from kvplan.cuda.ipc.exports import HANDLE_NBYTES, MOST_PIECES, Export, exported
from kvplan.cuda.ipc.gpu_uuids import check_reach, ordinal_here
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import LayoutError, PathError, TransferError
from kvplan.layout.components import Region

MOST_ALLOCATIONS = 1 << 14
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEYS = {"gpu", "address", "nbytes", "handle", "pieces"}


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

    def check(self, part: object, regions: Sequence[Region], origin: Origin) -> Checked:
        """See :meth:`kvplan.agents.way.Way.check`."""
        del origin
        exports = _exports(part)
        for region in regions:
            if not region.device.startswith("cuda"):
                raise LayoutError(f"the card offers memory of {region.device} by cuda_ipc, which is for GPUs")
            if not any(one.address <= region.address and region.address + region.nbytes <= one.end for one in exports):
                here = f"{region.nbytes} bytes at {region.address:#x}"
                raise LayoutError(f"the card's part for cuda_ipc lacks {here}, which are of one of its layouts")
        for gpu in {export.gpu for export in exports}:
            try:
                owner = ordinal_here(driver(), gpu)
                check_reach(driver(), self._ordinal(owner), owner)
            except TransferError as error:
                raise PathError(str(error)) from error
        ranges = tuple((export.address, export.nbytes) for export in exports)
        return Checked(ranges, sum(len(export.pieces) for export in exports) + 1, {}, exports)

    def open(
        self, checked: Checked, table: Mapping[str, Any], descriptors: Sequence[int], tell: Tell, origin: Origin
    ) -> OpenedByCudaIpc:
        """See :meth:`kvplan.agents.way.Way.open`."""
        del origin
        exports: tuple[Export, ...] = checked.data
        if len(descriptors) != checked.descriptors:
            raise LayoutError(f"{len(descriptors)} descriptors came for cuda_ipc; the card says {checked.descriptors}")
        try:
            ordinal = self._ordinal(ordinal_here(driver(), exports[0].gpu))
            return OpenedByCudaIpc(Device(ordinal), exports, table, descriptors, tell)
        except TransferError as error:
            raise PathError(str(error)) from error

    def _ordinal(self, owner: int) -> int:
        """Return the number of the GPU that runs the kernels."""
        return owner if self._device is None else ordinal_of(self._device)


def _exports(part: object) -> tuple[Export, ...]:
    """Read the part of a card.

    Raises:
        LayoutError: the part is wrong.
    """
    rows = part.get("memory") if isinstance(part, dict) and set(part) == {"memory"} else None
    if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_ALLOCATIONS:
        raise LayoutError(f"the card's part for cuda_ipc is {quoted(part)}; give what Agent.card() made")
    found = tuple(_export(row) for row in rows)
    for one, following in pairwise(found):
        if one.end > following.address:
            raise LayoutError(f"two allocations of the card overlap at {following.address:#x}, or do not ascend")
    if sum(len(one.pieces) for one in found) > MOST_PIECES:
        raise LayoutError(f"the card's allocations have more than {MOST_PIECES:,} pieces")
    return found


def _export(row: Any) -> Export:
    if not isinstance(row, dict) or set(row) != _KEYS:
        raise LayoutError(f"an allocation of the card is {quoted(row)}; it has {', '.join(sorted(_KEYS))}")
    gpu, handle, runs = row["gpu"], row["handle"], row["pieces"]
    address = integer("the card's address of an allocation", row["address"], least=1, most=2**57)
    nbytes = integer("the card's nbytes of an allocation", row["nbytes"], least=1, most=2**50)
    if not isinstance(gpu, str) or not _UUID.fullmatch(gpu):
        raise LayoutError(f"the card's GPU is {quoted(gpu)}; give its UUID")
    if not isinstance(handle, str) or not re.fullmatch(f"([0-9a-f]{{{2 * HANDLE_NBYTES}}})?", handle):
        raise LayoutError(f"the card's handle is {quoted(handle)}; it is {HANDLE_NBYTES} bytes in hex, or empty")
    pieces = _pieces(runs)
    if bool(handle) == bool(pieces) or (pieces and sum(pieces) != nbytes):
        raise LayoutError(
            f"an allocation of {nbytes} bytes on the card has a handle of {len(handle) // 2} bytes, and {len(pieces)} "
            f"pieces of {sum(pieces)} bytes; it has a handle, or pieces of all its bytes"
        )
    return Export(gpu, address, nbytes, bytes.fromhex(handle), pieces)


def _pieces(runs: Any) -> tuple[int, ...]:
    found: list[int] = []
    if not isinstance(runs, list):
        raise LayoutError(f"the card's pieces are {quoted(runs)}; give a list of sizes with their counts")
    for run in runs:
        if not isinstance(run, list) or len(run) != 2:
            raise LayoutError(f"the card's pieces have {quoted(run)}; give a size in bytes and a count")
        nbytes = integer("the card's size of a piece", run[0], least=1, most=2**50)
        count = integer("the card's number of pieces", run[1], least=1, most=MOST_PIECES)
        if len(found) + count > MOST_PIECES:
            raise LayoutError(f"an allocation of the card has more than {MOST_PIECES:,} pieces")
        found += [nbytes] * count
    return tuple(found)

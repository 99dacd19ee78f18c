"""The transports within a machine: ``shm`` for host memory, ``cuda_ipc`` for memory of GPUs.

The *owner* has the memory and makes the card. The *visitor* has read the card, opens the memory by descriptors that it
gets in the greeting, and moves bytes to and from it; the owner makes no call for that.
"""

from __future__ import annotations

import os
import resource
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from kvplan.agents.board import MOST_GPUS
from kvplan.agents.sockets import this_process
from kvplan.base.values import listed, quoted
from kvplan.cuda.device import Device
from kvplan.cuda.driver import driver
from kvplan.cuda.ipc import Export, Opening, descriptors, exported
from kvplan.cuda.machine import ordinal_here
from kvplan.cuda.peers import check_reach
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import HostMemoryError, KVPlanError, LayoutError, PathError, TransferError
from kvplan.layout import records
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.tensors import Holding
from kvplan.memory.shared_mappings import Mapping as FileMapping
from kvplan.memory.shared_mappings import Stretch, opened_file, stretch_of, stretches_here, trouble_of

NIXL = "nixl"
TRANSPORTS = ("cuda_ipc", "shm", NIXL)

Table = dict[str, Any]  # a table for JSON: texts, numbers, lists and tables; bytes as hex text
_HELP = (
    "allocate the pool with kvplan.allocate(..., shared=True), or call share_memory_() of its torch tensor before it "
    "is described"
)
SPARE_DESCRIPTORS = 256  # that the rest of the process may open while all pieces are offered


class Offer(NamedTuple):
    """Memory that an owner offers by one transport.

    Attributes:
        part: the transport's part of the card.
        descriptors: the file descriptors that visitors need, in order.
        gpus: numbers of the GPUs that have it.
        layouts: names of the layouts that lie in it.
    """

    part: Table
    descriptors: list[int]
    gpus: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()


class Mapped(NamedTuple):
    """A range of the owner's memory, and its place in the visitor.

    Attributes:
        theirs: address of its first byte in the owner.
        here: address of its first byte in the visitor.
        device: device in the visitor: ``"cpu"``, or the GPU that has the memory, such as ``"cuda:1"``.
        owner: the object that the layout's regions keep. ``present()`` returns an address of its own that never
            changes, and 0 after ``close()``, so that ``compile`` and ``Executor.prepare`` refuse the layouts. The
            address goes to no other memory while the object lives.
        writable: whether the visitor may write it.
    """

    theirs: int
    here: int
    device: str
    owner: Any
    writable: bool = True


class Opened(NamedTuple):
    """Memory of an owner that a visitor has opened.

    Attributes:
        mapped: where it is now, ascending by the owner's addresses.
        gpu: number of the GPU whose executor must move the bytes; None if any executor can.
        gpus: the owner's numbers of the GPUs that have it.
    """

    mapped: Sequence[Mapped]
    gpu: int | None = None
    gpus: Sequence[int] = ()

    def relocated(self, layout: KVLayout) -> KVLayout:
        """Return a layout of the card, whose regions lie in the mapped ranges, at its addresses in this process."""
        starts, regions = [each.theirs for each in self.mapped], []
        for region in layout.regions:
            place = self.mapped[bisect_right(starts, region.address) - 1]
            regions.append(
                replace(
                    region, address=region.address + place.here - place.theirs, device=place.device, pinned=False,
                    writable=region.writable and place.writable, virtual=False, owner=place.owner, recorded=False,
                    held=Holding(place.owner.present, place.owner.present(), (), 0), pool=None,
                )
            )  # fmt: skip
        built = records.relocated(layout.built, regions)
        return KVLayout(built._replace(regions=tuple(sorted(built.regions, key=lambda region: region.address))))


# Each transport has these methods. Making one raises PathError if this machine cannot use it.
#
# look() forgets what was known of this process's memory; each offer begins with it.
# refuse(region) returns why a region of this process cannot be offered, with the setting that helps; None if it can.
# offer(regions) offers regions that refuse() took, ascending and each once; they may touch, nest and overlap. It raises
#     PathError if they cannot be offered, with the setting that helps.
# check(part, card) reads a part of a card; it returns the number of descriptors that it needs, and data for open(). It
#     raises PathError if this process cannot open it, for example for lack of that GPU.
# open(data, descriptors, name, uid) opens what check() has read of an agent of this name, whose process is of a user;
#     the caller closes the descriptors afterwards. It raises LayoutError if what they map is not what the card says,
#     and PathError if the system refuses; then nothing stays mapped.


class Offers:
    """What an agent offers to visitors at one time.

    Args:
        transports: the transports.
        layouts: layouts by name.
        number: tells it from what was offered before; cards say it, and visitors say it again.

    Attributes:
        number: as given.
        offers: by transport.
        names: names of the layouts that are offered.
        refused: why a transport does not offer all layouts.
        regions: the memory that is offered.
    """

    def __init__(self, transports: Mapping[str, Transport], layouts: Mapping[str, KVLayout], number: int = 0) -> None:
        self.number = number
        self.offers: dict[str, Offer] = {}
        self.refused: dict[str, str] = {}
        for transport in transports.values():
            self._add(transport, layouts)
        self.names = {name for offer in self.offers.values() for name in offer.layouts}
        self.regions = regions_of(layouts[name] for name in self.names)

    def _add(self, transport: Transport, layouts: Mapping[str, KVLayout]) -> None:
        """Offer the layouts that a transport takes."""
        taken: dict[str, KVLayout] = {}
        transport.look()
        for name, layout in layouts.items():
            reasons = [reason for region in regions_of([layout]) if (reason := transport.refuse(region))]
            if reasons:
                self.refused.setdefault(transport.name, f"layout {quoted(name)}: {reasons[0]}")
            else:
                taken[name] = layout
        if taken:
            try:
                offer = transport.offer(regions_of(taken.values()))
                self.offers[transport.name] = offer._replace(layouts=tuple(taken))
            except PathError as error:
                self.refused[transport.name] = str(error)

    @property
    def gpus(self) -> set[int]:
        """Numbers of the GPUs that have the memory."""
        return {gpu for offer in self.offers.values() for gpu in offer.gpus}

    def holds(self, region: Region) -> bool:
        """Whether all of a region is offered."""
        return any(
            each.address <= region.address and region.end <= each.end and each.device == region.device
            for each in self.regions
        )

    def close(self) -> None:
        """Close the descriptors. Visitors keep theirs."""
        for offer in self.offers.values():
            close_all(offer.descriptors)


def regions_of(layouts: Iterable[KVLayout]) -> list[Region]:
    """Return the regions of layouts, ascending and each once."""
    regions: dict[tuple[int, int, str], Region] = {}
    for layout in layouts:
        for region in layout.regions:
            key = region.address, region.nbytes, region.device
            if key not in regions or region.writable:
                regions[key] = region
    return sorted(regions.values(), key=lambda region: (region.address, -region.nbytes))


def close_all(descriptors: list[int]) -> None:
    """Close descriptors; a second call does nothing."""
    while descriptors:
        os.close(descriptors.pop())


class FileRange(NamedTuple):
    """A range of the owner's memory, and its place in a file; all begin and end where the owner has mapped the file.

    Attributes:
        address: address of the first byte in the owner.
        nbytes: number of bytes.
        file: position of its file among the card's files.
        offset: place of the first byte in the file.
    """

    address: int
    nbytes: int
    file: int
    offset: int


class HostMemory:
    """The transport of host memory."""

    name = "shm"

    def __init__(self) -> None:
        self._stretches: list[Stretch] | None = None  # read once for all regions of an offer

    def look(self) -> None:
        """See above: the methods of transports. An address may be of another file by now."""
        self._stretches = None

    def refuse(self, region: Region) -> str | None:
        """See above: the methods of transports."""
        if region.device != "cpu":
            return f"it is memory of {region.device!r}, and shm offers host memory"
        stretch = self._stretch(region)
        if stretch is None or not stretch.shared or stretch.file == (0, 0) or stretch.path.startswith("/dev/zero"):
            return f"its memory is private to this process; {_HELP}"
        return None

    def _stretch(self, region: Region) -> Stretch | None:
        if self._stretches is None:
            self._stretches = stretches_here()
        return stretch_of(region.address, region.nbytes, self._stretches)

    def offer(self, regions: Sequence[Region]) -> Offer:
        """See above: the methods of transports."""
        stretches = dict.fromkeys(stretch for region in regions if (stretch := self._stretch(region)) is not None)
        writable = {stretch.file for region in regions if region.writable and (stretch := self._stretch(region))}
        self._stretches, files = None, dict[tuple[int, int], int]()
        try:
            for stretch in stretches:
                if stretch.file not in files:
                    files[stretch.file] = _opened(stretch, writable=stretch.file in writable)
        except (HostMemoryError, OSError, PathError) as error:
            close_all(list(files.values()))
            raise PathError(str(error)) from error
        numbers = {file: number for number, file in enumerate(files)}
        ranges = [FileRange(s.start, s.end - s.start, numbers[s.file], s.offset) for s in stretches]
        sizes = [(os.fstat(fd).st_size, file in writable) for file, fd in files.items()]
        return Offer({"files": sizes, "ranges": ranges}, list(files.values()))

    def check(self, part: Table, card: Any) -> tuple[int, Any]:
        """See above: the methods of transports."""
        del card
        return len(part["files"]), (part["files"], [FileRange(*row) for row in part["ranges"]])

    def open(self, data: Any, descriptors: Sequence[int], name: str, uid: int) -> Opened:
        """See above: the methods of transports."""
        sizes, ranges = data
        for number, (fd, (nbytes, writable)) in enumerate(zip(descriptors, sizes, strict=True)):
            trouble = trouble_of(fd, nbytes, uid, writable=writable, sealed=uid != os.geteuid())
            if trouble is not None:
                raise LayoutError(f"file {number} of the card of {name!r}: {trouble}")
        mapped: list[Mapped] = []
        try:
            for address, nbytes, file, offset in ranges:
                mapping = FileMapping(descriptors[file], offset, nbytes, writable=sizes[file][1])
                mapped.append(Mapped(address, mapping.address, "cpu", mapping, sizes[file][1]))
        except HostMemoryError as error:
            raise PathError(f"the memory of {name!r}: {error}") from error
        return Opened(mapped)


def _opened(stretch: Stretch, *, writable: bool) -> int:
    """Open the file of a stretch as visitors want it: in memory, and of this user."""
    fd = opened_file(stretch, writable=writable)
    trouble = trouble_of(fd, 0, os.geteuid(), writable=writable, sealed=False)
    if trouble is not None:
        os.close(fd)
        raise HostMemoryError(f"the file {stretch.path!r} of the memory at {stretch.start:#x}: {trouble}; {_HELP}")
    return fd


class GpuMemory:
    """The transport of GPU memory.

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

    def look(self) -> None:
        """See above: the methods of transports. Nothing is kept."""

    def refuse(self, region: Region) -> str | None:
        """See above: the methods of transports."""
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
        """See above: the methods of transports."""
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

    def check(self, part: Table, card: Any) -> tuple[int, Any]:
        """See above: the methods of transports."""
        exports = [_export(**row) for row in part["memory"]]
        if any(export.handle for export in exports):
            _check_number(card)
        for gpu in {export.gpu for export in exports}:
            try:
                theirs = ordinal_here(driver(), gpu)
                check_reach(driver(), self._ordinal(theirs), theirs)
            except TransferError as error:
                raise PathError(str(error)) from error
        return sum(len(export.pieces) for export in exports), (exports, part["gpus"])

    def open(self, data: Any, descriptors: Sequence[int], name: str, uid: int) -> Opened:
        """See above: the methods of transports."""
        del name, uid
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
        helps = "raise the limit (ulimit -n), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        raise PathError(
            f"the memory has {pieces} pieces with a file descriptor each, and {most} may be opened; {helps}"
        )


def _check_number(card: Any) -> None:
    """Raise PathError if CUDA would take the owner's handles for this process's own, which it does not open."""
    me = this_process()
    if card.pid == me.pid and card.host.pids != me.host.pids:
        raise PathError(
            f"{card.name!r} and this process both have the number {me.pid} in their containers, and CUDA then opens "
            "no handle; start one of them behind an init process (docker run --init) or by another entry point, or set "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where {card.name!r} runs"
        )


def _mapped(device: Device, exports: Sequence[Export], files: list[int]) -> list[Mapped]:
    mapped: list[Mapped] = []
    with ExitStack() as undo:
        for export in exports:
            mine, files = files[: len(export.pieces)], files[len(export.pieces) :]
            opening = Opening(device, export, mine)
            undo.callback(opening.close)
            mapped.append(Mapped(export.address, opening.address, f"cuda:{opening.owner}", opening))
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


Transport: TypeAlias = GpuMemory | HostMemory


def checked_transports(transports: object) -> tuple[str, ...]:
    """Return names of transports, each once; raise PathError if one is unknown.

    >>> checked_transports(["shm", "nixl"])
    ('shm', 'nixl')
    """
    if isinstance(transports, str) or not isinstance(transports, Sequence) or not transports:
        raise PathError(f"transports is {quoted(transports)}; give some of {listed(TRANSPORTS)}, the best first")
    for name in transports:
        if name not in TRANSPORTS:
            raise PathError(f"unknown transport {quoted(name)}; expected one of {listed(TRANSPORTS)}")
    return tuple(dict.fromkeys(transports))


def transports_here(names: Sequence[str], device: str | None = None) -> tuple[dict[str, Transport], dict[str, str]]:
    """Return the local transports that this machine can use, and the reasons why it cannot use the others.

    Args:
        names: names of transports.
        device: device of the agent's executor, if the user gave one.

    >>> transports, reasons = transports_here(["shm"])
    >>> list(transports), reasons
    (['shm'], {})
    """
    usable: dict[str, Transport] = {}
    reasons: dict[str, str] = {}
    for name in names:
        if name == NIXL:
            if find_spec("nixl") is None:
                reasons[name] = "NIXL is not installed: pip install nixl"
            continue
        try:
            gpu = device if device not in (None, "cpu") else None
            usable[name] = HostMemory() if name == "shm" else GpuMemory(gpu)
        except KVPlanError as error:
            reasons[name] = str(error)
    return usable, reasons

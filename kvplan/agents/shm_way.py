"""The transport ``shm``: host memory that lies in files of memory, which the visitor maps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.agents.way import Checked, Deliver, Mapped, Origin, Table, Tell
from kvplan.base.quoting import quoted
from kvplan.errors import HostMemoryError, LayoutError, PathError
from kvplan.layout.components import Region
from kvplan.memory.shared_mappings import Mapping as FileMapping
from kvplan.memory.shared_mappings import Stretch, opened_file, stretch_of, stretches_here, trouble_of
from kvplan.memory.shared_path import page_of
from kvplan.plan.plan import Plan

FILES = 1024  # most files of a card: a descriptor each
RANGES = 1 << 14  # most ranges of a card: a mapping each, and Linux has 65,530 of them
_HELP = (
    "allocate the pool with kvplan.allocate(..., shared=True), or call share_memory_() of its torch tensor before it "
    "is described"
)


class FileRange(NamedTuple):
    """A range of the owner's memory, and its place in a file.

    Attributes:
        address: address of the first byte in the owner, on a page boundary.
        nbytes: number of bytes.
        file: position of its file among the card's files.
        offset: place of the first byte in the file, on a page boundary.
        writable: whether the visitor may write it.
    """

    address: int
    nbytes: int
    file: int
    offset: int
    writable: bool


class ShmWay:
    """The transport ``shm`` of one agent; see :class:`kvplan.agents.way.Way`.

    Attributes:
        name: ``"shm"``.
    """

    name = "shm"

    def __init__(self) -> None:
        self._stretches: list[Stretch] | None = None  # read once for all regions

    def refuse(self, region: Region) -> str | None:
        """Return why a region cannot be offered; see :meth:`Way.refuse`."""
        if region.device != "cpu":
            return f"it is memory of {region.device!r}, and shm offers host memory"
        if self._stretches is None:
            self._stretches = stretches_here()
        held = stretch_of(region.address, region.nbytes, self._stretches)
        if held is None or not held.shared or held.file == (0, 0) or held.path.startswith("/dev/zero"):
            return f"its memory is private to this process; {_HELP}"
        return None

    def offer(self, regions: Sequence[Region]) -> ShmOffer:
        """Open the files of regions, and offer the pages that hold them; see :meth:`Way.offer`."""
        stretches, self._stretches = stretches_here(), None
        writable: dict[tuple[int, int], bool] = {}
        first: dict[tuple[int, int], Stretch] = {}
        placed: list[tuple[Stretch, Region]] = []
        for region in regions:
            held = stretch_of(region.address, region.nbytes, stretches)
            if held is None:
                raise PathError(f"the memory at {region.address:#x} was unmapped while it was offered")
            first.setdefault(held.file, held)
            writable[held.file] = writable.get(held.file, False) or region.writable
            placed.append((held, region))
        descriptors: list[int] = []
        try:
            for file, held in first.items():
                descriptors.append(_opened(held, writable=writable[file]))
            numbers = {file: number for number, file in enumerate(first)}
            pages = [page_of(fd) for fd in descriptors]
            ranges = _ranges(placed, numbers, pages)
            sizes = [os.fstat(fd).st_size for fd in descriptors]
        except (HostMemoryError, OSError) as error:
            _close_all(descriptors)
            raise PathError(str(error)) from error
        if len(descriptors) > FILES or len(ranges) > RANGES:
            _close_all(descriptors)
            raise PathError(
                f"{len(descriptors)} files and {len(ranges)} ranges of memory are more than {FILES} and {RANGES}; "
                "allocate fewer and larger tensors"
            )
        return ShmOffer(descriptors, sizes, ranges)

    def check(self, part: Table, regions: Sequence[Region], origin: Origin) -> Checked:
        """Read a part of a card; see :meth:`Way.check`."""
        del regions, origin
        ranges = [FileRange(*one) for one in part["ranges"]]
        return Checked(len(part["files"]), (part["files"], ranges))

    def open(self, checked: Checked, descriptors: Sequence[int], tell: Tell, origin: Origin) -> ShmOpened:
        """Map the files; see :meth:`Way.open`."""
        del tell
        sizes, ranges = checked.data
        for number, (fd, nbytes) in enumerate(zip(descriptors, sizes, strict=True)):
            writable = any(one.writable for one in ranges if one.file == number)
            trouble = trouble_of(fd, nbytes, origin.uid, writable=writable, sealed=not origin.same_user)
            if trouble is None:
                page = page_of(fd)
                if any(one.offset % page for one in ranges if one.file == number):
                    trouble = f"its pages have {page} bytes, and a range begins within one"
            if trouble is not None:
                raise LayoutError(f"file {number} of the card of {origin.name!r}: {trouble}")
        mapped: list[Mapped] = []
        try:
            for one in ranges:
                made = FileMapping(descriptors[one.file], one.offset, one.nbytes, writable=one.writable)
                mapped.append(Mapped(one.address, one.nbytes, made.address, "cpu", made, writable=one.writable))
        except HostMemoryError as error:
            raise PathError(f"the memory of {origin.name!r}: {error}") from error
        return ShmOpened(mapped)


class ShmOffer:
    """Files that an agent offers; see :class:`kvplan.agents.way.Offer`.

    Attributes:
        part: the part of the card: bytes of each file, and the ranges of memory in them.
    """

    def __init__(self, descriptors: list[int], sizes: list[int], ranges: list[FileRange]) -> None:
        self._descriptors = descriptors
        self.part: Table = {"files": sizes, "ranges": ranges}

    def serve(self) -> ShmServed:
        """Return the descriptors for a visitor; see :meth:`Offer.serve`."""
        return ShmServed(self._descriptors)

    def close(self) -> None:
        """Close the files; see :meth:`Offer.close`."""
        _close_all(self._descriptors)


class ShmServed:
    """The descriptors for one visitor; see :class:`kvplan.agents.way.Served`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = descriptors

    def heard(self, message: bytes) -> None:
        """Refuse every message; see :meth:`Served.heard`."""
        raise LayoutError(f"shm takes no messages, and got {quoted(message)}")

    def notes(self) -> list[bytes]:
        """Return no notes; see :meth:`Served.notes`."""
        return []

    def close(self) -> None:
        """Do nothing: the descriptors belong to the offer."""


class ShmOpened:
    """Mapped files of an owner; see :class:`kvplan.agents.way.Opened`."""

    gpu = None

    def __init__(self, mapped: list[Mapped]) -> None:
        self.mapped = tuple(mapped)

    def before(self, plan: Plan, after: Any) -> Any:
        """Return the user's ``after``; see :meth:`Opened.before`."""
        del plan
        return after

    def after(self, transfer: Any, note: bytes, taken: list[Deliver], *, urgent: bool) -> None:
        """Leave the note to the agent; see :meth:`Opened.after`."""

    def owner_gone(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.owner_gone`. No transfer waits for the owner."""

    def release(self) -> None:
        """Keep the mappings: the files live on, and executors may read them; see :meth:`Opened.release`."""

    def close(self) -> None:
        """Unmap the files; see :meth:`Opened.close`."""
        for one in self.mapped:
            one.owner.close()


def _opened(held: Stretch, *, writable: bool) -> int:
    """Open the file of a stretch as visitors want it: in memory, and of this user."""
    fd = opened_file(held, writable=writable)
    trouble = trouble_of(fd, 0, os.geteuid(), writable=writable, sealed=False)
    if trouble is not None:
        os.close(fd)
        raise HostMemoryError(f"the file {held.path!r} of the memory at {held.start:#x}: {trouble}; {_HELP}")
    return fd


def _ranges(
    placed: Sequence[tuple[Stretch, Region]], numbers: dict[tuple[int, int], int], pages: Sequence[int]
) -> list[FileRange]:
    """Return the pages that hold regions, as ranges of files that do not overlap; the regions ascend."""
    found: list[FileRange] = []
    for held, region in placed:
        file = numbers[held.file]
        page, shift = pages[file], held.offset - held.start
        start = (region.address + shift) // page * page - shift
        end = min(-(-(region.end + shift) // page) * page - shift, held.end)
        one = FileRange(start, end - start, file, start + shift, region.writable)
        before = found[-1] if found else None
        if before is not None and before.file == file and before.address + before.nbytes - start >= 0 and (
            one.offset - one.address == before.offset - before.address
        ):  # fmt: skip
            nbytes = max(end, before.address + before.nbytes) - before.address
            found[-1] = before._replace(nbytes=nbytes, writable=before.writable or region.writable)
        else:
            found.append(one)
    return found


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())

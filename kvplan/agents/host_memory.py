"""The transport ``shm``: host memory that lies in files of memory, which the visitor maps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.agents.transport import Mapped, Offer, Opened, Owner, Table, close_all
from kvplan.errors import HostMemoryError, LayoutError, PathError
from kvplan.layout.components import Region
from kvplan.memory.shared import page_of
from kvplan.memory.shared_mappings import Mapping as FileMapping
from kvplan.memory.shared_mappings import Stretch, opened_file, stretch_of, stretches_here, trouble_of

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

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.address + self.nbytes


class HostMemory:
    """The transport of host memory; see :class:`kvplan.agents.transport.Transport`."""

    name = "shm"

    def __init__(self) -> None:
        self._stretches: list[Stretch] | None = None  # read once for all regions

    def refuse(self, region: Region) -> str | None:
        """See :meth:`kvplan.agents.transport.Transport.refuse`."""
        if region.device != "cpu":
            return f"it is memory of {region.device!r}, and shm offers host memory"
        if self._stretches is None:
            self._stretches = stretches_here()
        stretch = stretch_of(region.address, region.nbytes, self._stretches)
        if stretch is None or not stretch.shared or stretch.file == (0, 0) or stretch.path.startswith("/dev/zero"):
            return f"its memory is private to this process; {_HELP}"
        return None

    def offer(self, regions: Sequence[Region]) -> Offer:
        """See :meth:`kvplan.agents.transport.Transport.offer`."""
        stretches, self._stretches = stretches_here(), None
        placed = [(_stretch(region, stretches), region) for region in regions]
        writable = {stretch.file for stretch, region in placed if region.writable}
        files: dict[tuple[int, int], _File] = {}
        ranges: list[FileRange] = []
        try:
            for stretch, region in placed:
                if stretch.file not in files:
                    files[stretch.file] = _opened(stretch, len(files), writable=stretch.file in writable)
                _add(ranges, _range(region, stretch, files[stretch.file]))
            _check_counts(len(files), len(ranges))
        except (HostMemoryError, OSError, PathError) as error:
            close_all([file.descriptor for file in files.values()])
            raise PathError(str(error)) from error
        descriptors = [file.descriptor for file in files.values()]
        return Offer({"files": [os.fstat(fd).st_size for fd in descriptors], "ranges": ranges}, descriptors)

    def check(self, part: Table, owner: Owner) -> tuple[int, Any]:
        """See :meth:`kvplan.agents.transport.Transport.check`."""
        del owner
        return len(part["files"]), (part["files"], [FileRange(*row) for row in part["ranges"]])

    def open(self, data: Any, descriptors: Sequence[int], owner: Owner) -> Opened:
        """See :meth:`kvplan.agents.transport.Transport.open`."""
        sizes, ranges = data
        for number, (fd, nbytes) in enumerate(zip(descriptors, sizes, strict=True)):
            some = [one for one in ranges if one.file == number]
            writable = any(one.writable for one in some)
            trouble = trouble_of(fd, nbytes, owner.uid, writable=writable, sealed=not owner.same_user)
            if trouble is None and any(one.offset % page_of(fd) for one in some):
                trouble = f"its pages have {page_of(fd)} bytes, and a range begins within one"
            if trouble is not None:
                raise LayoutError(f"file {number} of the card of {owner.name!r}: {trouble}")
        mapped: list[Mapped] = []
        try:
            for one in ranges:
                mapping = FileMapping(descriptors[one.file], one.offset, one.nbytes, writable=one.writable)
                mapped.append(Mapped(one.address, one.nbytes, mapping.address, "cpu", mapping, one.writable))
        except HostMemoryError as error:
            raise PathError(f"the memory of {owner.name!r}: {error}") from error
        return Opened(mapped)


def _stretch(region: Region, stretches: list[Stretch]) -> Stretch:
    stretch = stretch_of(region.address, region.nbytes, stretches)
    if stretch is None:
        raise PathError(f"the memory at {region.address:#x} was unmapped while it was offered")
    return stretch


def _check_counts(files: int, ranges: int) -> None:
    if files > FILES or ranges > RANGES:
        raise PathError(
            f"{files} files and {ranges} ranges of memory are more than {FILES} and {RANGES}; allocate fewer and "
            "larger tensors"
        )


class _File(NamedTuple):
    descriptor: int
    number: int
    page: int


def _opened(stretch: Stretch, number: int, *, writable: bool) -> _File:
    """Open the file of a stretch as visitors want it: in memory, and of this user."""
    fd = opened_file(stretch, writable=writable)
    trouble = trouble_of(fd, 0, os.geteuid(), writable=writable, sealed=False)
    if trouble is not None:
        os.close(fd)
        raise HostMemoryError(f"the file {stretch.path!r} of the memory at {stretch.start:#x}: {trouble}; {_HELP}")
    return _File(fd, number, page_of(fd))


def _range(region: Region, stretch: Stretch, file: _File) -> FileRange:
    """Return the pages of a file that hold a region."""
    shift = stretch.offset - stretch.start
    start = (region.address + shift) // file.page * file.page - shift
    end = min(-(-(region.end + shift) // file.page) * file.page - shift, stretch.end)
    return FileRange(start, end - start, file.number, start + shift, region.writable)


def _add(ranges: list[FileRange], new: FileRange) -> None:
    """Add a range; it grows the one before it, if it touches or overlaps that in the file, too."""
    last = ranges[-1] if ranges else None
    shift = new.offset - new.address
    if last is None or (last.file, last.offset - last.address) != (new.file, shift) or last.end < new.address:
        ranges.append(new)
        return
    nbytes = max(new.end, last.end) - last.address
    ranges[-1] = last._replace(nbytes=nbytes, writable=last.writable or new.writable)

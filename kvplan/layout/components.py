"""The data classes of a layout: regions of memory, and one strided component for each (layer, part)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, NamedTuple

from kvplan.base.values import integers, quoted
from kvplan.errors import LayoutError
from kvplan.layout.strides import Factors, extent, offset, span

INT64_MAX = 2**63 - 1

# Words for addresses that are not memory of this process, by their source.
NOT_HERE = {
    "spec": "virtual (made up, of a spec)",
    "dump": "those of the process that saved the dump, or pickled the layout",
}


# Words that follow the device in a text about a layout, by :attr:`kvplan.KVLayout.addresses`.
ADDRESSES = {"memory": "", "dump": ", addresses of the process that saved it", "spec": ", made-up addresses"}


class Pool(NamedTuple):
    """Memory that processes share by name, and its address in this process, or in the process that pickled it.

    Attributes:
        path: path of the file.
        geometry: the pool's notation, sizes and names, as its file holds them.
        tensors: number of tensors; each begins at a page.
        nbytes: bytes of each tensor.
        token: text that differs between pools of the same path and geometry.
        address: address of the file's first byte.
        attach: function of a module that maps the pool in a process that loads a pickle. It returns the new address
            and the object that keeps the mapping; or None if no process uses the pool any more.
    """

    path: str
    geometry: str
    tensors: int
    nbytes: int
    token: str
    address: int
    attach: Callable[[Pool], tuple[int, Any] | None]


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation, or the part of it that a layout may touch.

    Attributes:
        address: address of the first byte.
        nbytes: number of bytes.
        device: ``"cpu"``, ``"cuda:0"``, ...
        pinned: whether this is page-locked host memory, which a GPU can reach.
        writable: False for read-only arrays.
        virtual: whether the addresses are made up (a spec); then nothing can be moved.
        seams: addresses in the region that no descriptor may cross, ascending.
        owner: the object that keeps the memory alive; never compared.
        recorded: whether the addresses come from a dump or a pickle; then nothing can be moved.
        held: a :class:`~kvplan.layout.tensors.Holding`, which checks whether a tensor still has this memory; never
            compared.
        pool: the shared pool that holds the region, or None; never compared.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    pinned: bool = False
    writable: bool = True
    virtual: bool = False
    seams: tuple[int, ...] = ()
    owner: Any = field(default=None, compare=False, repr=False)
    recorded: bool = False
    held: Any = field(default=None, compare=False, repr=False)
    pool: Pool | None = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """Address of the first byte after the region."""
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Form:
    """The shape that many components share: factors of every axis, with strides in bytes, and no address.

    Attributes:
        block: factors of the block axis; ``()`` if ``table`` holds the block offsets, or if there is one block.
        token: factors of the token slots of a block, or of the sub-blocks of an opaque block; ``()`` for one slot.
        head: factors of the heads in the component.
        dim: factors of the content of one (token, head), in bytes.
        head_start: global number of the first head.
        headed: whether the notation has a head axis; otherwise the content belongs to no head.
        opaque: whether the notation has no token axis; then a block, or each of its sub-blocks, moves whole.
        table: bytes from block 0 to each block, if blocks are separate allocations; otherwise None.
    """

    block: Factors
    token: Factors
    head: Factors
    dim: Factors
    head_start: int = 0
    headed: bool = True
    opaque: bool = False
    table: tuple[int, ...] | None = None

    @property
    def subblocks(self) -> int:
        """Opaque sub-blocks per block; 0 if a block has token slots."""
        return extent(self.token) if self.opaque else 0

    @property
    def heads(self) -> range:
        """Global numbers of the heads in the component."""
        return range(self.head_start, self.head_start + extent(self.head))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.table) if self.table is not None else extent(self.block)

    @property
    def block_nbytes(self) -> int:
        """Bytes of content per block."""
        return extent(self.token) * extent(self.head) * extent(self.dim)

    @property
    def inner(self) -> Factors:
        """Factors of everything inside a block."""
        return (*self.token, *self.head, *self.dim)

    @property
    def bounds(self) -> tuple[int, int]:
        """Offsets of the first and the last byte of all blocks, from the component's address."""
        reach = span(self.inner)
        if self.table is not None:
            return min(self.table), max(self.table) + reach
        return 0, span(self.block) + reach

    def block_offset(self, block: int) -> int:
        """Return the bytes from block 0 to ``block``."""
        return self.table[block] if self.table is not None else offset(self.block, block)


@dataclass(frozen=True, slots=True)
class Component:
    """One (layer, part) of a cache: a form, placed at an address.

    Attributes:
        layer: global number of the layer.
        part: ``"k"``, ``"v"``, ``"kv"`` or the name of an extra.
        address: address of the first byte of block 0, token 0 and the first head.
        dtype: name of the element type, ``""`` if it is not known; never compared, since it moves no byte.
    """

    layer: int
    part: str
    address: int
    form: Form
    dtype: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part!r}"

    def hull(self) -> tuple[int, int]:
        """Return the address of the first byte, and the address after the last byte."""
        low, high = self.form.bounds
        return self.address + low, self.address + high + 1

    def row_offset(self, token: int, head: int | None) -> int:
        """Return the bytes from the start of a block to one row, by default the row of the first head.

        Raises:
            LayoutError: the token or the head is not in this component.
        """
        form, head = self.form, self.form.head_start if head is None else head
        if not 0 <= token < extent(form.token):
            noun, nouns = ("sub-block", "sub-blocks") if form.opaque else ("token", "token slots")
            raise LayoutError(f"{noun} {token} of {self}; {nouns} are 0 to {extent(form.token) - 1}")
        if head not in form.heads:
            raise LayoutError(f"head {head} of {self}; heads are {form.heads.start} to {form.heads.stop - 1}")
        return offset(form.token, token) + offset(form.head, head - form.head_start)


class Geometry(NamedTuple):
    """The data of a layout that the compiler reads: integers and names, and no object that owns memory."""

    components: tuple[Component, ...]
    num_blocks: int
    block_tokens: int


class Built(NamedTuple):
    """A layout as plain data; :class:`kvplan.KVLayout` is the public class.

    Attributes:
        components: components in order of layer, then part.
        regions: regions in order of address.
        num_blocks: number of blocks.
        block_tokens: token slots per block; sub-blocks per block if no part has token slots.
        dtype: name of the element type; merged layouts have several names with `` + `` between them.
        notation: notation in normal form; merged layouts have several with `` + `` between them, a page has ``|``.
    """

    components: tuple[Component, ...]
    regions: tuple[Region, ...]
    num_blocks: int
    block_tokens: int
    dtype: str
    notation: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which they were given."""
        return tuple(dict.fromkeys(c.part for c in self.components))

    @property
    def block_nbytes(self) -> int:
        """Bytes of content per block, over all layers and parts, without padding."""
        return sum(c.form.block_nbytes for c in self.components)

    @property
    def device(self) -> str:
        """The device that all regions are on."""
        return self.regions[0].device

    @property
    def opaque(self) -> bool:
        """Whether no part has token slots; then blocks move whole."""
        return all(c.form.opaque for c in self.components)

    @property
    def virtual(self) -> bool:
        """Whether the addresses are made up."""
        return any(region.virtual for region in self.regions)


def subblocks_of(components: Iterable[Component]) -> int:
    """Return the sub-blocks per block of opaque parts: the least common multiple of the numbers of all parts."""
    return lcm(*(component.form.subblocks for component in components))


def quoted_address(address: int) -> str:
    """Return an address as text; a number that is too large for an address is shortened.

    >>> quoted_address(4096), quoted_address(-4096), quoted_address(1 << 200)
    ('0x1000', '-0x1000', 'a number of 201 bits')
    """
    return f"{address:#x}" if abs(address) >> 64 == 0 else quoted(address)


def touching_seams(regions: Sequence[Region]) -> tuple[int, ...]:
    """Return the addresses at which pinned allocations touch. No copy may cross from one registration to the next."""
    ordered = sorted(regions, key=lambda region: region.address)
    return tuple(a.end for a, b in pairwise(ordered) if a.end == b.address and (a.pinned or b.pinned))


def once(regions: Iterable[Region], seams: Sequence[int] = ()) -> tuple[Region, ...]:
    """Return each allocation once, in order of address, with all its seams and those where registrations touch.

    Raises:
        LayoutError: one of ``seams`` is no address in an allocation.

    >>> [region.seams for region in once([Region(0, 64), Region(64, 64), Region(0, 64, seams=(16,))], seams=[64])]
    [(16, 64), (64,)]
    """
    alike: dict[tuple[int, int], list[Region]] = {}
    for region in regions:
        alike.setdefault((region.address, region.nbytes), []).append(region)
    places = sorted(alike)
    marks = integers("seams", seams, right="a seam is an address, an integer")
    reach = list(accumulate((address + nbytes for address, nbytes in places), max))  # regions may nest
    for seam in marks:
        before = bisect_right(places, seam, key=lambda place: place[0]) - 1
        if before < 0 or seam > reach[before]:
            raise LayoutError(f"seam {quoted_address(seam)} lies in no allocation of this layout")
    marks = tuple(sorted({*marks, *touching_seams([alike[place][0] for place in places])}))
    unique = []
    for (address, nbytes), some in sorted(alike.items()):
        inside = marks[bisect_left(marks, address) : bisect_right(marks, address + nbytes)]
        own = tuple(sorted({*inside, *(seam for region in some for seam in region.seams)}))
        unique.append(replace(some[0], writable=all(region.writable for region in some), seams=own))
    return tuple(unique)

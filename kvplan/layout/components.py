"""The pieces of a layout: regions of memory, and one strided view for each (layer, part)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError
from kvplan.layout.strides import Factors, extent, offset, span

INT64_MAX = 2**63 - 1

# Addresses that are not this process's memory, in words, by their source.
NOT_HERE = {
    "spec": "virtual (made up, of a spec)",
    "dump": "those of the process that saved the dump, or pickled the layout",
}


# What a text about a layout adds after its device, by :attr:`kvplan.KVLayout.addresses`.
ADDRESSES = {"memory": "", "dump": ", addresses of the process that saved it", "spec": ", made-up addresses"}


class Pool(NamedTuple):
    """Memory that processes share by name, and its address in this process, or in the one that pickled it.

    Attributes:
        path: the file.
        geometry: the pool's notation, sizes and names, as its file holds them.
        tensors: how many there are, each beginning a page.
        nbytes: of each tensor.
        token: tells it from other pools of that path and geometry.
        address: of the file's first byte.
        attach: maps the pool in a process that loads a pickle of this: the address there, and the object that keeps
            the mapping; None where no process uses the pool any more. A function of a module, so that it pickles.
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
        address: first byte.
        nbytes: bytes from there on.
        device: ``"cpu"``, ``"cuda:0"``, ...
        pinned: page-locked host memory, which a GPU can reach.
        writable: False for read-only arrays.
        virtual: addresses are made up (a spec): nothing can be moved.
        seams: addresses inside that no descriptor may cross, ascending.
        owner: the object that keeps the memory alive; never compared.
        recorded: addresses are those of the process that saved a dump, or pickled the layout: nothing can be moved
            through them.
        held: a :class:`~kvplan.layout.holding.Holding` that asks a tensor whether this is still its memory, or an
            object that keeps an array from giving it up; never compared.
        pool: the shared pool that holds it, if any; never compared.
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
        """First byte after the region."""
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Form:
    """The shape that many components share: factors of every axis, with strides in bytes, and no address.

    Attributes:
        block: factors of the block axis; ``()`` where ``table`` holds their offsets, or where there is one block.
        token: factors of the token slots of a block, or of the sub-blocks of an opaque one; ``()`` for one.
        head: factors of the heads held here.
        dim: factors of the content of one (token, head), counted in bytes.
        head_start: global number of the first head.
        headed: whether the notation has a head axis; content without one belongs to no head.
        opaque: whether the notation has no token axis: a block, or each of its sub-blocks, moves whole or not at all.
        table: bytes from block 0 to each block, where blocks are separate allocations.
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
        """Opaque sub-blocks a block; 0 where a block has token slots."""
        return extent(self.token) if self.opaque else 0

    @property
    def heads(self) -> range:
        """Global numbers of the heads held here."""
        return range(self.head_start, self.head_start + extent(self.head))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.table) if self.table is not None else extent(self.block)

    @property
    def block_nbytes(self) -> int:
        """Bytes of content a block."""
        return extent(self.token) * extent(self.head) * extent(self.dim)

    @property
    def inner(self) -> Factors:
        """Factors of everything inside a block."""
        return (*self.token, *self.head, *self.dim)

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last byte that any block touches, relative to the component's address."""
        reach = span(self.inner)
        if self.table is not None:
            return min(self.table), max(self.table) + reach
        return 0, span(self.block) + reach

    def block_offset(self, block: int) -> int:
        """Bytes from block 0 to ``block``."""
        return self.table[block] if self.table is not None else offset(self.block, block)


@dataclass(frozen=True, slots=True)
class Component:
    """One (layer, part) of a cache: a form, placed at an address.

    Attributes:
        layer: global number of the layer.
        part: ``"k"``, ``"v"``, ``"kv"`` or a named extra.
        address: of block 0, token 0, first head, first byte.
    """

    layer: int
    part: str
    address: int
    form: Form

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part!r}"

    def hull(self) -> tuple[int, int]:
        """Addresses of the first byte, and of the first byte after the last."""
        low, high = self.form.bounds
        return self.address + low, self.address + high + 1

    def row_offset(self, token: int, head: int | None) -> int:
        """Bytes from the start of a block to one row; by default of the first head.

        Raises:
            LayoutError: the token or the head is not in this component.
        """
        form = self.form
        if not 0 <= token < extent(form.token):
            last = extent(form.token) - 1
            if form.opaque and not last:
                raise LayoutError(f"token {token} of {self}; its blocks are opaque and move whole")
            noun, nouns = ("sub-block", "sub-blocks") if form.opaque else ("token", "token slots")
            raise LayoutError(f"{noun} {token} of {self}; {nouns} are 0 to {last}")
        if head is None:
            head = form.head_start
        if head not in form.heads:
            raise LayoutError(f"head {head} of {self}; heads are {form.heads.start} to {form.heads.stop - 1}")
        return offset(form.token, token) + offset(form.head, head - form.head_start)


class Geometry(NamedTuple):
    """A layout as the compiler sees it: integers and names, and no object that owns memory."""

    components: tuple[Component, ...]
    num_blocks: int
    block_tokens: int


class Built(NamedTuple):
    """A layout as plain data; :class:`kvplan.KVLayout` is its public face.

    Attributes:
        components: in order of layer, then part.
        regions: in order of address.
        num_blocks: number of blocks.
        block_tokens: token slots a block; sub-blocks where no part has token slots.
        sizes: extent of each axis of the notation, in elements for dim.
        dtype: name of the element type; those of merged layouts have `` + `` between them.
        notation: in normal form; those of merged layouts have `` + `` between them.
    """

    components: tuple[Component, ...]
    regions: tuple[Region, ...]
    num_blocks: int
    block_tokens: int
    sizes: dict[str, int]
    dtype: str
    notation: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in the order they were given."""
        return tuple(dict.fromkeys(c.part for c in self.components))

    @property
    def block_nbytes(self) -> int:
        """Bytes of content a block, over all layers and parts; padding excluded."""
        return sum(c.form.block_nbytes for c in self.components)

    @property
    def device(self) -> str:
        """The device that all regions are on."""
        return self.regions[0].device

    @property
    def opaque(self) -> bool:
        """Whether no part has token slots, so that blocks move whole."""
        return all(c.form.opaque for c in self.components)

    @property
    def virtual(self) -> bool:
        """Whether the addresses are made up."""
        return any(region.virtual for region in self.regions)


def subblocks_of(components: Iterable[Component]) -> int:
    """Count the sub-blocks a block of opaque parts: the least common multiple of the parts' numbers."""
    return lcm(*(component.form.subblocks for component in components))


def quoted_address(address: int) -> str:
    """Quote an address; a number too large for one is quoted short.

    >>> quoted_address(4096), quoted_address(-4096), quoted_address(1 << 200)
    ('0x1000', '-0x1000', 'a number of 201 bits')
    """
    return f"{address:#x}" if abs(address) >> 64 == 0 else quoted(address)


def touching_seams(regions: Sequence[Region]) -> tuple[int, ...]:
    """Addresses where pinned allocations touch: they are two registrations, and no copy may span them."""
    ordered = sorted(regions, key=lambda region: region.address)
    return tuple(a.end for a, b in pairwise(ordered) if a.end == b.address and (a.pinned or b.pinned))


def seams_within(seams: Sequence[int], region: Region) -> Sequence[int]:
    """Select the seams between the first byte of a region and its end; they are ascending.

    >>> seams_within([0, 64, 128, 192], Region(64, 64))
    [64, 128]
    """
    return seams[bisect_left(seams, region.address) : bisect_right(seams, region.end)]

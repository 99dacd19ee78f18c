"""Every strategy: one logical cache, laid out in related ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import gcd, perm, prod
from typing import Any
from zlib import crc32

import numpy as np
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from tests import oracle
from tests.oracle import Cache

GUARD = 64  # bytes before and after every allocation that nothing may touch
POISON = 0xA5
PADDING = (0, 0, 1, 3)  # elements
WIDE = 1 << 24  # of more numbers, hypothesis prefers small ones

# Hypothesis checks a strategy when it is first drawn from, so each one is made once. A permutation and the padding of
# all dims are one draw: several small ones would be several times as dear.
BOOLEANS = st.booleans()
integers = cache(st.integers)
sampled = cache(st.sampled_from)
several = cache(lambda low, high, count: st.lists(integers(low, high), min_size=count, max_size=count))


def permuted(draw, things: Sequence[Any], count: int | None = None) -> list[Any]:
    """Draw so many of the things, or all, in any order, by the number of the choice; number 0 is the given order."""
    count = len(things) if count is None else count
    ways = perm(len(things), count)
    if ways > WIDE:
        return draw(st.permutations(things))[:count]
    number, rest, made = draw(integers(0, ways - 1)), list(things), []
    for left in range(count, 0, -1):
        turn, number = divmod(number, perm(len(rest) - 1, left - 1))
        made.append(rest.pop(turn))
    return made


@dataclass(frozen=True)
class Logical:
    """What both sides hold, however they lay it out."""

    layers: int
    kv: bool
    heads: int
    dim: int
    itemsize: int
    layer_start: int
    opaque: bool = False  # blocks are made of opaque sub-blocks, not of token slots


@dataclass(frozen=True)
class Form:
    """One way to lay it out: everything but the memory."""

    notation: str
    sizes: dict[str, int]
    order: tuple[int, ...]  # memory order of the dims, outermost first
    before: tuple[int, ...]  # padding of each dim, elements
    after: tuple[int, ...]
    shared: bool  # whether nested tensors are views of one allocation
    head_start: int
    layer_start: int
    itemsize: int

    @property
    def block_tokens(self) -> int:
        """Token slots a block, or opaque sub-blocks."""
        return self.sizes.get("token", self.sizes.get("subblock", 1))

    def build(self, seed: int) -> Cache:
        """Allocate it and fill it with random bytes."""
        nesting, dims = self.notation.rpartition(":")[0].split(), self.dims()
        counts = [self.sizes[axis] for axis in nesting]
        padded = [a + n + b for a, n, b in zip(self.before, dims, self.after, strict=True)]
        tensor_nbytes = prod(padded) * self.itemsize
        number = prod(counts)
        rng = np.random.default_rng(seed)
        size = number * tensor_nbytes if self.shared else tensor_nbytes
        roots = [rng.integers(0, 256, size + 2 * GUARD, dtype=np.uint8) for _ in range(1 if self.shared else number)]
        flat = []
        for k in range(number):
            root, start = (roots[0], GUARD + k * tensor_nbytes) if self.shared else (roots[k], GUARD)
            flat.append(self._view(root[start : start + tensor_nbytes], padded))
        for count in reversed(counts):
            flat = [flat[a:b] for a, b in pairwise(range(0, len(flat) + 1, count))]
        told = {name: size for name, size in self.sizes.items() if name != "kv" and name not in nesting}
        return Cache(self.notation, self.sizes, flat[0], roots, self.head_start, self.layer_start, self.itemsize, told)

    def _view(self, memory: np.ndarray, padded: list[int]) -> np.ndarray:
        stored = memory.view(f"u{self.itemsize}").reshape([padded[k] for k in self.order])
        tensor = stored.transpose(np.argsort(self.order))
        ends = [a + n for a, n in zip(self.before, self.dims(), strict=True)]
        return tensor[tuple(slice(a, end) for a, end in zip(self.before, ends, strict=True))]

    def dims(self) -> list[int]:
        return [prod(self.sizes[axis] for axis in dim) for dim in oracle.split_notation(self.notation)[1]]


def layout_of(cache: Cache, part: str = "kv") -> KVLayout:
    return KVLayout.from_tensors(
        cache.notation, cache.tensors, sizes=cache.told, layer_start=cache.layer_start, head_start=cache.head_start,
        part=part,
    )  # fmt: skip


def logical_of(draw) -> Logical:
    return Logical(
        layers=draw(integers(1, 3)),
        kv=draw(BOOLEANS),
        heads=draw(integers(1, 4)),
        dim=draw(integers(1, 6)),
        itemsize=draw(sampled((1, 2, 4))),
        layer_start=draw(integers(0, 2)),
        opaque=draw(integers(0, 3)) == 0,
    )


def form_of(draw, logical: Logical, block_tokens: int, num_blocks: int, heads: range) -> Form:
    """Draw an order of the axes, what is nested, split, grouped and padded, and where the memory is."""
    slot = "subblock" if logical.opaque else "token"
    sizes = {"block": num_blocks, slot: block_tokens, "head": len(heads), "dim": logical.dim}
    if logical.opaque and block_tokens == 1 and draw(BOOLEANS):
        del sizes[slot]  # a block is one opaque piece
    if logical.layers > 1 or draw(BOOLEANS):
        sizes["layer"] = logical.layers
    if logical.kv:
        sizes["kv"] = 2
    if len(heads) == 1 and logical.heads == 1 and draw(BOOLEANS):
        del sizes["head"]
    nestable = [axis for axis in ("layer", "kv", "block", "head") if axis in sizes]
    nesting = permuted(draw, nestable, draw(integers(0, len(nestable))))
    atoms: list[str] = []
    for axis in [axis for axis in sizes if axis not in nesting]:
        factor = next((f for f in (2, 3) if sizes[axis] % f == 0 and sizes[axis] > f), None)
        if axis in ("token", "subblock", "head", "dim", "block") and factor and draw(integers(0, 3)) == 0:
            sizes[f"{axis}.0"], sizes[f"{axis}.1"] = factor, sizes[axis] // factor
            atoms += [f"{axis}.0", f"{axis}.1"]
        else:
            atoms.append(axis)
    words: list[str] = []
    for atom in permuted(draw, atoms):
        if words and not words[-1].endswith(")") and words[-1] != "1" and draw(integers(0, 4)) == 0:
            words[-1] = f"({words[-1]} {atom})"
        else:
            words.append(atom)
    if draw(integers(0, 5)) == 0:
        words.insert(draw(integers(0, len(words))), "1")
    rank = len(words)
    order = tuple(range(rank)) if draw(integers(0, 2)) == 0 else tuple(permuted(draw, range(rank)))
    return Form(
        notation=f"{' '.join(nesting)}: {' '.join(words)}" if nesting else " ".join(words),
        sizes=sizes,
        order=order,
        before=_padding(draw, rank),
        after=_padding(draw, rank),
        shared=draw(BOOLEANS),
        head_start=heads.start,
        layer_start=logical.layer_start,
        itemsize=logical.itemsize,
    )


def _padding(draw, rank: int) -> tuple[int, ...]:
    each = len(PADDING)
    number = draw(integers(0, each**rank - 1))
    return tuple(PADDING[number // each**dim % each] for dim in range(rank))


def _seed(*drawn: Any) -> int:
    """A seed of the bytes. Were it drawn, hypothesis would take the same case with another seed for a new example."""
    return crc32(repr(drawn).encode()) >> 1


@dataclass(frozen=True)
class Case:
    """Two forms of one logical cache, and a transfer between them."""

    src: Form
    dst: Form
    unit_tokens: int
    units: int
    src_ids: list[int]
    dst_ids: list[int]
    src_skip: int
    dst_skip: int
    seed: int

    def moved(self, src: Cache) -> Cache:
        """The destination with what the oracle moves from a source."""
        dst = self.dst.build(self.seed + 1)
        oracle.copy(src, dst, self.src_ids, self.dst_ids, self.src_skip, self.dst_skip, self.unit_tokens, self.units)
        return dst


BLOCK_TOKENS = st.sampled_from(((1, 1), (2, 2), (4, 4), (2, 4), (4, 2), (1, 3), (6, 2), (4, 6), (6, 4), (3, 2), (8, 2)))


@st.composite
def cases(draw, *, same_heads: bool = False, max_blocks: int = 5) -> Case:
    logical = logical_of(draw)
    src_tokens, dst_tokens = draw(BLOCK_TOKENS)
    whole = range(logical.heads)
    src_heads = whole if same_heads else _head_range(draw, logical.heads)
    dst_heads = whole if same_heads else _head_range(draw, logical.heads, meeting=src_heads)
    src_blocks, dst_blocks = draw(integers(1, max_blocks)), draw(integers(1, max_blocks))
    src = form_of(draw, logical, src_tokens, src_blocks, src_heads)
    dst = form_of(draw, logical, dst_tokens, dst_blocks, dst_heads)
    unit = unit_of(src, dst)
    f, g = src_tokens // unit, dst_tokens // unit
    src_skip, dst_skip = draw(integers(0, f - 1)), draw(integers(0, g - 1))
    units = draw(integers(0, dst_blocks * g - dst_skip))
    src_count, dst_count = (-(-(units + src_skip) // f), -(-(units + dst_skip) // g)) if units else (0, 0)
    src_ids = ids_of(draw, src_blocks, src_count, distinct=src_count <= src_blocks and draw(BOOLEANS))
    dst_ids = ids_of(draw, dst_blocks, dst_count, distinct=True)
    if len(src_ids) == len(dst_ids):  # neighbours on both sides, named out of order, still merge
        shuffle = permuted(draw, range(len(src_ids)))
        src_ids, dst_ids = [src_ids[k] for k in shuffle], [dst_ids[k] for k in shuffle]
    # Ids say no more than this: one side's last block is used to its end.
    units = min(len(src_ids) * f - src_skip, len(dst_ids) * g - dst_skip) if units else 0
    skips = (src_skip, dst_skip) if units else (0, 0)
    return Case(src, dst, unit, units, src_ids, dst_ids, *skips, _seed(src, dst, src_ids, dst_ids, skips))


def unit_of(src: Form, dst: Form) -> int:
    """Tokens a unit: the greatest common divisor, or as compiled where that may cut a split token axis unevenly."""
    largest = gcd(src.block_tokens, dst.block_tokens)
    if not any(f"{slot}.1" in form.sizes for form in (src, dst) for slot in ("token", "subblock")):
        return largest
    unit = kvplan.compile(layout_of(src.build(0)), layout_of(dst.build(0))).unit_tokens
    assert largest % unit == 0
    return unit


def _head_range(draw, heads: int, meeting: range | None = None) -> range:
    start = draw(integers(0, heads - 1 if meeting is None else meeting.stop - 1))
    low = start + 1 if meeting is None else max(start, meeting.start) + 1
    return range(start, draw(integers(low, heads)))


def ids_of(draw, num_blocks: int, count: int, *, distinct: bool) -> list[int]:
    if not distinct:
        return draw(several(0, num_blocks - 1, count))
    start = draw(integers(0, num_blocks - count))
    if draw(BOOLEANS):  # consecutive ids are what merges
        return list(range(start, start + count))
    return permuted(draw, range(num_blocks), count)


@st.composite
def neighbour_cases(draw) -> Case:
    """Transfers in which much merges: like forms without padding, and neighbouring blocks named out of order."""
    logical, tokens = logical_of(draw), draw(sampled((1, 2, 4)))
    count = draw(integers(1, 6))
    src_blocks, dst_blocks = (count + draw(integers(0, 2)) for _ in range(2))
    heads = range(logical.heads)
    one = form_of(draw, logical, tokens, src_blocks, heads)
    other = one if draw(BOOLEANS) else form_of(draw, logical, tokens, dst_blocks, heads)
    src, dst = (
        replace(form, before=(0,) * len(form.before), after=(0,) * len(form.after), sizes=form.sizes | extra)
        for form, extra in ((one, {}), (other, _blocks(other, dst_blocks)))
    )
    order = permuted(draw, range(count))
    first, second = draw(integers(0, src_blocks - count)), draw(integers(0, dst.sizes["block"] - count))
    unit = unit_of(src, dst)
    ids = [first + k for k in order], [second + k for k in order]
    return Case(src, dst, unit, count * tokens // unit, *ids, 0, 0, _seed(src, dst, ids))


def _blocks(form: Form, num_blocks: int) -> dict[str, int]:
    """Sizes that give a form another number of blocks, if its block axis is not split."""
    return {} if "block.0" in form.sizes else {"block": num_blocks}


@dataclass(frozen=True)
class Beside:
    """Rows of tokens, and opaque sub-blocks under the same block ids, in two forms each."""

    rows: tuple[Form, Form]
    pages: tuple[Form, Form]
    page_tokens: int  # tokens a sub-block
    ids: tuple[list[int], list[int]]
    skips: tuple[int, int]  # sub-blocks
    units: int  # sub-blocks
    seed: int


@st.composite
def opaque_beside_rows(draw) -> Beside:
    """Blocks of several opaque sub-blocks on either side, entered late and left early."""
    logical = logical_of(draw)
    pages = replace(logical, kv=False, heads=1, opaque=True, dim=draw(integers(1, 6)))
    rows = replace(logical, opaque=False)
    page_tokens = draw(sampled((1, 2, 3, 4)))
    counts = draw(sampled(((1, 1), (1, 2), (1, 4), (3, 1), (2, 2), (2, 3), (4, 2))))
    blocks = draw(integers(1, 4)), draw(integers(1, 4))
    made = [
        tuple(form_of(draw, one, count * each, n, range(one.heads)) for count, n in zip(counts, blocks, strict=True))
        for one, each in ((rows, page_tokens), (pages, 1))
    ]
    skips = tuple(draw(integers(0, count - 1)) for count in counts)
    most = min(n * count - skip for n, count, skip in zip(blocks, counts, skips, strict=True))
    units = draw(integers(1, most))
    named = [-(-(units + skip) // count) for skip, count in zip(skips, counts, strict=True)]
    ids = tuple(ids_of(draw, n, count, distinct=True) for n, count in zip(blocks, named, strict=True))
    units = min(n * count - skip for n, count, skip in zip(named, counts, skips, strict=True))
    return Beside(*made, page_tokens, ids, skips, units, _seed(made, ids, skips))

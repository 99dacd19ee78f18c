"""Check a set of programs together: which bytes of their destinations no program writes, and which bytes two write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from kvplan.errors import LayoutError
from kvplan.layout.components import Component
from kvplan.layout.inverse import Row, row_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array, extent
from kvplan.plan.copy_program import CopyProgram
from kvplan.program.program import merge_ranges
from kvplan.ranks.rank_pair import PairProgram
from kvplan.ranks.resharding import Resharding
from kvplan.ranks.shards import Shard
from kvplan.verification.coverage import Coverage, Finding
from kvplan.verification.expected_bytes import pieces_of
from kvplan.verification.raw_bytes import addresses_of

MOST_BLOCKS, MOST_NBYTES = 8, 4 << 20  # of a destination that are looked at, where the blocks of all programs are small


class _Writer(NamedTuple):
    """A program of the set, with the tokens per block id of both sides, and the number of its destination."""

    name: str
    program: CopyProgram | PairProgram
    spans: tuple[int, int]
    blocks: tuple[int, int]
    destination: int


def coverage_of(programs: Any) -> Coverage:
    """Plan the same tokens with every program, and compare all written bytes with the destinations' content.

    No byte is moved, so layouts may be specs. Each program gets its first blocks, as many as hold the same tokens.

    Args:
        programs: what :func:`kvplan.reshard` made, or a sequence of programs and pairs of a resharding.

    Raises:
        LayoutError: this is neither, or the sequence is empty.
        KVPlanError: a program cannot plan its first blocks.
    """
    writers, destinations = _writers(programs)
    unwritten: list[Finding] = []
    twice: list[Finding] = []
    nbytes = 0
    for members in _groups([shard.layout for shard in destinations]):
        mine = [writer for writer in writers if writer.destination in members]
        ranges, tokens = _written([destinations[k] for k in members], mine)
        for k in members:
            spans = {writer.spans[1] for writer in mine if writer.destination == k}
            compared = _Compared(k, destinations[k], max(spans, default=destinations[k].span_tokens), tokens)
            nbytes += compared.look(ranges)
            unwritten += compared.findings(several=False)
            twice += compared.findings(several=True)
    said = "; ".join(map(str, (*unwritten, *twice))) or None
    return Coverage(
        said is None, len(writers), len(destinations), nbytes, tuple(unwritten), tuple(twice), said
    )  # fmt: skip


def _writers(programs: Any) -> tuple[list[_Writer], list[Shard]]:
    """Return the programs of the set, and their destinations."""
    if isinstance(programs, Resharding):
        made = [_writer(f"{s} -> {d}", program, d) for (s, d), program in programs.items()]
        return made, list(programs.destinations)
    if isinstance(programs, (CopyProgram, PairProgram)):
        programs = [programs]
    if not isinstance(programs, Iterable) or isinstance(programs, (str, bytes)):
        raise LayoutError(
            f"verify of a {type(programs).__name__}; give two layouts, a resharding, or a list of programs"
        )
    found: list[_Writer] = []
    destinations: list[Shard] = []
    for k, program in enumerate(programs):
        if not isinstance(program, (CopyProgram, PairProgram)):
            raise LayoutError(f"programs[{k}] is a {type(program).__name__}; give what kvplan.compile or reshard makes")
        dst = program.dst if isinstance(program, PairProgram) else Shard(program.dst)
        if dst not in destinations:
            destinations.append(dst)
        found.append(_writer(str(k), program, destinations.index(dst)))
    if not found:
        raise LayoutError("verify of no programs; give at least one")
    return found, destinations


def _writer(name: str, program: CopyProgram | PairProgram, destination: int) -> _Writer:
    if isinstance(program, PairProgram):
        blocks = program.src.layout.num_blocks, program.dst.layout.num_blocks
        return _Writer(name, program, program.spans, blocks, destination)
    sides = program.src, program.dst
    return _Writer(name, program, (sides[0].block_tokens, sides[1].block_tokens),
                   (sides[0].num_blocks, sides[1].num_blocks), destination)  # fmt: skip


def _groups(layouts: Sequence[KVLayout]) -> list[list[int]]:
    """Return the numbers of the layouts, together where they share memory, directly or through others."""
    groups = [{k} for k in range(len(layouts))]
    for a, b in combinations(range(len(layouts)), 2):
        one, other = (next(group for group in groups if k in group) for k in (a, b))
        if one is not other and _share(layouts[a], layouts[b]):
            one |= other
            groups.remove(other)
    return [sorted(group) for group in groups]


def _share(a: KVLayout, b: KVLayout) -> bool:
    """Return whether two layouts share memory; made-up addresses are shared only by slices of one layout."""
    if a.regions is b.regions:
        return True
    if a.device != b.device or a.addresses != b.addresses or a.virtual:
        return False
    return any(one.address < other.end and other.address < one.end for one in a.regions for other in b.regions)


# ---- written bytes -------------------------------------------------------------------------------------------------


class _Ranges(NamedTuple):
    """Byte ranges that programs write, ascending and disjoint: by one program or more, by several, and of each."""

    once: tuple[Int64Array, Int64Array]
    several: tuple[Int64Array, Int64Array]
    each: dict[str, tuple[Int64Array, Int64Array]]


def _written(destinations: Sequence[Shard], writers: Sequence[_Writer]) -> tuple[_Ranges, int]:
    """Plan all programs of destinations that share memory; return what they write, and the tokens that all plan."""
    spans = [span for writer in writers for span in writer.spans] or [shard.span_tokens for shard in destinations]
    whole = lcm(*spans)
    most = min(
        (span * blocks for writer in writers for span, blocks in zip(writer.spans, writer.blocks, strict=True)),
        default=whole,
    )
    nbytes = max(shard.layout.block_nbytes * whole // shard.span_tokens for shard in destinations)
    times = min(most // whole, MOST_BLOCKS * max(spans) // whole, MOST_NBYTES // nbytes)
    tokens = most if most < whole else whole * max(times, 1)
    each: dict[str, tuple[Int64Array, Int64Array]] = {}
    done = [tokens]
    for writer in writers:
        small, large = sorted((0, 1), key=lambda side: writer.spans[side])
        counts = [0, 0]
        counts[small] = tokens // writer.spans[small]
        counts[large] = -(-counts[small] * writer.spans[small] // writer.spans[large])
        done.append(counts[small] * writer.spans[small])
        made = writer.program.plan(range(counts[0]), range(counts[1])).descriptors()
        start, size = merge_ranges(made.dst, made.size) if made.dst.size else (made.dst, made.size)
        each[writer.name] = start, start + size
    starts = np.concatenate([start for start, _ in each.values()] or [np.empty(0, np.int64)])
    ends = np.concatenate([end for _, end in each.values()] or [np.empty(0, np.int64)])
    return _Ranges(_deep(starts, ends, 1), _deep(starts, ends, 2), each), min(done)


def _deep(starts: Int64Array, ends: Int64Array, depth: int) -> tuple[Int64Array, Int64Array]:
    """Return the ranges of the bytes that at least ``depth`` of the given ranges hold.

    >>> _deep(np.array([0, 8, 12]), np.array([10, 16, 14]), 2)
    (array([ 8, 12]), array([10, 14]))
    """
    at = np.concatenate((starts, ends))
    step = np.repeat(np.array([1, -1]), len(starts))
    order = np.lexsort((step, at))  # a range that ends comes before one that begins at the same byte
    count = np.cumsum(step[order])
    inside = count >= depth
    begins = inside & ~np.concatenate(([False], inside[:-1]))
    leaves = ~inside & np.concatenate(([False], inside[:-1]))
    return at[order][begins], at[order][leaves]


def _held(ranges: tuple[Int64Array, Int64Array], start: Int64Array, nbytes: int) -> Int64Array:
    """Count the bytes of the pieces ``start`` to ``start + nbytes`` that lie in ascending, disjoint ranges."""
    first, last = ranges
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(last - first)))

    def below(at: Int64Array) -> Int64Array:
        number = np.searchsorted(first, at, side="right")
        over = last[np.maximum(number - 1, 0)] - at if first.size else np.zeros_like(at)
        return before[number] - np.where(number > 0, np.maximum(over, 0), 0)

    return below(start + nbytes) - below(start)


# ---- the destinations' content -------------------------------------------------------------------------------------

_Key = tuple[tuple[str, ...], int, str, int | None]  # programs, layer, part, head


class _Compared:
    """One destination: the content of its first tokens, and the bytes of it that no program or several write."""

    def __init__(self, number: int, shard: Shard, span: int, tokens: int) -> None:
        self.number, self.shard, self.span, self.tokens = number, shard, span, tokens
        self._found: dict[bool, dict[_Key, tuple[int, Row]]] = {False: {}, True: {}}

    def look(self, ranges: _Ranges) -> int:
        """Compare all content with the written ranges; return its bytes."""
        total = 0
        for component in self.shard.layout.components:
            blocks, slots = self._slots(component)
            heads = np.arange(extent(component.form.head))
            content, nbytes = pieces_of(component.form.dim, 0, extent(component.form.dim))
            at = addresses_of(component, blocks, slots, heads, content)
            total += at.size * nbytes
            lacking = nbytes - _held(ranges.once, at, nbytes)
            double = _held(ranges.several, at, nbytes)
            for several, wrong in ((False, lacking), (True, double)):
                for head in np.flatnonzero(wrong.any(axis=(0, 2))).tolist():
                    token, piece = np.argwhere(wrong[:, head])[0].tolist()
                    start = int(at[token, head, piece])
                    byte = self._first(ranges, start, nbytes, several=several)
                    row = row_of(component, (int(blocks[token]), int(slots[token]), head, int(content[piece]) + byte))
                    key = self._writers(ranges, start + byte), component.layer, component.part, row.head
                    self._found[several][key] = int(wrong[:, head].sum()), row
        return total

    def _slots(self, component: Component) -> tuple[Int64Array, Int64Array]:
        """Return block and slot of every token; of opaque content, of every sub-block."""
        held = extent(component.form.token)
        if component.form.opaque:
            blocks = np.arange(self.tokens // self.span, dtype=np.int64)
            return np.repeat(blocks, held), np.tile(np.arange(held, dtype=np.int64), len(blocks))
        blocks, tokens = np.divmod(np.arange(self.tokens, dtype=np.int64), self.span)
        mine = self.shard.holds(tokens) if self.shard.cp_size > 1 else np.ones(len(tokens), dtype=np.bool_)
        return blocks[mine], (self.shard.slot(tokens) if self.shard.cp_size > 1 else tokens)[mine]

    @staticmethod
    def _first(ranges: _Ranges, start: int, nbytes: int, *, several: bool) -> int:
        """Return the first byte of a piece that several programs write, or none."""
        first, last = ranges.several if several else ranges.once
        number = int(np.searchsorted(last, start, side="right"))  # the first range that ends behind the piece's start
        if several:
            return max(int(first[number]) - start, 0)
        inside = number < first.size and int(first[number]) <= start
        return min(int(last[number]) - start, nbytes - 1) if inside else 0

    @staticmethod
    def _writers(ranges: _Ranges, address: int) -> tuple[str, ...]:
        names = []
        for name, (first, last) in ranges.each.items():
            number = int(np.searchsorted(last, address, side="right"))
            if number < first.size and int(first[number]) <= address:
                names.append(name)
        return tuple(names)

    def findings(self, *, several: bool) -> Iterator[Finding]:
        """Yield the findings, one for each set of heads and programs."""
        heads: dict[tuple[tuple[str, ...], int, str], list[tuple[int | None, int, Row]]] = defaultdict(list)
        for (programs, layer, part, head), (nbytes, row) in self._found[several].items():
            heads[programs, layer, part].append((head, nbytes, row))
        alike: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[int, str, int, Row]]] = defaultdict(list)
        for (programs, layer, part), some in heads.items():
            named = tuple(sorted(head for head, _, _ in some if head is not None))
            alike[programs, named].append((layer, part, sum(nbytes for _, nbytes, _ in some), some[0][2]))
        for (programs, named), some_parts in alike.items():
            layers = tuple(sorted({layer for layer, *_ in some_parts}))
            parts = tuple(dict.fromkeys(part for _, part, *_ in some_parts))
            nbytes = sum(nbytes for _, _, nbytes, _ in some_parts)
            yield Finding(self.number, programs, layers, parts, named, nbytes, some_parts[0][3])

"""Two layouts in, a copy program out: five passes over pure integers.

match, refine, coalesce, fuse, analyse. Each takes and returns plain data; :func:`passes` yields what each one made,
which is what :meth:`kvplan.CopyProgram.explain` prints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from kvplan.algebra import Loop, Piece, check_refined, coalesce, extent, offset, refine
from kvplan.components import Component, Form
from kvplan.errors import IncompatibleLayoutsError
from kvplan.fold import limit_loops, merge_and_fold, unrolled
from kvplan.layout import Geometry
from kvplan.limits import COPIES, RUNS
from kvplan.program import BlockAxis, Int64Array, Program, Run, RunGroup, offsets_of
from kvplan.slicing import common_heads, number_ranges


class Pair(NamedTuple):
    """Content that both sides hold.

    Attributes:
        layer, part: its name; the finer of the two where one side fuses K and V.
        src, dst: the components that hold it.
        src_dim, dst_dim: byte of each side's content where it begins.
        nbytes: bytes a (token, head).
        heads: global numbers of the heads both sides hold.
    """

    layer: int
    part: str
    src: Component
    dst: Component
    src_dim: int
    dst_dim: int
    nbytes: int
    heads: range


class Box(NamedTuple):
    """Single bytes of one unit, by nested loops from the components' addresses."""

    src: int
    dst: int
    loops: tuple[Loop, ...]


class Refined(NamedTuple):
    """Every pair of one shape, and the boxes that copy one unit of each."""

    pairs: tuple[Pair, ...]
    boxes: tuple[Box, ...]


class Coalesced(NamedTuple):
    """Every pair of one shape, and the runs that copy one unit of each."""

    pairs: tuple[Pair, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Passes:
    """What each pass made."""

    pairs: tuple[Pair, ...]
    unit_tokens: int
    refined: tuple[Refined, ...]
    coalesced: tuple[Coalesced, ...]
    program: Program


@lru_cache(maxsize=128)
def compile_geometry(src: Geometry, dst: Geometry) -> Program:
    """The copy program of two layouts, cached by value (it holds no memory alive)."""
    return passes(src, dst).program


def passes(src: Geometry, dst: Geometry) -> Passes:
    """Run all passes and keep what each one made.

    Raises:
        IncompatibleLayoutsError: what one side lacks, or where the two do not meet.
    """
    pairs = match(src, dst)
    unit_tokens = choose_unit(pairs, src.block_tokens, dst.block_tokens)
    refined = refine_pairs(pairs, unit_tokens)
    coalesced = tuple(Coalesced(r.pairs, tuple(_coalesce_box(box) for box in r.boxes)) for r in refined)
    units = (max(src.block_tokens // unit_tokens, 1), max(dst.block_tokens // unit_tokens, 1))
    groups = fuse(coalesced, unit_tokens, units, (src.num_blocks, dst.num_blocks))
    return Passes(pairs, unit_tokens, refined, coalesced, Program(unit_tokens, *units, groups))


# ---- pass 1: match -----------------------------------------------------------------------------------------------


def match(src: Geometry, dst: Geometry) -> tuple[Pair, ...]:
    """Pair components by (layer, part), splitting fused K and V where the other side keeps them apart.

    Raises:
        IncompatibleLayoutsError: a layer or part only one side holds, or content, heads or tokens that do not meet.
    """
    src_parts, dst_parts = _by_layer(src), _by_layer(dst)
    for here, there, name, other in ((src_parts, dst_parts, "source", "destination"),
                                     (dst_parts, src_parts, "destination", "source")):  # fmt: skip
        missing = sorted(set(here) - set(there))
        if missing:
            layers, them = ("layer", "it") if len(missing) == 1 else ("layers", "them")
            raise IncompatibleLayoutsError(
                f"the {other} lacks {layers} {number_ranges(missing)}, which the {name} holds; slice {them} away: "
                "layout.slice(layers=...)"
            )
    pairs: list[Pair] = []
    checked: dict[tuple[int, int, int, int, int], range] = {}
    for layer, held in src_parts.items():
        for part, a, b, a_dim, b_dim, nbytes in _match_parts(layer, held, dst_parts[layer]):
            case = (id(a.form), id(b.form), a_dim, b_dim, nbytes)
            if case not in checked:
                checked[case] = _match_forms(a, b)
            pairs.append(Pair(layer, part, a, b, a_dim, b_dim, nbytes, checked[case]))
    return tuple(pairs)


def _by_layer(side: Geometry) -> dict[int, dict[str, Component]]:
    layers: dict[int, dict[str, Component]] = defaultdict(dict)
    for component in side.components:
        layers[component.layer][component.part] = component
    return dict(layers)


PartMatch = tuple[str, Component, Component, int, int, int]


def _match_parts(layer: int, src: dict[str, Component], dst: dict[str, Component]) -> Iterator[PartMatch]:
    """Pairs of one layer: part, both components, first byte of each one's content, bytes."""
    left, right = dict(src), dict(dst)
    if "kv" in left and "kv" not in right and {"k", "v"} <= set(right):
        yield from _split_fused(left.pop("kv"), right.pop("k"), right.pop("v"), fused_first=True)
    elif "kv" in right and "kv" not in left and {"k", "v"} <= set(left):
        yield from _split_fused(right.pop("kv"), left.pop("k"), left.pop("v"), fused_first=False)
    for here, there, name, other in ((left, right, "source", "destination"), (right, left, "destination", "source")):
        for part in here:
            if part not in there:
                raise IncompatibleLayoutsError(
                    f"the {other} lacks part {part!r} of layer {layer}, which the {name} holds (the {other} has "
                    f"{sorted(there) or 'nothing else'}); slice it away: layout.slice(parts=...)"
                )
    for part, a in left.items():
        b = right[part]
        _check_tokens(a, b)
        nbytes = extent(a.form.dim)
        if nbytes != extent(b.form.dim):
            raise IncompatibleLayoutsError(
                f"layer {layer} {part!r} holds {nbytes} bytes a (token, head) in the source and {extent(b.form.dim)} "
                "in the destination; they must be equal (a fused dim is written (head dim) or (kv dim))"
            )
        yield part, a, b, 0, 0, nbytes


def _split_fused(fused: Component, k: Component, v: Component, *, fused_first: bool) -> Iterator[PartMatch]:
    _check_tokens(fused, k)
    content, k_nbytes, v_nbytes = (extent(c.form.dim) for c in (fused, k, v))
    if content != k_nbytes + v_nbytes:
        raise IncompatibleLayoutsError(
            f"layer {fused.layer}: 'kv' of {content} bytes a (token, head) is not 'k' of {k_nbytes} and 'v' of "
            f"{v_nbytes} one after the other"
        )
    if fused.form.headed != k.form.headed:  # a latent is no K and V, even where the bytes agree
        raise IncompatibleLayoutsError(
            f"layer {fused.layer}: one side holds 'kv' and the other 'k' and 'v', and only one of them has a head "
            "axis; name the heads on both, as in (head dim)"
        )
    for part, half, at, nbytes in (("k", k, 0, k_nbytes), ("v", v, k_nbytes, v_nbytes)):
        yield (part, fused, half, at, 0, nbytes) if fused_first else (part, half, fused, 0, at, nbytes)


def _check_tokens(a: Component, b: Component) -> None:
    if a.form.opaque != b.form.opaque and extent(a.form.token) != extent(b.form.token):
        tokens = max(extent(a.form.token), extent(b.form.token))
        raise IncompatibleLayoutsError(
            f"{a}: one side's block is opaque and the other's has {tokens} token slots; they have no common unit"
        )


def _match_forms(a: Component, b: Component) -> range:
    """Heads that both forms hold, after checking that a head means the same on both sides."""
    if a.form.headed != b.form.headed:
        count = extent((a if a.form.headed else b).form.head)
        if count != 1:
            raise IncompatibleLayoutsError(
                f"{a}: one side has {count} heads and the other no head axis; name the heads there, as in (head dim)"
            )
        return range(1)
    if not a.form.headed:
        return range(1)
    heads = common_heads((a.form.heads, b.form.heads))
    if not heads:
        raise IncompatibleLayoutsError(
            f"{a}: the source holds heads {_span(a.form.heads)}, the destination {_span(b.form.heads)}; they share none"
        )
    return heads


def _span(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"


# ---- pass 2: refine ----------------------------------------------------------------------------------------------


def choose_unit(pairs: tuple[Pair, ...], src_tokens: int, dst_tokens: int) -> int:
    """Token slots a unit: the largest that divides both blocks and repeats evenly in every form.

    Raises:
        IncompatibleLayoutsError: opaque blocks between block sizes that differ.
    """
    if src_tokens != dst_tokens:
        for pair in pairs:
            if pair.src.form.opaque or pair.dst.form.opaque:
                raise IncompatibleLayoutsError(
                    f"{pair.src} moves whole blocks, but blocks hold {src_tokens} tokens in the source and "
                    f"{dst_tokens} in the destination; they have no common unit"
                )
    largest = gcd(src_tokens, dst_tokens)
    axes = {form.token for pair in pairs for form in (pair.src.form, pair.dst.form) if not form.opaque}
    split = [offsets_of(token) for token in axes if len(token) > 1]
    for unit in range(largest, 0, -1):
        if largest % unit == 0 and all(_repeats(offsets, unit) for offsets in split):
            return unit
    return 1


def _repeats(offsets: Int64Array, unit: int) -> bool:
    """Whether every stretch of ``unit`` coordinates has the same offsets from its first."""
    stretches = offsets.reshape(-1, unit)
    return bool((stretches - stretches[:, :1] == stretches[0]).all())


def refine_pairs(pairs: tuple[Pair, ...], unit_tokens: int) -> tuple[Refined, ...]:
    """Common refinement of tokens, heads and content, once for each distinct pair of forms."""
    shapes: dict[tuple[int, int, int, int, int], list[Pair]] = defaultdict(list)
    for pair in pairs:
        shapes[id(pair.src.form), id(pair.dst.form), pair.src_dim, pair.dst_dim, pair.nbytes].append(pair)
    refined = []
    for alike in shapes.values():
        pair = alike[0]
        a, b = pair.src.form, pair.dst.form
        tokens = min(unit_tokens, extent(a.token))
        src_head = pair.heads.start - a.head_start if a.headed and b.headed else 0
        dst_head = pair.heads.start - b.head_start if a.headed and b.headed else 0
        axes = (
            refine(a.token, 0, b.token, 0, tokens),
            refine(a.head, src_head, b.head, dst_head, len(pair.heads)),
            refine(a.dim, pair.src_dim, b.dim, pair.dst_dim, pair.nbytes),
        )
        check_refined(prod(map(len, axes)))
        refined.append(Refined(tuple(alike), tuple(_box(pieces) for pieces in product(*axes))))
    return tuple(refined)


def _box(pieces: tuple[Piece, ...]) -> Box:
    loops = tuple(loop for piece in pieces for loop in piece.loops)
    return Box(sum(piece.src for piece in pieces), sum(piece.dst for piece in pieces), loops)


# ---- pass 3: coalesce --------------------------------------------------------------------------------------------


def _coalesce_box(box: Box) -> Run:
    return Run(box.src, box.dst, *coalesce(1, box.loops))


# ---- pass 4: fuse ------------------------------------------------------------------------------------------------


def fuse(
    coalesced: tuple[Coalesced, ...], unit_tokens: int, units: tuple[int, int], num_blocks: tuple[int, int]
) -> tuple[RunGroup, ...]:
    """Place the runs of every pair, merge what is adjacent on both sides, fold what is equally spaced."""
    _check_runs(sum(len(shape.pairs) * len(shape.runs) for shape in coalesced))
    placed: dict[tuple[BlockAxis, BlockAxis], list[Run]] = defaultdict(list)
    for shape in coalesced:
        forms = (shape.pairs[0].src.form, shape.pairs[0].dst.form)
        axes = [_block_axis(*side, unit_tokens) for side in zip(forms, units, num_blocks, strict=True)]
        runs = placed[axes[0], axes[1]]
        for pair in shape.pairs:
            for run in shape.runs:
                runs.append(run._replace(src=run.src + pair.src.address, dst=run.dst + pair.dst.address))
    groups = []
    for (src, dst), runs in placed.items():
        fused = merge_and_fold(runs)
        _check_runs(sum(unrolled(run) for run in fused), sum(run.copies for run in fused))
        fused = limit_loops(fused)
        src_base, dst_base = min(run.src for run in fused), min(run.dst for run in fused)
        moved = [run._replace(src=run.src - src_base, dst=run.dst - dst_base) for run in fused]
        groups.append(RunGroup(src, dst, src_base, dst_base, tuple(sorted(moved, key=lambda run: (run.dst, run.src)))))
    return tuple(groups)


def _check_runs(runs: int, copies: int = 0) -> None:
    """A unit is copied by a table of runs, which fits in memory.

    Raises:
        IncompatibleLayoutsError: there are too many.
    """
    for count, most, noun in ((runs, RUNS, "runs"), (copies, COPIES, "copies")):
        if count > most:
            raise IncompatibleLayoutsError(
                f"one unit would take {count:,} {noun}, and at most {most:,} are compiled; give smaller blocks, or "
                "orders that are more alike"
            )


def _block_axis(form: Form, units: int, num_blocks: int, unit_tokens: int) -> BlockAxis:
    offsets = (0,) if form.opaque else tuple(offset(form.token, unit * unit_tokens) for unit in range(units))
    return BlockAxis(form.block, form.table, offsets, num_blocks)

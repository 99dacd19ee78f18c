"""The first pass: pair the content that both layouts hold, check its types, find what stays unwritten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvplan.base.numbers import number_ranges
from kvplan.errors import IncompatibleLayoutsError
from kvplan.layout.components import Component, Geometry
from kvplan.layout.slicing import Heads, common_heads, heads_held
from kvplan.layout.strides import extent
from kvplan.layout.tensors import agree


class Pair(NamedTuple):
    """Content that both sides hold.

    Attributes:
        layer, part: number of the layer, and name of the part; ``"k"`` or ``"v"`` if only one side fuses K and V.
        src, dst: the components that hold the content.
        src_dim, dst_dim: first byte of the content in each side's (token, head) row.
        nbytes: bytes per (token, head).
        heads: global numbers of the heads that both sides hold.
    """

    layer: int
    part: str
    src: Component
    dst: Component
    src_dim: int
    dst_dim: int
    nbytes: int
    heads: range


def match(src: Geometry, dst: Geometry) -> tuple[Pair, ...]:
    """Pair components by (layer, part); split fused K and V if the other side keeps them apart.

    Raises:
        IncompatibleLayoutsError: only one side holds a layer or part, or content, heads or tokens do not agree.
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


_Held = list[Component]  # of one (layer, part): one component, or one per head if heads are separate allocations
PartMatch = tuple[str, Component, Component, int, int, int]


def _by_layer(side: Geometry) -> dict[int, dict[str, _Held]]:
    layers: dict[int, dict[str, _Held]] = defaultdict(dict)
    for component in side.components:
        layers[component.layer].setdefault(component.part, []).append(component)
    return dict(layers)


def _match_parts(layer: int, src: dict[str, _Held], dst: dict[str, _Held]) -> Iterator[PartMatch]:
    """Yield the pairs of one layer: part, both components, first byte of each side's content, bytes."""
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
                    f"{sorted(there) or 'nothing else'}); give the part one name on both sides: part=..., or slice it "
                    "away: layout.slice(parts=...)"
                )
    for part, a, b in ((name, a, b) for name, held in left.items() for a, b in _meeting(held, right[name])):
        _check_tokens(a, b)
        nbytes = extent(a.form.dim)
        if nbytes != extent(b.form.dim):
            differ = a.dtype and b.dtype and a.dtype != b.dtype
            dtypes = f"the dtypes are {a.dtype} and {b.dtype}, and a copy converts no numbers; " if differ else ""
            raise IncompatibleLayoutsError(
                f"layer {layer} {part!r} holds {nbytes} bytes per (token, head) in the source and {extent(b.form.dim)} "
                f"in the destination; they must be equal ({dtypes}a fused dim is written (head dim) or (kv dim))"
            )
        yield part, a, b, 0, 0, nbytes


def _meeting(left: _Held, right: _Held) -> Iterator[tuple[Component, Component]]:
    """Yield the pairs of components of one (layer, part) that have heads in common.

    Two lists of one component each are one pair, whose heads are checked later.

    Raises:
        IncompatibleLayoutsError: one side holds heads apart, and the other has no head axis or no common head.
    """
    if len(left) == len(right) == 1:
        yield left[0], right[0]
        return
    for one, other in ((left, right), (right, left)):
        if not one[0].form.headed:
            raise _no_head_axis(one[0], len(other))
    left, right = (sorted(held, key=lambda c: c.form.head_start) for held in (left, right))
    spans = [range(held[0].form.heads.start, held[-1].form.heads.stop) for held in (left, right)]
    if not common_heads(spans):
        raise _no_common_heads(left[0], *spans)
    at = 0
    for a in left:
        while right[at].form.heads.stop <= a.form.heads.start and at < len(right) - 1:
            at += 1
        for b in right[at:]:
            if b.form.heads.start >= a.form.heads.stop:
                break
            if common_heads((a.form.heads, b.form.heads)):
                yield a, b


def _split_fused(fused: _Held, k: _Held, v: _Held, *, fused_first: bool) -> Iterator[PartMatch]:
    nbytes = extent(k[0].form.dim), extent(v[0].form.dim)
    _check_halves(fused[0], k[0], nbytes)
    for part, half, at, size in (("k", k, 0, nbytes[0]), ("v", v, nbytes[0], nbytes[1])):
        for one, other in _meeting(fused, half):
            _check_tokens(one, other)
            yield (part, one, other, at, 0, size) if fused_first else (part, other, one, 0, at, size)


def _check_halves(fused: Component, k: Component, nbytes: tuple[int, int]) -> None:
    """Check that fused content is K followed by V."""
    content, k_nbytes, v_nbytes = extent(fused.form.dim), *nbytes
    if content != k_nbytes + v_nbytes:
        raise IncompatibleLayoutsError(
            f"layer {fused.layer}: 'kv' of {content} bytes per (token, head) is not 'k' of {k_nbytes} and 'v' of "
            f"{v_nbytes} one after the other"
        )
    if fused.form.headed != k.form.headed:  # a latent is not K and V, even if the bytes agree
        raise IncompatibleLayoutsError(
            f"layer {fused.layer}: one side holds 'kv' and the other 'k' and 'v', and only one of them has a head "
            "axis; name the heads on both, as in (head dim)"
        )


def _check_tokens(a: Component, b: Component) -> None:
    if a.form.opaque != b.form.opaque and extent(a.form.token) != extent(b.form.token):
        opaque, slots = (a, b) if a.form.opaque else (b, a)
        tokens, held = extent(slots.form.token), opaque.form.subblocks
        of = f" and holds {held} sub-blocks" if held > 1 else ""
        raise IncompatibleLayoutsError(
            f"{a}: one side's block is opaque{of}, and the other's has {tokens} token slot{'s' * (tokens != 1)}; they "
            "have no common unit, because opaque blocks move whole and tokens do not. If a block holds several opaque "
            "ones, name their axis subblock, not token"
        )


def _match_forms(a: Component, b: Component) -> range:
    """Return the numbers of the heads that two components have in common.

    Raises:
        IncompatibleLayoutsError: there are none, or one side has several heads and the other has no head axis.
    """
    if a.form.headed != b.form.headed:
        count = extent((a if a.form.headed else b).form.head)
        if count != 1:
            raise _no_head_axis(a, count)
        return range(1)
    if not a.form.headed:
        return range(1)
    heads = common_heads((a.form.heads, b.form.heads))
    if not heads:
        raise _no_common_heads(a, a.form.heads, b.form.heads)
    return heads


def _no_head_axis(a: Component, count: int) -> IncompatibleLayoutsError:
    return IncompatibleLayoutsError(
        f"{a}: one side has {count} heads and the other no head axis; name the heads there, as in (head dim)"
    )


def _no_common_heads(a: Component, src: range, dst: range) -> IncompatibleLayoutsError:
    return IncompatibleLayoutsError(
        f"{a}: the source holds heads {_span(src)}, the destination {_span(dst)}; they have no head in common"
    )


def _span(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"


def heads_of(pairs: Iterable[Pair], *, headed: bool = False) -> list[tuple[range, range, range]]:
    """Return the heads that move, with the heads that the source and the destination hold; each case once.

    If a side holds heads apart, several pairs of one (layer, part) make one range.

    Args:
        pairs: the pairs that :func:`match` found.
        headed: leave out content without a head axis.
    """
    found: dict[tuple[int, str], tuple[range, range, range]] = {}
    for pair in pairs:
        if headed and not pair.src.form.headed:
            continue
        ranges = pair.heads, pair.src.form.heads, pair.dst.form.heads
        known = found.get((pair.layer, pair.part), ranges)
        heads, src, dst = (
            range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(known, ranges, strict=True)
        )
        found[pair.layer, pair.part] = heads, src, dst
    return list(dict.fromkeys(found.values()))


def first_retyped(src: Geometry, dst: Geometry) -> Pair | None:
    """Return the first pair whose element types do not agree, or None."""
    here, there = ({component.dtype for component in side.components} for side in (src, dst))
    if all(agree(one, other) for one in here for other in there):  # as for most pairs, which are then not matched
        return None
    return next((pair for pair in match(src, dst) if not agree(pair.src.dtype, pair.dst.dtype)), None)


def check_element_types(src: Geometry, dst: Geometry) -> None:
    """Check that the element types of every pair agree. Plain bytes (integers, unknown types) agree with every type.

    Args:
        src, dst: the two sides, which compile.

    Raises:
        IncompatibleLayoutsError: both types are known, and their formats differ.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}}
    >>> a, b, plain = (KVLayout.from_spec(spec | {"dtype": one}).geometry for one in ("bf16", "fp16", "int16"))
    >>> check_element_types(a, plain)
    >>> check_element_types(a, b)
    Traceback (most recent call last):
        ...
    kvplan.errors.IncompatibleLayoutsError: layer 0 'kv' is bf16 in the source and fp16 in the destination. A copy \
converts no numbers: bytes of bf16 would be read as fp16. Give both sides one dtype; or, if the bytes are meant to be \
read so, describe one side as uint8, or compile with reinterpret=True (--reinterpret)
    """
    pair = first_retyped(src, dst)
    if pair is not None:
        held, read = pair.src.dtype, pair.dst.dtype
        raise IncompatibleLayoutsError(
            f"layer {pair.layer} {pair.part!r} is {held} in the source and {read} in the destination. A copy converts "
            f"no numbers: bytes of {held} would be read as {read}. Give both sides one dtype; or, if the bytes are "
            "meant to be read so, describe one side as uint8, or compile with reinterpret=True (--reinterpret)"
        )


class UnwrittenHeads(NamedTuple):
    """Heads that the destination holds, and that no unit of a program writes.

    Attributes:
        layers: global numbers of the layers in which the destination holds them.
        parts: names of the parts.
        heads: global numbers of the heads.
        held: number of heads that the destination holds in these layers and parts.
        whole: whether these layers and parts are all content with heads that the program writes.
    """

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    heads: tuple[int, ...]
    held: int
    whole: bool

    def __str__(self) -> str:
        named = f"{len(self.heads)} of {self.held} heads of the destination ({number_ranges(self.heads)})"
        where = "" if self.whole else f", in layers {number_ranges(self.layers)}, parts {' '.join(self.parts)},"
        return f"{named}{where} {'is' if len(self.heads) == 1 else 'are'} never written by this program"


def unwritten_heads(dst: Geometry, pairs: Sequence[Pair]) -> tuple[UnwrittenHeads, ...]:
    """Return the heads of the destination that no pair writes, one entry for each set of heads.

    Args:
        dst: the destination.
        pairs: the pairs that :func:`kvplan.program.matching.match` found.

    >>> from kvplan import KVLayout
    >>> from kvplan.program.matching import match
    >>> sizes = {"block": 4, "token": 16, "dim": 64}
    >>> rank, pool = (KVLayout.from_spec({"notation": "kv block token head dim", "sizes": sizes | {"head": heads}})
    ...               for heads in (2, 8))
    >>> print(*unwritten_heads(pool.geometry, match(rank.geometry, pool.geometry)))
    6 of 8 heads of the destination (2-7) are never written by this program
    """
    held = heads_held(dst.components)
    written: dict[tuple[int, str], set[int]] = {}
    there: dict[tuple[int, str], Heads] = {}
    for pair in pairs:
        heads = held[pair.layer, pair.dst.part]
        if heads is not None:
            moved = pair.heads if pair.src.form.headed else heads
            written.setdefault((pair.layer, pair.part), set()).update(moved)
            there[pair.layer, pair.part] = heads
    found: dict[tuple[tuple[int, ...], int], list[tuple[int, str]]] = {}
    for name, heads in there.items():
        left = tuple(head for head in heads if head not in written[name])
        if left:
            found.setdefault((left, len(heads)), []).append(name)
    return tuple(
        UnwrittenHeads(
            tuple(sorted({layer for layer, _ in names})), tuple(dict.fromkeys(part for _, part in names)), left, count,
            len(names) == len(there),
        )
        for (left, count), names in found.items()
    )  # fmt: skip

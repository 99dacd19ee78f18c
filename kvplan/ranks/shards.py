"""Shards: the layers, heads and tokens that each rank's cache holds, and the shares that each source rank moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import gcd, lcm
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.base.numbers import number_ranges
from kvplan.base.values import integer
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import common_heads, heads_held
from kvplan.layout.strides import Int64Array

Heads = range | None  # None for content that belongs to no head
Parts = dict[str, Heads]  # the parts of one layer that a rank holds


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's cache under context parallelism: its layout, and which tokens of a sequence it holds.

    Tokens are dealt to ``cp_size`` ranks in rounds, ``interleave`` tokens at a time: rank
    ``t // interleave % cp_size`` holds token ``t``. Consecutive blocks of a rank's list hold its tokens in order. So a
    block id stands for ``block_tokens * cp_size`` tokens of the sequence, of which this rank holds ``block_tokens``.
    If ``interleave`` is ``block_tokens``, each rank gets whole blocks.

    Args:
        layout: the rank's layout, with global numbers of layers and heads.
        cp_rank: number of the rank, from 0.
        cp_size: number of ranks that share the tokens; if 1, the rank holds every token.
        interleave: consecutive tokens that a rank gets per round; divides the layout's block_tokens.

    Raises:
        LayoutError: a number is out of range, or content is opaque, so that it cannot be split by tokens.

    >>> import numpy as np
    >>> cache = KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8))
    >>> Shard(cache, cp_rank=1, cp_size=4).span_tokens
    64
    """

    layout: KVLayout
    cp_rank: int = 0
    cp_size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.layout, KVLayout):
            raise LayoutError(f"a shard's layout is a {type(self.layout).__name__}; give a KVLayout")
        for name in ("cp_rank", "cp_size", "interleave"):
            value = integer(name, getattr(self, name), least=0 if name == "cp_rank" else 1)
            object.__setattr__(self, name, value)
        if self.cp_rank >= self.cp_size:
            raise LayoutError(f"cp_rank is {self.cp_rank}; with cp_size {self.cp_size} it is 0 to {self.cp_size - 1}")
        if self.cp_size > 1:
            if any(c.form.opaque for c in self.layout.components):
                raise LayoutError(
                    f"{self.layout} has content without token slots, which context parallelism cannot split"
                )
            tokens = self.layout.block_tokens
            if tokens % self.interleave:
                raise LayoutError(f"interleave is {self.interleave}; it must divide the rank's block_tokens, {tokens}")

    @property
    def span_tokens(self) -> int:
        """Return the tokens of the sequence per block id, over all ranks."""
        return self.layout.block_tokens * self.cp_size

    @property
    def period(self) -> int:
        """Return the tokens of one round over all ranks; 1 if the rank holds every token."""
        return self.interleave * self.cp_size if self.cp_size > 1 else 1

    @property
    def turn_tokens(self) -> int:
        """Return how many tokens follow one another both in the sequence and in this cache."""
        return self.interleave if self.cp_size > 1 else self.layout.block_tokens

    def holds(self, token: Int64Array) -> NDArray[np.bool_]:
        """Return, for each of these tokens of a block's span, whether this rank holds it."""
        held: NDArray[np.bool_] = token // self.interleave % self.cp_size == self.cp_rank
        return held

    def slot(self, token: Int64Array) -> Int64Array:
        """Return the token slots of the rank's block that hold these tokens."""
        if self.cp_size == 1:
            return token
        return token // (self.interleave * self.cp_size) * self.interleave + token % self.interleave

    def meets(self, other: Shard) -> bool:
        """Return whether both ranks hold a common token."""
        token = np.arange(0, lcm(self.period, other.period), gcd(self.turn_tokens, other.turn_tokens))
        return bool(np.any(self.holds(token) & other.holds(token)))

    def __str__(self) -> str:
        if self.cp_size == 1:
            return str(self.layout)
        return f"{self.layout} | tokens {self.cp_rank} of {self.cp_size}, {self.interleave} at a time"


class Turn(NamedTuple):
    """The turn of one of several replicas: it moves the block ids with remainder ``number`` modulo ``ranks``."""

    number: int
    ranks: int


class Share(NamedTuple):
    """The content that one source moves to one destination in its turn: a product of layers, parts and heads.

    Attributes:
        turn: the block ids that the source moves.
        layers: global numbers of layers.
        src_parts, dst_parts: names of the parts on each side; ``"kv"`` on one side matches ``"k"`` and ``"v"``.
        heads: global numbers of heads, or None if the parts have no heads.
    """

    turn: Turn
    layers: tuple[int, ...]
    src_parts: tuple[str, ...]
    dst_parts: tuple[str, ...]
    heads: Heads


def shares(
    sources: Sequence[Shard], destinations: Sequence[Shard], *, complete: bool
) -> dict[tuple[int, int], tuple[Share, ...]]:
    """Divide the content among the sources, so that every byte of every destination has one writer.

    Args:
        sources, destinations: the ranks of both sides.
        complete: whether content of a destination that no source holds is an error.

    Returns:
        For each (source, destination) with common content, the shares that the source moves.

    Raises:
        IncompatibleLayoutsError: one side does not name its heads, or no source holds some content.
        LayoutError: sources deal the tokens of the same content to ranks in different ways.
    """
    held = [_held(shard.layout) for shard in sources]
    found: dict[tuple[int, int], list[Share]] = defaultdict(list)
    for d, destination in enumerate(destinations):
        alike: dict[Any, list[int]] = defaultdict(list)  # layers that all ranks hold alike
        wanted = _held(destination.layout)
        for layer, parts in wanted.items():
            there = tuple(tuple(layers.get(layer, {}).items()) for layers in held)
            alike[tuple(parts.items()), there].append(layer)
        for layers in alike.values():
            pieces: dict[int, list[Share]] = defaultdict(list)
            for part, heads in wanted[layers[0]].items():
                where = f"layer {layers[0]} {part!r}"
                offers = _offers([parts.get(layers[0], {}) for parts in held], part, heads, where)
                for some, among in _split_heads(heads, {s: both for s, (_, both) in offers.items()}):
                    content = where if some is None else f"{where}, heads {number_ranges(some)}"
                    _check_one_way(sources, among, content)
                    missing = _missing(sources, among, destination) if complete else None
                    if missing is not None:
                        raise IncompatibleLayoutsError(
                            f"no source holds {content}{missing}, which destination {d} holds; name the rank that "
                            "does, slice the destination, or pass complete=False to leave those bytes as they are"
                        )
                    for s, turn in _turns(sources, among).items():
                        if sources[s].meets(destination):
                            pieces[s].append(Share(turn, tuple(sorted(layers)), offers[s][0], (part,), some))
            for s, made in pieces.items():
                found[s, d] += _joined(made)
    return {pair: tuple(made) for pair, made in sorted(found.items())}


def _held(layout: KVLayout) -> dict[int, Parts]:
    """Return the parts of each layer of a rank, with their heads."""
    held: dict[int, Parts] = defaultdict(dict)
    for (layer, part), heads in heads_held(layout.components).items():
        if isinstance(heads, tuple):
            raise LayoutError(f"layer {layer} {part!r} holds heads {number_ranges(heads)}; a rank's are consecutive")
        held[layer][part] = heads
    return held


def _names(held: Parts, part: str) -> tuple[str, ...]:
    """Return the names of the parts that hold a part: ``"kv"`` may be held as ``"k"`` and ``"v"``, or the reverse."""
    if part in held:
        return (part,)
    if part == "kv" and "k" in held and "v" in held:
        return ("k", "v")
    return ("kv",) if part in {"k", "v"} and "kv" in held else ()


def _offers(held: Sequence[Parts], part: str, wanted: Heads, where: str) -> dict[int, tuple[tuple[str, ...], Heads]]:
    """Return, for each source with common content, its parts that hold a destination's part, and the common heads.

    Raises:
        IncompatibleLayoutsError: content without a head axis on one rank has several heads on the others.
    """
    offers: dict[int, tuple[tuple[str, ...], Heads]] = {}
    named = {wanted}
    for s, parts in enumerate(held):
        names = _names(parts, part)
        known = [heads for heads in (wanted, *(parts[name] for name in names)) if heads is not None]
        both = common_heads(known) if known else None
        if names and (both or both is None):
            offers[s] = names, both
        named |= {parts[name] for name in names}
    numbers = sorted({number for heads in named if heads is not None for number in heads})
    if None in named and len(numbers) > 1:
        raise IncompatibleLayoutsError(
            f"{where} has heads {number_ranges(numbers)} on some ranks and no head axis on others; "
            "name the heads on all of them, as in (head dim), with head_start"
        )
    return offers


def _split_heads(wanted: Heads, offers: Mapping[int, Heads]) -> Iterator[tuple[Heads, tuple[int, ...]]]:
    """Split heads into ranges, each held by the same sources; yield each range with its sources."""
    ranges = {s: heads for s, heads in offers.items() if heads is not None}
    if wanted is None or len(ranges) < len(offers):  # a rank without a head axis: all ranks have the same head
        yield next(iter(ranges.values()), wanted), tuple(offers)
        return
    edges = sorted({edge for heads in (wanted, *ranges.values()) for edge in (heads.start, heads.stop)})
    cells = [
        (tuple(s for s, heads in ranges.items() if heads.start <= first and end <= heads.stop), first, end)
        for first, end in pairwise(edges)
    ]
    for among, run in groupby(cells, key=itemgetter(0)):
        cut = [cell for _, *cell in run]
        yield range(cut[0][0], cut[-1][1]), among


def _check_one_way(sources: Sequence[Shard], among: Sequence[int], where: str) -> None:
    """Check that all sources of some content deal its tokens to ranks in one way."""
    schemes = sorted({(sources[s].cp_size, sources[s].interleave if sources[s].cp_size > 1 else 1) for s in among})
    if len(schemes) > 1:
        told = " and ".join(f"{size} ranks, {interleave} tokens at a time" for size, interleave in schemes)
        raise LayoutError(f"sources deal the tokens of {where} in two ways ({told}); give sources of one way")


def _missing(sources: Sequence[Shard], among: Sequence[int], destination: Shard) -> str | None:
    """Say which tokens of some content no source holds; None if nothing is missing."""
    if not among:
        return ""
    size, ranks = sources[among[0]].cp_size, {sources[s].cp_rank for s in among}
    others = (k for k in range(size) if k not in ranks)
    absent = [k for k in others if replace(sources[among[0]], cp_rank=k).meets(destination)]
    return f", tokens of context-parallel rank {number_ranges(absent)} of {size}" if absent else None


def _turns(sources: Sequence[Shard], among: Sequence[int]) -> dict[int, Turn]:
    """Number the ranks that hold the same tokens, and return the turn of each rank."""
    alike: dict[int, list[int]] = defaultdict(list)
    for s in among:
        alike[sources[s].cp_rank].append(s)
    return {s: Turn(k, len(held)) for held in alike.values() for k, s in enumerate(held)}


def _joined(pieces: Sequence[Share]) -> Iterator[Share]:
    """Join the parts of one turn and equal heads, of the same layers, into one share."""
    grouped: dict[tuple[Turn, Heads], list[Share]] = defaultdict(list)
    for piece in pieces:
        grouped[piece.turn, piece.heads].append(piece)
    for turn in {turn for turn, _ in grouped}:
        ranges = [heads for there, heads in grouped if there == turn and heads is not None]
        if (turn, None) in grouped and len(ranges) == 1:  # a slice of heads keeps parts without heads whole
            grouped[turn, ranges[0]] += grouped.pop((turn, None))
    for (_, heads), same in grouped.items():
        src = tuple(dict.fromkeys(name for piece in same for name in piece.src_parts))
        dst = tuple(name for piece in same for name in piece.dst_parts)
        yield same[0]._replace(src_parts=src, dst_parts=dst, heads=heads)

"""Find the heads of a destination that no unit of a program writes: such a program is legal, but should be known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvplan.base.numbers import number_ranges
from kvplan.layout.components import Geometry
from kvplan.layout.slicing import Heads, heads_held
from kvplan.program.matching import Pair


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

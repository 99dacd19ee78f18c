"""Turn the bytes of one block into nested loops, from which pictures are drawn; the outermost loop comes first.

The loops are integers and names. Offsets are relative to a node's first byte. A node begins and ends with content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kvplan.base.cached_property import cached_property
from kvplan.base.limits import LIMITS
from kvplan.errors import LayoutError
from kvplan.layout.components import Component
from kvplan.layout.strides import Factors, span


@dataclass(frozen=True)
class Loop:
    """One factor of an axis: ``count`` steps of ``stride`` bytes. A step advances ``place`` coordinates of the axis."""

    axis: str
    place: int
    count: int
    stride: int


@dataclass(frozen=True)
class Tally:
    """Contiguous runs in order of address: their number, bytes of the first and last, (least, most) of the others."""

    count: int
    first: int
    last: int
    between: tuple[int, int] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the smallest and of the largest run."""
        sizes = [self.first, self.last, *(self.between or ())]
        return min(sizes), max(sizes)

    def then(self, other: Tally, *, touching: bool) -> Tally:
        """Return these runs followed by the runs of ``other``; if ``touching``, these end where ``other`` begins.

        >>> Tally(1, 8, 8).then(Tally(2, 4, 6), touching=True)
        Tally(count=2, first=12, last=6, between=None)
        """
        sizes = [*(self.between or ()), *(other.between or ())]
        sizes += [] if self.count == 1 or touching else [self.last]
        sizes += [] if other.count == 1 or touching else [other.first]
        joined = self.last + other.first
        if touching and self.count > 1 and other.count > 1:
            sizes.append(joined)
        first = joined if touching and self.count == 1 else self.first
        last = joined if touching and other.count == 1 else other.last
        return Tally(self.count + other.count - touching, first, last, (min(sizes), max(sizes)) if sizes else None)

    def times(self, count: int, *, touching: bool) -> Tally:
        """Return these runs, repeated ``count`` times."""
        if count == 1:
            return self
        half = self.times(count // 2, touching=touching)
        twice = half.then(half, touching=touching)
        return twice.then(self, touching=touching) if count % 2 else twice


class Leaf(NamedTuple):
    """Contiguous bytes of one part."""

    part: str
    nbytes: int

    @property
    def span(self) -> int:
        """Return the bytes from the first to the last."""
        return self.nbytes

    @property
    def tally(self) -> Tally:
        """Return the tally of its one run."""
        return Tally(1, self.nbytes, self.nbytes)

    @property
    def content(self) -> int:
        """Return the bytes of content."""
        return self.nbytes

    @property
    def likeness(self) -> object:
        """Return a key that is equal for nodes that differ only in names."""
        return self.nbytes

    @property
    def key(self) -> object:
        """Return a key that is equal for nodes that are drawn alike."""
        return self


class _Loops:
    """A node that holds other nodes."""

    @cached_property
    def key(self: Any) -> object:
        """Return a key that is equal for nodes that are drawn alike."""
        return (self.likeness, parts_of(self))


class Repeat(_Loops):
    """A node that is repeated ``count`` times, every ``stride`` bytes; ``names`` has the name of each repetition."""

    def __init__(self, axis: str, names: Sequence[str], stride: int, child: Node) -> None:
        self.axis, self.names, self.stride, self.child = axis, names, stride, child
        self.count = len(self.names)
        self.span: int = (self.count - 1) * stride + child.span
        self.content: int = self.count * child.content

    @cached_property
    def tally(self) -> Tally:
        """Return the tally of the runs inside."""
        return self.child.tally.times(self.count, touching=self.stride == self.child.span)

    @cached_property
    def likeness(self) -> object:
        """Return a key that is equal for nodes that differ only in names."""
        return (self.axis, self.count, self.stride, self.child.likeness)


class Row(_Loops):
    """Several nodes in order of address, each as ``(first byte, name, node)``."""

    def __init__(self, axis: str, items: Sequence[tuple[int, str, Node]]) -> None:
        self.axis, self.items = axis, tuple(items)
        self.span: int = items[-1][0] + items[-1][2].span
        self.content: int = sum(node.content for _, _, node in items)

    @cached_property
    def tally(self) -> Tally:
        """Return the tally of the runs inside."""
        tally = self.items[0][2].tally
        for (at, _, node), (then, _, following) in pairwise(self.items):
            tally = tally.then(following.tally, touching=at + node.span == then)
        return tally

    @cached_property
    def likeness(self) -> object:
        """Return a key that is equal for nodes that differ only in names."""
        return (self.axis, tuple((at, node.likeness) for at, _, node in self.items))


Node = Leaf | Repeat | Row


def parts_of(node: Node) -> tuple[str, ...]:
    """Return the names of the parts inside, in order of address.

    >>> parts_of(Row("part", [(0, "k", Leaf("k", 8)), (8, "v", Leaf("v", 8))]))
    ('k', 'v')
    """
    if isinstance(node, Leaf):
        return (node.part,)
    if isinstance(node, Repeat):
        return parts_of(node.child)
    return tuple(dict.fromkeys(part for _, _, child in node.items for part in parts_of(child)))


def runs_of(node: Node, at: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the bytes of every piece, in order of address; pieces that touch are not joined.

    >>> list(runs_of(Repeat("token", ["token 0", "token 1"], 16, Leaf("kv", 12))))
    [(0, 12), (16, 12)]
    """
    if isinstance(node, Leaf):
        yield at, node.nbytes
    elif isinstance(node, Repeat):
        for k in range(node.count):
            yield from runs_of(node.child, at + k * node.stride)
    else:
        for start, _, child in node.items:
            yield from runs_of(child, at + start)


class Item(NamedTuple):
    """One (layer, part) of a block: its first address, and its loops, the largest stride first."""

    address: int
    layer: int
    part: str
    head_start: int
    loops: tuple[Loop, ...]

    @property
    def end(self) -> int:
        """Return the address after the last byte."""
        return self.address + _reach(self.loops)


def item_of(component: Component, block: int) -> Item:
    """Return the item of a block in one component."""
    form = component.form
    axes = (("subblock" if form.opaque else "token", form.token), ("head", form.head), ("dim", form.dim))
    loops = [loop for axis, factors in axes for loop in _loops(axis, factors)]
    ordered = tuple(sorted(loops, key=lambda loop: -loop.stride))
    return Item(component.address + form.block_offset(block), component.layer, component.part, form.head_start, ordered)


def _loops(axis: str, factors: Factors) -> list[Loop]:
    loops, place = [], 1
    for count, stride in reversed(factors):
        if count > 1:
            loops.append(Loop(axis, place, count, stride))
        place *= count
    return loops


def _reach(loops: Sequence[Loop]) -> int:
    return span(tuple((loop.count, loop.stride) for loop in loops)) + 1


def nest(items: Sequence[Item]) -> tuple[int, Node]:
    """Return the first byte of these (layer, part)s of a block, and their bytes as nested loops.

    >>> rows = Item(64, 0, "kv", 0, (Loop("token", 1, 4, 16), Loop("dim", 1, 12, 1)))
    >>> start, node = nest([rows])
    >>> start, node.span, node.tally
    (64, 60, Tally(count=4, first=12, last=12, between=(12, 12)))
    """
    low = min(item.address for item in items)
    first, rest = items[0], [item._replace(loops=item.loops[1:]) for item in items]
    if len(items) == 1 and not first.loops:
        return low, Leaf(first.part, 1)
    if len(items) == 1 and len(first.loops) == 1 and first.loops[0].axis == "dim" and first.loops[0].stride == 1:
        return low, Leaf(first.part, first.loops[0].count)
    outer = first.loops[0] if first.loops else None
    alike = outer is not None and all(item.loops[:1] == first.loops[:1] for item in items)
    if outer is not None and alike and max(item.end for item in rest) - low <= outer.stride:
        _, child = nest(rest)
        return low, Repeat(outer.axis, _Names(outer, first.head_start), outer.stride, child)
    for axis in ("part", "layer"):
        groups = _grouped(items, axis)
        if len(groups) > 1 and all(a[1] <= b[0] for a, b in pairwise(groups)):
            return low, _in_order(axis, low, [(name, held) for _, _, name, held in groups])
    clusters = _clusters(items)
    if len(clusters) > 1:
        return low, _in_order("", low, [(_held(held), held) for held in clusters])
    return low, _woven(low, items)


class _Names(Sequence[str]):
    """The names of the steps of a loop. They are made on demand, because there may be millions of steps."""

    def __init__(self, loop: Loop, head_start: int) -> None:
        self._loop, self._start = loop, head_start if loop.axis == "head" else 0

    def __len__(self) -> int:
        return self._loop.count

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[at] for at in range(len(self))[k]]
        place, first = self._loop.place, self._start + range(len(self))[k] * self._loop.place
        noun = "byte" if self._loop.axis == "dim" else self._loop.axis
        return f"{noun} {first}" if place == 1 else f"{noun}s {first}-{first + place - 1}"


def _grouped(items: Sequence[Item], axis: str) -> list[tuple[int, int, str, list[Item]]]:
    groups: dict[int | str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.part if axis == "part" else item.layer, []).append(item)
    found = [
        (min(i.address for i in held), max(i.end for i in held), str(key) if axis == "part" else f"layer {key}", held)
        for key, held in groups.items()
    ]
    return sorted(found, key=lambda group: group[0])


def _clusters(items: Sequence[Item]) -> list[list[Item]]:
    """Return the items in lists; items are in one list if their address ranges overlap."""
    clusters: list[list[Item]] = []
    end = -1
    for item in sorted(items, key=lambda item: item.address):
        if item.address < end:
            clusters[-1].append(item)
        else:
            clusters.append([item])
        end = max(end, item.end)
    return clusters


def _held(items: Sequence[Item]) -> str:
    layers = sorted({item.layer for item in items})
    layer = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    parts = list(dict.fromkeys(item.part for item in items))
    return f"{layer} {parts[0]}" if len(parts) == 1 else layer


def _in_order(axis: str, low: int, entries: Sequence[tuple[str, list[Item]]]) -> Node:
    """Arrange entries in order of address; equal and evenly spaced neighbours become one loop."""
    placed = [(start - low, name, node) for name, held in entries for start, node in (nest(held),)]
    groups: list[list[tuple[int, str, Node]]] = []
    for entry in placed:
        group = groups[-1] if groups else []
        even = len(group) < 2 or entry[0] - group[-1][0] == group[1][0] - group[0][0]
        if axis != "part" and group and even and group[0][2].key == entry[2].key:
            group.append(entry)
        else:
            groups.append([entry])
    looped = [_as_loop(axis, group) for group in groups]
    return looped[0][2] if len(looped) == 1 else Row(axis, looped)


def _as_loop(axis: str, group: list[tuple[int, str, Node]]) -> tuple[int, str, Node]:
    if len(group) == 1:
        return group[0]
    names = [name for _, name, _ in group]
    loop = Repeat(axis, names, group[1][0] - group[0][0], group[0][2])
    noun, _, first = names[0].rpartition(" ")
    return group[0][0], f"{noun}s {first}-{names[-1].rpartition(' ')[2]}", loop


def _woven(low: int, items: Sequence[Item]) -> Node:
    """Return a row of all runs, in order of address, for items that cannot be drawn as nested loops.

    Either several (layer, part)s are interleaved, or the strides of one (layer, part) do not nest.
    """
    pieces: list[tuple[int, int, str]] = []
    for item in items:
        loops = list(item.loops)
        nbytes = loops.pop().count if loops and loops[-1].axis == "dim" and loops[-1].stride == 1 else 1
        starts = [item.address - low]
        for loop in loops:
            if len(pieces) + len(starts) * loop.count > LIMITS.listed:
                raise LayoutError(
                    f"layer {item.layer} {item.part!r} takes over {LIMITS.listed:,} runs a block: too many to draw"
                )
            starts = [start + k * loop.stride for start in starts for k in range(loop.count)]
        pieces += [(start, nbytes, item.part) for start in starts]
    pieces.sort()
    return Row("", [(start, part, Leaf(part, nbytes)) for start, nbytes, part in pieces])

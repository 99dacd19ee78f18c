"""The axes of a layout as a reader sees them: one view for each form of components, with extents and strides."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvplan.layout.components import Component, Form
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import heads_held
from kvplan.layout.strides import Factors, extent


@dataclass(frozen=True)
class Factor:
    """One factor of an axis.

    Attributes:
        extent: number of steps.
        stride: bytes from one step to the next; None if it is not one number.
    """

    extent: int
    stride: int | None


@dataclass(frozen=True)
class Axis:
    """An axis of a view.

    Attributes:
        axis: layer, part, block, token, subblock, head or dim.
        extent: its length; of dim, bytes.
        factors: its factors, the outer one first; none for a length of 1.
    """

    axis: str
    extent: int
    factors: tuple[Factor, ...]


@dataclass(frozen=True)
class View:
    """Layers and parts whose components have one form.

    Attributes:
        parts: names of the parts.
        layers: global numbers of the layers.
        head_start: global number of the first head.
        block_nbytes: bytes of a block in one layer and part.
        axes: the axes, the outermost first.
    """

    parts: tuple[str, ...]
    layers: tuple[int, ...]
    head_start: int
    block_nbytes: int
    axes: tuple[Axis, ...]


def views(layout: KVLayout) -> tuple[View, ...]:
    """Return a view for each form of components.

    >>> sizes = {"layer": 2, "block": 8, "token": 16, "head": 2, "dim": 64}
    >>> (view,) = views(KVLayout.from_spec({"notation": "block layer token head dim", "sizes": sizes}))
    >>> [(axis.axis, axis.extent) for axis in view.axes]
    [('layer', 2), ('part', 1), ('block', 8), ('token', 16), ('head', 2), ('dim', 128)]
    """
    forms: dict[Form, list[Component]] = defaultdict(list)
    heads = heads_held(layout.components)
    for component in layout.components:
        first = heads[component.layer, component.part]
        start = component.form.head_start if first is None else first[0]
        forms[replace(component.form, head_start=start)].append(component)
    starts = sorted(region.address for region in layout.regions)
    return tuple(_view(form, some, starts) for form, some in forms.items())


def token_nbytes(layout: KVLayout) -> int | None:
    """Return the bytes of a token over all layers and parts that have token slots; None if none has."""
    forms = [component.form for component in layout.components if not component.form.opaque]
    return sum(extent(form.head) * extent(form.dim) for form in forms) if forms else None


def _view(form: Form, components: Iterable[Component], starts: Sequence[int]) -> View:
    """Return the view of components of one form.

    If the heads of a layout lie apart, one (layer, part) has several components, which differ in ``head_start`` alone.
    """
    every = sorted(components, key=lambda c: (c.layer, c.form.head_start))
    first = [*{(c.layer, c.part): c for c in reversed(every)}.values()][::-1]
    apart = len(every) // len(first)
    blocks = _axis("block", form.block) if form.table is None else _looked_up("block", len(form.table))
    axes = [_outer("layer", first, ("part",), starts), _outer("part", first, ("layer",), starts), blocks]
    if not form.opaque or form.subblocks > 1:
        axes.append(_axis("subblock" if form.opaque else "token", form.token))
    if form.headed:
        axes.append(_axis("head", form.head) if apart == 1 else _outer("head", every, ("layer", "part"), starts))
    axes.append(_axis("dim", form.dim))
    parts, layers = dict.fromkeys(c.part for c in first), sorted({c.layer for c in first})
    return View(tuple(parts), tuple(layers), form.head_start, form.block_nbytes * apart, tuple(axes))


def _axis(name: str, factors: Factors) -> Axis:
    return Axis(name, extent(factors), tuple(Factor(*factor) for factor in factors))


def _looked_up(name: str, size: int) -> Axis:
    return Axis(name, size, (Factor(size, None),))


def _outer(name: str, components: Iterable[Component], others: Sequence[str], starts: Sequence[int]) -> Axis:
    """Return an axis that was unrolled into components that agree in the other axes."""
    lines: dict[object, list[Component]] = defaultdict(list)
    for component in components:
        lines[tuple(getattr(component, other) for other in others)].append(component)
    size = max(map(len, lines.values()))
    if size == 1:
        return _axis(name, ())
    steps = {b.address - a.address for line in lines.values() for a, b in pairwise(line)}
    memory = [{max(bisect_right(starts, c.address), 1) for c in line} for line in lines.values()]
    return _axis(name, ((size, steps.pop()),)) if len(steps) == max(map(len, memory)) == 1 else _looked_up(name, size)

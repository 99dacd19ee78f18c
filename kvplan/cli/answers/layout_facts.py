"""Facts of a layout as plain data, which ``kvplan inspect`` prints."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from kvplan.layout.components import Component, Form, Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.padding import padding_of
from kvplan.layout.slicing import heads_held
from kvplan.layout.strides import Factors, extent
from kvplan.program.program import Program
from kvplan.program.unwritten import UnwrittenHeads

LAYOUT = (
    "notation", "sizes", "dtype", "device", "virtual", "addresses", "layers", "heads", "parts", "num_blocks",
    "block_tokens", "nbytes", "block_nbytes",
)  # fmt: skip
PADDING = ("share", "between_nbytes", "before_nbytes", "after_nbytes", "block_nbytes", "unused_nbytes")
REGION = ("address", "nbytes", "pinned", "writable")
UNIT = ("unit_tokens", "unit_nbytes", "runs", "run_nbytes")


def picked(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes by name. Tuples and ranges become lists, as in JSON."""
    values = {name: getattr(source, name) for name in names}
    return {name: list(value) if isinstance(value, tuple | range) else value for name, value in values.items()}


def layout_facts(layout: KVLayout) -> dict[str, Any]:
    """Return every fact of a layout; numbers are bytes unless the name says otherwise."""
    from kvplan.plan.copy_program import compile  # noqa: A004

    regions = sorted(layout.regions, key=lambda region: region.address)
    padding = padding_of(layout.built)
    return {
        **picked(layout, LAYOUT),
        "token_nbytes": token_nbytes(layout),
        "padding_nbytes": padding.nbytes,
        "padding": picked(padding, PADDING),
        "block_extents": extent_facts(compile(layout, layout).program, "src"),
        "views": [_view(form, held, regions) for form, held in _by_form(layout).items()],
        "regions": [picked(region, REGION) for region in regions],
        "seams": list(layout.seams),
    }


def side_facts(layout: KVLayout) -> dict[str, str]:
    """Return the name of one side of a pair, and the process of its addresses."""
    return picked(layout, ("notation", "device", "addresses"))


def extent_facts(program: Program, side: str) -> dict[str, int]:
    """Return number and sizes of the extents of one unit on one side: its maximal contiguous byte ranges."""
    count, smallest, largest = program.extents(side)
    return {"count": count, "min_nbytes": smallest, "max_nbytes": largest}


def unwritten_facts(unwritten: Sequence[UnwrittenHeads]) -> list[dict[str, Any]]:
    """Return the heads of a destination that no unit of a program writes."""
    return [
        {"layers": list(one.layers), "parts": list(one.parts), "heads": list(one.heads), "held": one.held,
         "text": str(one)}
        for one in unwritten
    ]  # fmt: skip


def token_nbytes(layout: KVLayout) -> int | None:
    """Return the bytes per token over all parts that have token slots; None if no part has them."""
    forms = [component.form for component in layout.components if not component.form.opaque]
    return sum(extent(form.head) * extent(form.dim) for form in forms) if forms else None


def _by_form(layout: KVLayout) -> dict[Form, list[Component]]:
    forms: dict[Form, list[Component]] = defaultdict(list)
    held = heads_held(layout.components)
    for component in layout.components:
        first = held[component.layer, component.part]
        start = component.form.head_start if first is None else first.start
        forms[replace(component.form, head_start=start)].append(component)
    return forms


def _view(form: Form, held: Sequence[Component], regions: Sequence[Region]) -> dict[str, Any]:
    """Return the layers and parts of components of one form, and the axes over them and inside them.

    If the heads of a layout lie apart, one (layer, part) has several components, whose forms differ in ``head_start``
    alone.
    """
    by_part: dict[str, list[Component]] = defaultdict(list)
    by_layer: dict[int, list[Component]] = defaultdict(list)
    by_head: dict[tuple[int, str], list[Component]] = defaultdict(list)
    for component in sorted(held, key=lambda component: (component.layer, component.form.head_start)):
        heads = by_head[component.layer, component.part]
        heads.append(component)
        if len(heads) == 1:
            by_part[component.part].append(component)
            by_layer[component.layer].append(component)
    apart = max(map(len, by_head.values()))
    axes = [
        _outer("layer", list(by_part.values()), regions),
        _outer("part", list(by_layer.values()), regions),
        _axis("block", form.block) if form.table is None else _looked_up("block", len(form.table)),
    ]
    if not form.opaque or form.subblocks > 1:
        axes.append(_axis("subblock" if form.opaque else "token", form.token))
    if form.headed:
        axes.append(_axis("head", form.head) if apart == 1 else _outer("head", list(by_head.values()), regions))
    axes.append(_axis("dim", form.dim))
    return {
        "parts": list(by_part),
        "layers": sorted(by_layer),
        "head_start": form.head_start,
        "block_nbytes": form.block_nbytes * apart,
        "axes": axes,
    }


def _axis(name: str, factors: Factors) -> dict[str, Any]:
    return {
        "axis": name,
        "extent": extent(factors),
        "factors": [{"extent": size, "stride": stride} for size, stride in factors],
    }


def _looked_up(name: str, size: int) -> dict[str, Any]:
    return {"axis": name, "extent": size, "factors": [{"extent": size, "stride": None}]}


def _outer(name: str, lines: Sequence[Sequence[Component]], regions: Sequence[Region]) -> dict[str, Any]:
    """Return the facts of an axis that was unrolled into components; its stride is None if it is not one number."""
    size = max(len(line) for line in lines)
    if size == 1:
        return _axis(name, ())
    steps = {b.address - a.address for line in lines for a, b in pairwise(line)}
    apart = any(len({_region_of(c.address, regions) for c in line}) > 1 for line in lines)
    if apart or len(steps) != 1:
        return _looked_up(name, size)
    return _axis(name, ((size, steps.pop()),))


def _region_of(address: int, regions: Sequence[Region]) -> int:
    return max(bisect_right(regions, address, key=lambda region: region.address) - 1, 0)

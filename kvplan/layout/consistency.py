"""The sizes of a layout of which only some components are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplan.layout.components import Component
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.strides import extent

_MORE = " + "  # between the notations and dtypes of merged layouts


def sizes_of(components: Sequence[Component], sizes: Mapping[str, int], dtype: str) -> dict[str, int]:
    """Return the sizes of a layout of which only some components are kept. Sizes that still fit stay.

    Args:
        components: the components that are kept.
        sizes: sizes of the whole layout.
        dtype: dtype of the whole layout; merged layouts have several.

    >>> from kvplan.layout.components import Component, Form
    >>> kept = Component(3, "scale", 0, Form(((9, 64),), ((4, 16),), (), ((8, 1),), headed=False))
    >>> sizes_of([kept], {"layer": 6, "kv": 2, "block": 9, "token": 4, "head": 2, "dim": 64}, "bf16 + fp32")
    {'layer': 1, 'kv': 1, 'block': 9, 'token': 4, 'head': 2, 'dim': 2}
    """
    forms = list({id(component.form): component.form for component in components}.values())
    counts = {"layer": len({component.layer for component in components})}
    counts["kv"] = min(sizes.get("kv", 1), len({component.part for component in components}))
    for axis, held in _counts(components).items():
        if held and sizes.get(axis) not in held:
            counts[axis] = next(iter(held))
    itemsizes = [size for name in dtype.split(_MORE) if (size := ITEMSIZE.get(name))]
    dims = [extent(form.dim) for form in forms]
    whole = [nbytes // size for nbytes in dims for size in reversed(itemsizes) if nbytes % size == 0]
    if whole and sizes.get("dim", 1) not in whole:
        counts["dim"] = whole[0]
    return {axis: counts.get(axis, size) for axis, size in sizes.items()}


def _counts(components: Sequence[Component]) -> dict[str, dict[int, None]]:
    """Return the extents of components by axis, in order of the components. Opaque blocks count as sub-blocks."""
    counts: dict[str, dict[int, None]] = {"token": {}, "subblock": {}, "head": {}}
    heads: dict[tuple[int, str], int] = {}  # heads per (layer, part), which several components may hold
    known: dict[int, int] = {}  # heads of a form, by identity
    for component in components:
        form = component.form
        if id(form) not in known:
            counts["subblock" if form.opaque else "token"][extent(form.token)] = None
            known[id(form)] = extent(form.head)
        if form.headed:
            name = component.layer, component.part
            heads[name] = heads.get(name, 0) + known[id(form)]
    counts["head"] = dict.fromkeys(heads.values())
    return counts

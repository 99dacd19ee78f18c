"""Check that the notation, sizes and dtype of a layout agree with its components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import listed, quoted
from kvplan.errors import LayoutError
from kvplan.layout.components import Component, Form
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.notation import Notation
from kvplan.layout.strides import extent

_MORE = " + "  # between the notations and dtypes of merged layouts


def check_told(
    notations: Sequence[Notation],
    sizes: Mapping[str, int],
    components: Sequence[Component],
    *,
    dtype: str,
    itemsizes: Sequence[int | None],
) -> None:
    """Check a notation, sizes and a dtype against components; a size of merged layouts must fit one of the layouts.

    Args:
        notations: one notation, or the notations of merged layouts.
        sizes: extents by axis, in elements for ``dim``.
        components: all components of the layout, which may be a slice.
        dtype: name of the element type.
        itemsizes: bytes per element of each dtype; None if they are not known.

    Raises:
        LayoutError: two facts contradict each other.
    """
    axes = {axis for notation in notations for axis in notation.axes}
    # A view in smaller blocks may have several blocks, even if its tensors hold one block and have no block axis.
    if unknown := set(sizes) - axes - {"block"}:
        raise LayoutError(f"sizes name {listed(sorted(unknown))}; no notation has such an axis")
    forms = list({id(component.form): component.form for component in components}.values())
    parts = len({component.part for component in components})
    layers = len({component.layer for component in components})
    if sizes.get("layer", layers) != layers:
        raise LayoutError(f"sizes say layer={sizes['layer']}, the components are of {layers} layers")
    if sizes.get("kv", 1) not in (1, 2) or sizes.get("kv", 1) > parts:
        raise LayoutError(f"sizes say kv={sizes['kv']}, the components are of {parts} parts; it is 1 or 2")
    for form in forms:
        _check_form(form, notations)
    for axis, held in _counts(components).items():
        if held and axis in sizes and sizes[axis] not in held:
            raise LayoutError(f"sizes say {axis}={sizes[axis]}, the components have {listed(sorted(held))}")
    if "dim" in sizes:
        _check_content(sizes["dim"], forms, dtype, itemsizes)


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


def _check_form(form: Form, notations: Sequence[Notation]) -> None:
    """Check that a notation has the axes of a form."""
    for notation in notations:
        alike = ("token" in notation.axes) != form.opaque and ("head" in notation.axes) == form.headed
        if alike and (form.table is None or "block" in notation.nesting):
            return
    words = f"{'no token axis' if form.opaque else 'a token axis'}, {'a' if form.headed else 'no'} head axis"
    table = "" if form.table is None else " and blocks in separate allocations"
    raise LayoutError(
        f"a component has {words}{table}; no notation of {quoted(_MORE.join(map(str, notations)))} has these"
    )


def _check_content(dim: int, forms: Sequence[Form], dtype: str, itemsizes: Sequence[int | None]) -> None:
    held = sorted({extent(form.dim) for form in forms})
    if any(size is None and nbytes % dim == 0 for size in itemsizes for nbytes in held):
        return
    if not any(dim * size == nbytes for size in itemsizes if size is not None for nbytes in held):
        raise LayoutError(
            f"sizes say dim={dim} of dtype {quoted(dtype)}, the components have {listed(held)} bytes a (token, head)"
        )


def check_dtype(dtype: object, itemsize: object) -> tuple[str, tuple[int | None, ...]]:
    """Check the name of a dtype; return it with the bytes per element. Merged layouts have several dtypes.

    Args:
        dtype: a name, or names with `` + `` between them.
        itemsize: bytes per element in the document, or None.

    Raises:
        LayoutError: the name is not valid, or the itemsize is not the itemsize of the dtype.
    """
    if not isinstance(dtype, str) or not dtype.isprintable():
        raise LayoutError(f"dtype is {quoted(dtype)}; it is a name")
    names = dtype.split(_MORE)
    if not all(name.strip() and len(name) <= LIMITS.dtype_length for name in names):
        raise LayoutError(f"dtype is {quoted(dtype)}; it is a name of 1 to {LIMITS.dtype_length} characters")
    if itemsize is not None and (type(itemsize) is not int or itemsize != ITEMSIZE.get(dtype)):
        right = ITEMSIZE.get(dtype)
        raise LayoutError(f"itemsize is {quoted(itemsize)}; that of {quoted(dtype)} is {right or 'not known: null'}")
    return dtype, tuple(ITEMSIZE.get(name) for name in names)


def part_dtype(given: object, dtype: str, where: str) -> str:
    """Return the dtype of some components of a dump; ``""`` if merged layouts do not tell which of theirs.

    Args:
        given: dtype of the components in the document; empty if it is not known; None if it is the layout's.
        dtype: dtype of the layout.
        where: place in the document.

    Raises:
        LayoutError: the layout has no such dtype.
    """
    if given is None:
        return "" if _MORE in dtype else dtype
    if not isinstance(given, str) or given not in ("", *dtype.split(_MORE)):
        raise LayoutError(f"{where}.dtype is {quoted(given)}; the layout's dtype is {quoted(dtype)}")
    return given

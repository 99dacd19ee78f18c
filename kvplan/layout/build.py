"""Build the components of a layout from a notation and tensors: find extents, and unroll the axes layer and kv."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.files import LIMITS, Budget
from kvplan.base.values import integer, integers, listed, quoted
from kvplan.errors import LayoutError
from kvplan.layout.address_ranges import check_bounds, check_ends
from kvplan.layout.components import INT64_MAX, Built, Component, Form, once
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.notation import Notation, parse
from kvplan.layout.strides import Factors, extent, normal, offset
from kvplan.layout.tensors import TensorFacts, check_alike, gather


class Naming(NamedTuple):
    """Global numbers and names of the layers, heads and parts that tensors hold.

    Attributes:
        layers: global number of each layer, or of the first layer.
        head_start: global number of the first head.
        part: name of the content if the notation has no kv axis.
    """

    layers: int | Sequence[int] = 0
    head_start: int = 0
    part: str = "kv"

    @property
    def kv_parts(self) -> tuple[str, str]:
        """Names of the two halves of a kv axis."""
        return ("k", "v") if self.part == "kv" else (f"k_{self.part}", f"v_{self.part}")


def part_name(part: str) -> str:
    """Check and return the name of a part.

    Raises:
        LayoutError: the name is not an identifier, or is longer than 200 characters.
    """
    if not isinstance(part, str) or not part.isidentifier() or len(part) > LIMITS.name_length:
        raise LayoutError(f"part is {quoted(part)}; the name of a part is an identifier, such as 'kv' or 'k_scale'")
    return part


# ---- extents and strides ---------------------------------------------------------------------------------------------


def extents(notation: Notation, sizes: Mapping[str, Any], shape: Sequence[int] | None = None) -> dict[str, int]:
    """Return the extent of every axis and factor of a notation, in elements.

    Args:
        notation: the notation.
        sizes: extents by axis (``"token"``) or by factor (``"head.0"``).
        shape: extents of the dims, which give what the sizes leave out; without a shape, the sizes must give all axes.

    Raises:
        LayoutError: a size is missing, unknown or no positive integer, or two extents contradict each other.

    >>> from kvplan.layout.notation import parse
    >>> extents(parse("block head.0 token head.1 dim"), {"block": 4, "head": 8, "head.1": 4, "token": 16, "dim": 64})
    {'block': 4, 'head': 8, 'head.1': 4, 'token': 16, 'dim': 64, 'head.0': 2}
    >>> extents(parse("(block token) dim"), {"token": 16}, (64, 8))
    {'token': 16, 'block': 4, 'dim': 8}
    """
    names = {str(atom) for dim in notation.dims for atom in dim} | notation.axes
    text = quoted(str(notation))
    if unknown := [name for name in sizes if name not in names]:
        axes = f"which {text} does not have (it has [{listed(sorted(names))}])"
        raise LayoutError(f"sizes name {quoted(unknown[0])}, {axes}")
    right = "an extent is an integer of at least 1, in int64"
    known = {
        name: integer(f"sizes[{name!r}]", size, least=1, most=INT64_MAX, right=right) for name, size in sizes.items()
    }
    if "kv" in notation.axes and known.setdefault("kv", 2) != 2:
        raise LayoutError(f"sizes say kv={known['kv']}; its extent is 2, K and V")
    for at in range(len(shape or ())):
        known |= _of_dim(notation, at, shape or (), known)
    for axis in sorted(notation.axes):
        factors = [str(atom) for atom in notation.factors(axis)]
        missing = [name for name in (factors or [axis]) if name not in known]
        split = prod(known[name] for name in factors if name in known)
        if len(factors) > 1 and len(missing) == 1 and axis in known:
            if known[axis] % split:
                raise LayoutError(f"{axis}={known[axis]} cannot be split into factors of {quoted(split)}")
            known[missing[0]] = known[axis] // split
        elif missing and shape is None:
            whole = f"; give all factors of {axis}={known[axis]} but one" if axis in known and factors else ""
            raise LayoutError(f"{text} needs sizes[{missing[0]!r}]; sizes give [{listed(sorted(sizes))}]{whole}")
        elif factors and known.setdefault(axis, split) != split:
            where = f"the shape {quoted(tuple(shape))} says" if shape is not None else "its factors make"
            raise LayoutError(f"sizes say {axis}={quoted(known[axis])}, {where} {quoted(split)}")
    return known


def _of_dim(notation: Notation, at: int, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
    """Return the extent of the atom of a dim that no size gives; at most one such atom."""
    names, size, text = [str(atom) for atom in notation.dims[at]], shape[at], quoted(str(notation))
    unknown = [name for name in names if name not in known]
    total = prod(known[name] for name in names if name in known)
    if len(unknown) > 1:
        missing = " or ".join(map(repr, unknown))
        raise LayoutError(f"dim ({' '.join(names)}) of {text} has extent {size}: give sizes={{...}} for {missing}")
    if size % total or (not unknown and size != total):
        factors = " * ".join(f"{name}={quoted(known[name]) if name in known else '?'}" for name in names) or "1"
        where = f"it is dim {at} of the shape {quoted(tuple(shape))}"
        raise LayoutError(f"dim of extent {size} in {text} cannot be {factors}; {where}")
    return dict.fromkeys(unknown, size // total)


def shape_of(notation: Notation, known: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one tensor, in elements, from the extents of axes and factors."""
    return tuple(prod(known[str(atom)] for atom in dim) for dim in notation.dims)


def _axis_factors(notation: Notation, known: Mapping[str, int], strides: Sequence[int]) -> dict[str, Factors]:
    """Return the factors of each axis right of the colon, with strides in bytes. They are not in normal form."""
    steps: dict[str, int] = {}
    for dim, stride in zip(notation.dims, strides, strict=True):
        for atom in reversed(dim):
            steps[str(atom)] = stride
            stride *= known[str(atom)]
    axes = dict.fromkeys(atom.axis for dim in notation.dims for atom in dim)
    return {axis: tuple((known[str(a)], steps[str(a)]) for a in notation.factors(axis)) for axis in axes}


# ---- components ------------------------------------------------------------------------------------------------------


def build(
    notation: str,
    tensors: Any,
    sizes: Mapping[str, int] | None,
    layers: Sequence[int] | None,
    layer_start: int,
    head_start: int,
    part: str,
    seams: Sequence[int],
) -> Built:
    """Return the layout of tensors as plain data; see :meth:`kvplan.KVLayout.from_tensors`."""
    parsed = parse(notation)
    if layers is not None and not isinstance(layers, Iterable):
        raise LayoutError(f"layers is {quoted(layers)}; give the global number of every layer, or layer_start")
    if sizes is not None and not isinstance(sizes, Mapping):
        raise LayoutError(f"sizes is {quoted(sizes)}; give extents by axis, as {{'token': 16}}")
    right = "layers and heads are numbered from 0, by integers"
    first_layer, first_head = (
        integer(name, number, least=0, most=LIMITS.number, right=right)
        for name, number in (("layer_start", layer_start), ("head_start", head_start))
    )
    naming = Naming(first_layer if layers is None else layers, first_head, part_name(part))
    return assemble(parsed, *gather(parsed, tensors), dict(sizes or {}), naming, seams)


def assemble(
    notation: Notation,
    tensors: Sequence[TensorFacts],
    nested: Mapping[str, int],
    sizes: Mapping[str, int],
    naming: Naming,
    seams: Sequence[int],
    budget: Budget | None = None,
) -> Built:
    """Return the layout of tensors whose facts are known. ``budget`` limits the work for the whole document."""
    budget = budget or Budget()
    check_alike(notation, tensors)
    if nested.get("kv", 2) != 2:
        raise LayoutError(f"{nested['kv']} tensors along 'kv' in {quoted(str(notation))}; there are two, K and V")
    for axis, count in nested.items():
        if integer(f"sizes[{axis!r}]", sizes.get(axis, count)) != count:
            raise LayoutError(f"sizes say {axis}={quoted(sizes[axis])}, the sequence has {count} tensors along it")
    first = tensors[0]
    known = extents(notation, {k: v for k, v in sizes.items() if k not in nested}, first.shape)
    factors = _axis_factors(notation, known, first.strides)
    counts = {axis: extent(factors[axis]) for axis in factors} | dict(nested)
    last = naming.head_start + counts.get("head", 1) - 1
    if last > LIMITS.number:
        raise LayoutError(f"heads are {naming.head_start} to {quoted(last)}; the largest number is {LIMITS.number}")
    budget.use("a layer and part", counts.get("layer", 1) * counts.get("kv", 1))
    regions = once([tensor.region for tensor in tensors], seams)
    alike = Form(
        block=normal(factors.get("block", ())),
        token=normal(factors.get("token", factors.get("subblock", ()))),
        head=normal(factors.get("head", ())),
        dim=normal((*factors.get("dim", ()), (first.itemsize, 1))),
        head_start=naming.head_start,
        headed="head" in counts,
        opaque="token" not in counts,
    )
    check_ends(regions)
    # Addresses by position along the nesting; axes that are not nested have one position.
    axes = ("layer", "kv", "head", "block")
    order = [notation.nesting.index(axis) for axis in axes if axis in nested]
    starts = np.array([tensor.address for tensor in tensors], dtype=np.int64).reshape([*nested.values()] or [1])
    starts = (starts.transpose(order) if nested else starts).reshape([nested.get(axis, 1) for axis in axes])
    forms: dict[Form, Form] = {}  # one object for each form, so that later code compares identities
    placed: dict[tuple[int, int], list[tuple[int, Form]]] = {}
    components: list[Component] = []
    parts = naming.kv_parts if "kv" in counts else (naming.part,)
    layers = _layers(naming.layers, counts.get("layer", 1))
    for (layer, number), (kv, part) in product(enumerate(layers), enumerate(parts)):
        position = layer if "layer" in nested else 0, kv if "kv" in nested else 0
        if position not in placed:
            spread = _spread(alike, starts[position], alone=len(regions) > 1)
            placed[position] = [(start, forms.setdefault(form, form)) for start, form in spread]
        inside = offset(factors.get("layer", ()), layer) + offset(factors.get("kv", ()), kv)
        components += [Component(number, part, start + inside, form, first.dtype) for start, form in placed[position]]
    check_bounds(components, regions)
    check_disjoint(components, budget)
    tokens = counts.get("token", counts.get("subblock", 1))
    return Built(tuple(components), regions, counts.get("block", 1), tokens, first.dtype, str(notation))


def _layers(layers: int | Sequence[int], count: int) -> tuple[int, ...]:
    if isinstance(layers, int):
        return tuple(range(layers, layers + count))
    numbers = integers("layers", layers, least=0, most=INT64_MAX, right="layers are numbered from 0, by integers")
    if len(numbers) != count or len(set(numbers)) != count:
        raise LayoutError(f"layers are {quoted(numbers)}; the tensors hold {count}, each with its own global number")
    return numbers


def _spread(form: Form, starts: np.ndarray[Any, Any], *, alone: bool) -> list[tuple[int, Form]]:
    """Return the address and form of each component of one (layer, kv), from the addresses by head and block.

    Blocks, or heads, that are views at equal steps of one allocation are one axis. Otherwise blocks are a table, and
    each head is a component.
    """

    def stepped(addresses: Sequence[int]) -> Factors | None:
        steps = {b - a for a, b in pairwise(addresses)}
        return None if alone or len(steps) != 1 or min(steps) <= 0 else ((len(addresses), steps.pop()),)

    spread = []
    for head, row in enumerate(starts.tolist()):
        own = form if len(starts) == 1 else replace(form, head_start=form.head_start + head)
        if len(row) > 1:
            block = stepped(row)
            table = tuple(at - row[0] for at in row) if block is None else None
            own = replace(own, block=block or (), table=table)
        spread.append((row[0], own))
    heads = stepped([start for start, _ in spread])
    if heads is None or len({(own.block, own.table) for _, own in spread}) > 1:
        return spread
    return [(spread[0][0], replace(spread[0][1], head=heads))]

"""Build the components of a layout from a notation and tensors: find extents, and unroll the axes layer and kv."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.files import LIMITS, Budget
from kvplan.base.values import integer, integers, quoted
from kvplan.errors import LayoutError
from kvplan.layout.address_ranges import check_bounds
from kvplan.layout.components import (
    INT64_MAX,
    Built,
    Component,
    Form,
    Region,
    once,
)
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.extents import axis_factors, extents
from kvplan.layout.notation import Notation, parse
from kvplan.layout.strides import Factors, normal, offset
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
    if not isinstance(seams, Iterable):
        raise LayoutError(f"seams is {quoted(seams)}; give a sequence of addresses")
    naming = Naming(
        _first("layer_start", layer_start) if layers is None else layers,
        _first("head_start", head_start),
        part_name(part),
    )
    gathered, nested = gather(parsed, tensors)
    return assemble(parsed, gathered, nested, dict(sizes or {}), naming, seams)


def _first(name: str, number: int) -> int:
    return integer(name, number, least=0, most=LIMITS.number, right="layers and heads are numbered from 0, by integers")


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
    factors = axis_factors(notation, known, first.strides)
    counts = {axis: prod(count for count, _ in axis_factor) for axis, axis_factor in factors.items()} | dict(nested)
    last = naming.head_start + counts.get("head", 1) - 1
    if last > LIMITS.number:
        raise LayoutError(
            f"heads are {naming.head_start} to {quoted(last)}; the largest number of a head is {LIMITS.number}"
        )
    regions = once([tensor.region for tensor in tensors], seams)
    budget.use("a layer and part", counts.get("layer", 1) * (2 if "kv" in counts else 1))
    num_blocks, layers = counts.get("block", 1), _layers(naming.layers, counts.get("layer", 1))
    strided = normal(factors.get("block", ()))
    alike = Form(
        block=(),
        token=normal(factors.get("token", factors.get("subblock", ()))),
        head=normal(factors.get("head", ())),
        dim=normal((*factors.get("dim", ()), (first.itemsize, 1))),
        head_start=naming.head_start,
        headed="head" in counts,
        opaque="token" not in counts,
    )
    shared: dict[_Spread, Form] = {}  # one object for each form, so that later code compares identities
    placed: dict[tuple[int, ...], list[tuple[int, Form]]] = {}  # by position along the nesting: (address, form)
    components: list[Component] = []
    for layer, number in enumerate(layers):
        for kv, part in enumerate(naming.kv_parts if "kv" in counts else (naming.part,)):
            inside = offset(factors.get("layer", ()), layer) if "layer" in factors else 0
            inside += offset(factors["kv"], kv) if "kv" in factors else 0
            where = {"layer": layer, "kv": kv}
            position = tuple(where[axis] for axis in notation.nesting if axis in where)
            if position not in placed:
                rows = [[tensors[k].address for k in _indices(notation, nested, where | {"head": head})]
                        for head in range(nested.get("head", 1))]  # fmt: skip
                placed[position] = []
                for start, key in _head_axis(strided, rows, regions):
                    if key not in shared:
                        (block, table), heads, head = key
                        shared[key] = replace(alike, block=block, table=table, head=alike.head or heads,
                                              head_start=alike.head_start + head)  # fmt: skip
                    placed[position].append((start, shared[key]))
            components += [
                Component(number, part, start + inside, form, first.dtype) for start, form in placed[position]
            ]
    check_bounds(components, regions)
    check_disjoint(components, budget)
    tokens = counts.get("token", counts.get("subblock", 1))
    return Built(tuple(components), regions, num_blocks, tokens, first.dtype, str(notation))


_BlockAxis = tuple[Factors, tuple[int, ...] | None]  # factors, or a table
_Spread = tuple[_BlockAxis, Factors, int]  # blocks; heads left of the colon that are one axis; number of the first head


def _layers(layers: int | Sequence[int], count: int) -> tuple[int, ...]:
    if isinstance(layers, int):
        if not 0 <= layers <= INT64_MAX:
            raise LayoutError(f"layer_start is {quoted(layers)}; layers are numbered from 0")
        return tuple(range(layers, layers + count))
    numbers = integers("layers", layers, least=0, most=INT64_MAX, right="layers are numbered from 0, by integers")
    if len(numbers) != count or len(set(numbers)) != count:
        raise LayoutError(f"layers are {quoted(numbers)}; the tensors hold {count}, each with its own global number")
    return numbers


def _indices(notation: Notation, nested: Mapping[str, int], where: Mapping[str, int]) -> Iterator[int]:
    """Yield the flat positions of the tensors of one (layer, kv, head): one tensor, or one per block in order."""
    choices = [range(nested[axis]) if axis == "block" else (where[axis],) for axis in notation.nesting]
    for position in product(*choices):
        flat = 0
        for axis, index in zip(notation.nesting, position, strict=True):
            flat = flat * nested[axis] + index
        yield flat


def _block_axis(factors: Factors, held: Sequence[int], regions: Sequence[Region]) -> _BlockAxis:
    """Return the factors of the block axis; or the table of its blocks, if each is a separate allocation."""
    if len(held) == 1:
        return factors, None
    table = np.asarray(held, dtype=np.int64) - held[0]
    steps = np.diff(table)
    # Blocks at equal steps inside one allocation are views of one tensor: their axis has a stride.
    if len(regions) == 1 and steps[0] > 0 and bool(np.all(steps == steps[0])):
        return ((len(held), int(steps[0])),), None
    return (), tuple(table.tolist())


def _head_axis(strided: Factors, rows: Sequence[Sequence[int]], regions: Sequence[Region]) -> list[tuple[int, _Spread]]:
    """Join the heads of one (layer, kv) if they are one axis; return the address and the axes of each group of heads.

    Heads that are views at equal steps of one allocation are one axis, and one group. Otherwise each head is a group of
    its own. ``rows`` holds, for each head, the addresses of its blocks.
    """
    if len(rows) == 1:
        return [(rows[0][0], (_block_axis(strided, rows[0], regions), (), 0))]
    blocks = [_block_axis(strided, row, regions) for row in rows]
    firsts = [row[0] for row in rows]
    steps = {b - a for a, b in pairwise(firsts)}
    if len(regions) == 1 and len(steps) == 1 and min(steps) > 0 and len(set(blocks)) == 1:
        return [(firsts[0], (blocks[0], tuple((len(rows), step) for step in steps), 0))]
    return [(first, (axis, (), head)) for head, (first, axis) in enumerate(zip(firsts, blocks, strict=True))]

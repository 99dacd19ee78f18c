"""Extents and strides of the axes of a notation: from sizes alone, or from the shape of a tensor and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from kvplan.base.values import integer, listed, quoted
from kvplan.errors import LayoutError
from kvplan.layout.components import INT64_MAX
from kvplan.layout.notation import Dim, Notation
from kvplan.layout.strides import Factors


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
    known: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in names:
            raise LayoutError(
                f"sizes name {quoted(name)}, which {quoted(str(notation))} does not have (it has "
                f"[{listed(sorted(names))}])"
            )
        right = "an extent is an integer of at least 1, in int64"
        known[name] = integer(f"sizes[{name!r}]", size, least=1, most=INT64_MAX, right=right)
    if "kv" in notation.axes and known.setdefault("kv", 2) != 2:
        raise LayoutError(f"sizes say kv={known['kv']}; its extent is 2, K and V")
    for at, dim in enumerate(notation.dims if shape is not None else ()):
        known |= _unknown(notation, dim, at, shape or (), known)
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
            raise LayoutError(
                f"{quoted(str(notation))} needs sizes[{missing[0]!r}]; sizes give [{listed(sorted(sizes))}]{whole}"
            )
        elif factors and known.setdefault(axis, split) != split:
            where = f"the shape {quoted(tuple(shape))} says" if shape is not None else "its factors make"
            raise LayoutError(f"sizes say {axis}={quoted(known[axis])}, {where} {quoted(split)}")
    return known


def _unknown(notation: Notation, dim: Dim, at: int, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
    """Return the extent of the atom of a dim that no size gives; at most one such atom."""
    names, size = [str(atom) for atom in dim], shape[at]
    unknown = [name for name in names if name not in known]
    total = prod(known[name] for name in names if name in known)
    if len(unknown) > 1:
        raise LayoutError(
            f"dim ({' '.join(names)}) of {quoted(str(notation))} has extent {size}: give sizes={{...}} for "
            f"{' or '.join(map(repr, unknown))}"
        )
    if size % total or (not unknown and size != total):
        factors = " * ".join(f"{name}={quoted(known.get(name, 0)) if name in known else '?'}" for name in names) or "1"
        raise LayoutError(
            f"dim of extent {size} in {quoted(str(notation))} cannot be {factors}; it is dim {at} of the shape "
            f"{quoted(tuple(shape))}"
        )
    return dict.fromkeys(unknown, size // total)


def shape_of(notation: Notation, known: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of one tensor, in elements, from the extents of axes and factors."""
    return tuple(prod(known[str(atom)] for atom in dim) for dim in notation.dims)


def axis_factors(notation: Notation, known: Mapping[str, int], strides: Sequence[int]) -> dict[str, Factors]:
    """Return the factors of each axis right of the colon, with strides in bytes. They are not in normal form.

    >>> from kvplan.layout.notation import parse
    >>> axis_factors(parse("(block token) dim"), {"block": 4, "token": 16, "dim": 8}, (16, 2))
    {'block': ((4, 256),), 'token': ((16, 16),), 'dim': ((8, 2),)}
    """
    steps: dict[str, int] = {}
    for dim, stride in zip(notation.dims, strides, strict=True):
        step = stride
        for atom in reversed(dim):
            steps[str(atom)] = step
            step *= known[str(atom)]
    axes = dict.fromkeys(atom.axis for dim in notation.dims for atom in dim)
    names = {axis: [str(atom) for atom in notation.factors(axis)] for axis in axes}
    return {axis: tuple((known[name], steps[name]) for name in names[axis]) for axis in axes}

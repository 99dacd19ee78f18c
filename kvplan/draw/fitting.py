"""Widths of the cells of a row, labels that fit below them, and marks of parts; SVG and text use the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2
from typing import NamedTuple

from kvplan.draw.block import Band, Cell, Fold
from kvplan.draw.words import Label, labels


class Fitted(NamedTuple):
    """The widths of a row's cells, and the labels that fit below the cells.

    Attributes:
        labels: label of each cell, in the longest form in which all labels fit.
        widths: width of each cell, in pixels or columns.
        exact: whether widths are in proportion to bytes; otherwise each is the width of its label and some more.
    """

    labels: list[Label]
    widths: list[float]
    exact: bool


def fitted(band: Band, room: float, width_of: Callable[[Label], float]) -> Fitted:
    """Divide a row among its cells: in proportion to bytes if all labels then fit, otherwise by the labels' widths.

    Args:
        band: the band that the row draws.
        room: width of the row, in pixels or columns.
        width_of: a function that returns the width of a label, with the space around it.

    >>> tokens = tuple(Band(f"token {k}", ("k",), 64, 64, 1) for k in range(2))
    >>> fitted(Band("k", ("k",), 128, 128, 1, "token", 2, 64, tokens), 60, lambda label: max(map(len, label)) + 2)
    Fitted(labels=[('token 0', '64 bytes'), ('token 1', '64 bytes')], widths=[30.0, 30.0], exact=True)
    """
    cells = band.cells
    told = [labels(cell) for cell in cells]
    for variants in zip(*told, strict=True):
        needs = [width_of(label) for label in variants]
        if sum(needs) <= room:
            break
    else:
        needs = [room // len(cells)] * len(cells)
    sizes = [0 if isinstance(cell, Fold) else cell.nbytes for cell in cells]
    widths = [room * nbytes / sum(sizes) for nbytes in sizes]
    exact = band.axis != "allocation" and all(width >= need for width, need in zip(widths, needs, strict=True))
    if not exact:
        spare = divided(cells, room - sum(needs))
        widths = [need + more for need, more in zip(needs, spare, strict=True)]
    return Fitted(list(variants), widths, exact)


def divided(cells: Sequence[Cell], room: float) -> list[float]:
    """Divide a width among cells by the logarithm of their bytes."""
    weights = [log2(2 + (cell.like if isinstance(cell, Fold) else cell).nbytes) for cell in cells]
    return [room * weight / sum(weights) for weight in weights]


def told_apart(parts: Sequence[str], named: Mapping[str, str], others: Sequence[str]) -> dict[str, str]:
    """Return a colour or a character for each part. A part in ``named`` always has the same mark."""
    rest = [part for part in parts if part not in named]
    return {part: named.get(part) or others[rest.index(part) % len(others)] for part in parts}

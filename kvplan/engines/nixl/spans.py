"""Ranges of memory that an agent has registered, or that a peer has offered, and the rows that lie in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.layout.kvlayout import KVLayout


class Span(NamedTuple):
    """A range of memory, and its place in this process.

    Attributes:
        kind: ``"DRAM"`` or ``"VRAM"``, as the process that registered it says.
        address: address of its first byte in the process that registered it.
        nbytes: number of bytes.
        here: address of its first byte in this process.
        layout: layout of this process that holds it.
    """

    kind: str
    address: int
    nbytes: int
    here: int
    layout: KVLayout


class Placed(NamedTuple):
    """Rows that can be moved by kvplan.

    Attributes:
        rows: the rows at their addresses in this process.
        layout: the layout that holds all of them.
    """

    rows: Rows
    layout: KVLayout


class Spans:
    """Ranges of one process, to look rows up in; they do not overlap.

    Args:
        spans: the ranges, in any order.

    >>> from kvplan.plan.row_plans import Memory, layout_of
    >>> layout = layout_of([Memory(4096, 64, "cpu")])
    >>> spans = Spans([Span("DRAM", 1 << 20, 64, 4096, layout)])
    >>> spans.place(Rows.of(np.array([[(1 << 20) + 16, 8, 0, 8, 2]]), "DRAM")).rows.address.tolist()
    [4112]
    >>> spans.place(Rows.of(np.array([[(1 << 20) + 60, 8, 0]]), "DRAM")) is None
    True
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._kept = sorted(spans, key=lambda span: span.address)
        self._starts = np.array([span.address for span in self._kept], dtype=np.int64)
        self._ends = np.array([span.address + span.nbytes for span in self._kept], dtype=np.int64)
        self._by = np.array([span.here - span.address for span in self._kept], dtype=np.int64)

    @property
    def layouts(self) -> list[KVLayout]:
        """The layouts that hold the ranges."""
        return list({id(span.layout): span.layout for span in self._kept}.values())

    def first(self, kind: str) -> Span | None:
        """Return the first range of a kind; None if there is none."""
        return next((span for span in self._kept if span.kind == kind), None)

    def place(self, rows: Rows) -> Placed | None:
        """Return rows at their addresses in this process; None if some lie outside, or they lie in several layouts."""
        if not self._kept:
            return None
        found = np.searchsorted(self._starts, rows.address, side="right") - 1
        if int(found.min()) < 0 or bool((rows.ends > self._ends[found]).any()):
            return None
        spans = [self._kept[k] for k in np.unique(found).tolist()]
        layout = spans[0].layout
        if any(span.kind != rows.kind or span.layout is not layout for span in spans):
            return None
        return Placed(rows.moved(self._by[found]), layout)


class Registered:
    """The memory that an agent has registered: (kind, address, bytes, device), counted.

    Attributes:
        version: a number that changes with the memory.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, int, int]] = Counter()
        self.version = 0

    def add(self, rows: Rows) -> None:
        """Remember the memory of a registration."""
        self._counts.update(_ranges(rows))
        self.version += 1

    def remove(self, rows: Rows) -> None:
        """Forget the memory of a registration."""
        self._counts -= Counter(_ranges(rows))
        self.version += 1

    def union(self) -> dict[tuple[str, int], list[tuple[int, int]]]:
        """Return disjoint ranges (address, bytes), ascending, by kind and number of the device.

        >>> held = Registered()
        >>> held.add(Rows.of(np.array([[100, 50, 0], [120, 100, 0], [300, 8, 0]]), "DRAM"))
        >>> held.union()
        {('DRAM', 0): [(100, 120), (300, 8)]}
        """
        found: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for kind, address, nbytes, device in sorted(self._counts, key=lambda one: (one[0], one[3], one[1])):
            ranges = found.setdefault((kind, device), [])
            if ranges and address < sum(ranges[-1]):
                start = ranges[-1][0]
                ranges[-1] = start, max(sum(ranges[-1]), address + nbytes) - start
            else:
                ranges.append((address, nbytes))
        return found


def _ranges(rows: Rows) -> Sequence[tuple[str, int, int, int]]:
    return [
        (rows.kind, address, nbytes, device if rows.kind == "VRAM" else 0)
        for address, nbytes, device in zip(rows.address.tolist(), rows.size.tolist(), rows.device.tolist(), strict=True)
    ]

"""Pools that SGLang's staging steps have compiled, and the members of tensors that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.engines.sglang.ring_plans import Planes, planes_of_rows
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.row_plans import Memory, layout_of


class PoolPlanes(NamedTuple):
    """Some heads of a pool, compiled.

    Attributes:
        layout: holds all tensors.
        planes: the planes that are alike.
        page_nbytes: bytes of a page in the ring, in all planes.
    """

    layout: KVLayout
    planes: list[Planes]
    page_nbytes: int

    @property
    def pages(self) -> int:
        """Pages that all planes have."""
        return min(planes.pages for planes in self.planes)


class RowPlanes:
    """Planes that are given by addresses, and a layout of the rows that were seen so far."""

    def __init__(
        self, addresses: tuple[int, ...], widths: tuple[int, ...], strides: tuple[int, ...], device: str
    ) -> None:
        self._ranges = tuple(zip(addresses, widths, strides, strict=True))
        self._device = device
        self._planes = planes_of_rows(addresses, widths, strides)
        self._nbytes = sum(widths)
        self._seen: tuple[int, KVLayout] | None = None

    def reaching(self, row: int) -> PoolPlanes:
        """Return the planes with a layout that holds rows up to this one; addresses do not tell how many there are."""
        seen = self._seen
        if seen is None or row > seen[0]:
            ends = sorted((address, address + row * stride + width) for address, width, stride in self._ranges)
            held = [Memory(first, end - first, self._device) for first, end in joined(ends)]
            self._seen = seen = row, layout_of(held)
        return PoolPlanes(seen[1], self._planes, self._nbytes)


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that overlap, as those of planes in one allocation do.

    Args:
        ranges: (first, end) of each, in order of the first.

    >>> joined([(0, 10), (2, 12), (12, 20)])
    [(0, 12), (12, 20)]
    """
    made = list(ranges[:1])
    for first, end in ranges[1:]:
        if first < made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((first, end))
    return made


def heads_of(tensors: Sequence[Any]) -> int:
    """Return the heads of a pool; they are the second dim of every layout of SGLang."""
    return int(tensors[0].shape[1]) if tensors and len(tensors[0].shape) > 1 else 0


def device_of(tensor: Any) -> str:
    """Return the name of a tensor's device, such as ``"cuda:0"``."""
    device = tensor.device
    return str(device) if device.index is not None or device.type == "cpu" else f"{device.type}:0"

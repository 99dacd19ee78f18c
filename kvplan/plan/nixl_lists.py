"""Write plans as descriptor lists for NIXL, the transport between machines that engines use.

Checked against the Python API of NIXL 1.5.1. ``prep_xfer_dlist`` takes an (n, 3) array of (address, length, device id),
or an (n, 5) array that also has stride and count. All memory of a list is of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvplan.errors import KVPlanError, PathError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import StridedRows
from kvplan.plan.loops_numpy import Descriptors

SIDES = ("src", "dst")


class NixlList(NamedTuple):
    """The list of one side of a plan, for NIXL's ``prep_xfer_dlist(agent, *made)``.

    Attributes:
        rows: int64, C-contiguous: (n, 3) of address, length and device id; or (n, 5) with stride and count.
        memory: NIXL's name for the kind of memory: ``"DRAM"`` or ``"VRAM"``.
    """

    rows: Int64Array
    memory: str

    @property
    def descriptors(self) -> int:
        """Return the number of descriptors (and so of indices) that NIXL makes of the list: each row ``count`` times.

        >>> NixlList(np.array([[0, 8, 0, 16, 4], [100, 8, 0, 8, 1]]), "DRAM").descriptors
        5
        """
        return int(self.rows[:, 4].sum()) if self.rows.shape[1] == 5 else len(self.rows)


def nixl_lists(
    made: Descriptors | StridedRows, layouts: Sequence[tuple[KVLayout, KVLayout]]
) -> tuple[NixlList, NixlList]:
    """Return the lists of both sides of a plan's copies, in the same order; see :meth:`kvplan.Plan.nixl`.

    Args:
        made: flat descriptors, or strided rows.
        layouts: (source, destination) of every joined plan, from which the device of each address is found.
    """
    order = _by_destination(made.dst)
    sides: list[tuple[Int64Array, ...]]
    if isinstance(made, StridedRows):
        rows = np.asarray(made)[order]
        sides = [(rows[:, k], rows[:, 2], rows[:, 4 + k], rows[:, 3]) for k in (0, 1)]
    else:
        size = made.size[order]
        sides = [(column[order], size) for column in (made.src, made.dst)]
    lists = []
    for k, (address, size, *rest) in enumerate(sides):
        memory, device = _device_ids([pair[k] for pair in layouts], address, SIDES[k])
        table = np.empty((len(address), 3 + len(rest)), dtype=np.int64)
        for column, values in enumerate((address, size, device, *rest)):
            table[:, column] = values
        lists.append(NixlList(table, memory))
    return lists[0], lists[1]


def _by_destination(dst: Int64Array) -> Int64Array | slice:
    """Return the order of rows by destination. All destinations differ, so both sides get the same order."""
    return slice(None) if bool((dst[1:] > dst[:-1]).all()) else np.argsort(dst)


def _device_ids(layouts: list[KVLayout], address: Int64Array, side: str) -> tuple[str, Int64Array | int]:
    """Return the kind of memory of one side, and the number of the GPU of each address."""
    if len(layouts) == 1:  # as in most plans
        return memory_of(layouts[0].device, side)
    numbers = {layout.device: memory_of(layout.device, side) for layout in layouts}
    kinds = {memory for memory, _ in numbers.values()}
    if len(kinds) > 1:
        raise PathError(f"{side} is on {' and '.join(sorted(numbers))}; a NIXL list holds one kind of memory")
    memory = kinds.pop()
    if len(numbers) == 1:
        return memory, next(iter(numbers.values()))[1]
    regions = sorted({(region.address, numbers[region.device][1]) for one in layouts for region in one.regions})
    starts, owners = (np.array(column, dtype=np.int64) for column in zip(*regions, strict=True))
    return memory, owners[np.searchsorted(starts, address, side="right") - 1]


def memory_of(device: str, what: str) -> tuple[str, int]:
    """Return NIXL's name for the memory of a device, and the device's number.

    Raises:
        PathError: the device is neither CPU nor CUDA.

    >>> memory_of("cuda:3", "src")
    ('VRAM', 3)
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise PathError(f"{what} is on {device!r}; NIXL lists are made for memory of the CPU and of CUDA devices")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


def check_side(side: object) -> int:
    """Return 0 for ``"src"``, 1 for ``"dst"``.

    Raises:
        KVPlanError: the side is neither.

    >>> check_side("dst")
    1
    """
    if side not in SIDES:
        raise KVPlanError(f"side is {side!r}; give 'src' or 'dst'")
    return SIDES.index(side)

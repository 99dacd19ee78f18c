"""A plan in two halves at once: large runs by the copy engine, small ones by the kernel.

Neither is good at the other's: the engine pays for every small copy, and SMs reach less of the link than the engine.
Hybrid caches have both: pages of attention, and states of a megabyte.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvplan.cost.model import MIXED
from kvplan.cost.policy import Policy
from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Lane

LARGE_RUN = 64 << 10  # bytes: from here on the copy engine takes a run

Halves = tuple[Plan | None, Plan | None]
# Halves of a group live as long as it, so that their run tables are uploaded once.
_known: weakref.WeakKeyDictionary[RunGroup, tuple[RunGroup | None, RunGroup | None]] = weakref.WeakKeyDictionary()


def halves_of(plan: Plan) -> Halves:
    """The same byte moves as two plans: runs of :data:`LARGE_RUN` bytes or more, and shorter ones; None for no such.

    >>> import kvplan, numpy as np
    >>> pages, states = np.zeros((4, 8, 16, 64), np.int8), np.zeros((8, 1, 1 << 17), np.int8)
    >>> kv, held = (kvplan.KVLayout.from_tensors(text, tensor) for text, tensor in
    ...             (("layer block token dim", pages), ("block token dim", states)))
    >>> plan = kvplan.join([kvplan.compile(one, one).plan([0], [5]) for one in (kv, held)])
    >>> halves_of(plan)
    (Plan(host of 2 units, 131072 bytes), Plan(host of 2 units, 4096 bytes))
    """
    large: list[tuple[Part, tuple[int, int]]] = []
    small: list[tuple[Part, tuple[int, int]]] = []
    for part, skip in zip(plan.parts, plan.skips, strict=True):
        if part.units.shape[1]:
            for side, group in zip((large, small), _halves_of(part.group), strict=True):
                if group is not None:
                    side.append((Part(group, part.units), skip))
    return _plan_of(plan, large), _plan_of(plan, small)


def _halves_of(group: RunGroup) -> tuple[RunGroup | None, RunGroup | None]:
    known = _known.get(group)
    if known is None:
        large = tuple(run for run in group.runs if run.nbytes >= LARGE_RUN)
        small = tuple(run for run in group.runs if run.nbytes < LARGE_RUN)
        made = [replace(group, runs=runs) if runs else None for runs in (large, small)]
        known = _known.setdefault(group, (made[0], made[1]))  # of two threads, both get one pair: its table is one
    return known


def _plan_of(plan: Plan, held: list[tuple[Part, tuple[int, int]]]) -> Plan | None:
    if not held:
        return None
    parts = tuple(part for part, _ in held)
    nbytes = sum(part.nbytes for part in parts)
    skips = tuple(skip for _, skip in held)
    return Plan(parts, plan.units, nbytes, plan.direction, plan.layouts, plan.seams, skips, plan.programs)


class MixedPath:
    """Copy engine and kernel side by side, each with its runs."""

    name = MIXED
    capturable = False
    in_order = False  # of two in a row, the second's engine would not wait for the first's kernel

    def __init__(self, runtime: Runtime, policy: Policy) -> None:
        del policy
        self._runtime = runtime

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        del direction
        return lane.copy, lane.kernel

    def make_ready(self, plan: Plan) -> None:
        """Compile what the kernel's half takes."""
        small = halves_of(plan)[1]
        if small is not None:
            self._runtime.kernel.make_ready(small)

    def slow(self, plan: Plan, groups: int = 1) -> bool:
        """Whether issuing it takes the CPU long, cut into so many groups of layers."""
        del groups
        paths, (large, small) = self._runtime.paths, halves_of(plan)
        return bool((large and paths["copy_engine"].slow(large)) or (small and paths["kernel"].slow(small)))

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Lane) -> Callable[[], None]:
        """Prepare both halves; what is returned issues them, each on its own stream, and joins them."""
        paths, (large, small) = self._runtime.paths, halves_of(plan)
        transfer._steps += [half for half in (large, small) if half is not None]  # they hold the run tables
        by_engine = paths["copy_engine"].prepare(transfer, large, lane) if large else None
        by_kernel = paths["kernel"].prepare(transfer, small, lane) if small else None
        return partial(self._issue, by_engine, by_kernel, lane, transfer.event(), transfer.event())

    def _issue(
        self, by_engine: Callable[[], None] | None, by_kernel: Callable[[], None] | None, lane: Lane, begun: int,
        copied: int,
    ) -> None:  # fmt: skip
        device = self._runtime.device
        device.record(begun, lane.copy)
        device.wait(lane.kernel, begun)
        if by_kernel is not None:  # first: one launch, and then the long call of the engine's batch
            by_kernel()
        if by_engine is not None:
            by_engine()
            device.record(copied, lane.copy)
            device.wait(lane.kernel, copied)

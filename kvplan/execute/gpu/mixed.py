"""A plan in two halves at once: large runs by the copy engine, small ones by the kernel.

Neither is good at the other's: the engine pays for every small copy, and SMs reach less of the link than the engine.
Hybrid caches have both: pages of attention, and states of a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvplan.cost.model import MIXED
from kvplan.cost.policy import Policy
from kvplan.plan.halves import halves_of
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Lane


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

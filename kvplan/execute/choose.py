"""Which path serves a plan, which cannot and why, and which one ``auto`` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplan.errors import HostMemoryError, LayoutError, PathError
from kvplan.execute.kernel_path import copies_of
from kvplan.execute.policy import PATHS
from kvplan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.reach import Facts
    from kvplan.execute.runtime import Runtime

# The rule of `auto`, until it is made by calibration. In bytes; measured on an H100 (docs/gpu.md).
LARGE_RUN = 64 << 10  # from here on the copy engine alone is as fast as anything, and takes no SM
LARGE_EXTENT = 64 << 10  # from here on the host's side of a staged transfer goes at the speed of the link
STAGED_NBYTES = 4 << 20  # below this the kernel's lower latency counts for more


class Candidates:
    """Judges paths for one device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._vetted: set[int] = set()

    def choose(self, plan: Plan, *, capturing: bool) -> str:
        """The path for a plan; nothing has moved when it refuses.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are virtual.
            HostMemoryError: the path is for pinned memory, and this is not.
            PathError: the path, or every path, cannot serve the plan.
        """
        name = self._runtime.policy.path
        self._check_layouts(plan)
        if name == "auto":
            name = "kernel" if capturing else self._auto(plan)
        elif capturing and not self._runtime.paths[name].capturable:
            raise PathError(f"path {name!r} cannot be captured into a CUDA graph; path 'kernel' can")
        self.check(plan, name)
        return name

    def check(self, plan: Plan, name: str) -> None:
        """A path can serve a plan.

        Raises:
            HostMemoryError, PathError: it cannot.
        """
        why_not = self._why_not(plan, name)
        if why_not is not None:
            raise why_not
        if name == "staged":
            self._runtime.paths["staged"].check(plan)  # type: ignore[union-attr]

    def pageable(self, plan: Plan) -> bool:
        """Whether the driver would hold the CPU up, because it copies through its own pinned buffers."""
        return any(facts.pageable for facts in self._facts(plan))

    def _facts(self, plan: Plan) -> list[Facts]:
        reach = self._runtime.reach
        return [reach.facts(layout) for pair in plan.layouts for layout in pair]

    def _check_layouts(self, plan: Plan) -> None:
        reach = self._runtime.reach
        for src, dst in plan.layouts:
            for layout, facts in ((src, reach.facts(src)), (dst, reach.facts(dst))):
                if facts.virtual:
                    raise LayoutError(f"the addresses of {layout!r} are virtual (from a spec); nothing can be moved")
            if not reach.facts(dst).writable:
                raise LayoutError(f"the destination {dst!r} holds a read-only array; pass a writable one")

    def _why_not(self, plan: Plan, name: str) -> PathError | HostMemoryError | None:
        mine = f"cuda:{self._runtime.device.ordinal}"
        facts = self._facts(plan)
        if plan.direction == "host":
            return self._nobody("copies between CPU memories only by the executor of device 'cpu'")
        devices = sorted({fact.device for fact in facts} - {"cpu"})
        names = {device if ":" in device else f"{device}:0" for device in devices}
        if mine not in names:
            return self._nobody(f"moves memory of {mine}, and this plan is of {', '.join(sorted(names))}")
        if name in ("kernel", "staged"):
            if names != {mine}:
                return PathError(
                    f"path {name!r} reaches {mine} and pinned memory; the plan is of {', '.join(sorted(names))}"
                )
            if name == "staged" and plan.direction == "device":
                return PathError("path 'staged' is for loads and stores; within a GPU there is nothing to stage")
            pageable = next((fact.pageable for fact in facts if fact.pageable), "")
            if pageable:
                return HostMemoryError(
                    f"path {name!r} reaches pinned memory only: {pageable}; pin it (kvplan.allocate, "
                    "torch's pin_memory, cudaHostRegister) or take path 'copy_engine'"
                )
        return None

    def _nobody(self, why: str) -> PathError:
        reasons = "; ".join(f"{path}: {why}" for path in PATHS if path != "host")
        return PathError(f"no path of {self._runtime.device.ordinal} serves this plan: {reasons}")

    def _auto(self, plan: Plan) -> str:
        if plan.direction == "host":
            return "kernel"  # refused with all reasons
        facts = self._facts(plan)
        devices = {fact.device for fact in facts} - {"cpu"}
        if len(devices) > 1 or any(fact.pageable for fact in facts):
            return "copy_engine"
        copies = copies_of(plan)
        if copies == 0 or plan.nbytes >= LARGE_RUN * copies:
            return "copy_engine"
        if plan.direction == "device" or plan.nbytes < STAGED_NBYTES:
            return "kernel"
        return "staged" if self._extent_nbytes(plan) >= LARGE_EXTENT and self._fits(plan) else "kernel"

    def _extent_nbytes(self, plan: Plan) -> float:
        """Mean bytes of what the host's side has in one piece."""
        extents = nbytes = 0.0
        for part in plan.parts:
            staging = self._runtime.staging(part.group, plan.direction)
            extents += part.units.shape[1] * staging.extents.size.size / staging.granule_units
            nbytes += part.nbytes
        return nbytes / max(extents, 1)

    def _fits(self, plan: Plan) -> bool:
        try:
            self._runtime.paths["staged"].check(plan)  # type: ignore[union-attr]
        except PathError:
            return False
        return True


__all__ = ["Callable", "Candidates"]

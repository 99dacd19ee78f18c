"""Which path serves a plan, which cannot and why, and which one ``auto`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.kernel_path import copies_of
from kvplan.execute.policy import GPU_PATHS
from kvplan.execute.transfer import check_layouts
from kvplan.layout import KVLayout
from kvplan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.runtime import Path, Runtime

# The rule of `auto`, until it is made by calibration. In bytes; measured on an H100 (docs/gpu.md).
LARGE_RUN = 64 << 10  # from here on the copy engine alone is as fast as anything, and takes no SM
LARGE_EXTENT = 64 << 10  # from here on the host's side of a staged transfer goes at the speed of the link
STAGED_NBYTES = 4 << 20  # below this the kernel's lower latency counts for more


Refusal = tuple[type[KVPlanError], str]


@dataclass(frozen=True)
class Verdict:
    """What holds for all plans between some layouts.

    Attributes:
        refused: by path, the error of those that cannot serve: its class and text. (An error itself would hold all that
            its traceback does.)
        pageable: whether some of the host's memory is not pinned, so that the driver copies through its own.
        several: whether there is memory of several GPUs.
    """

    refused: Mapping[str, Refusal]
    pageable: bool
    several: bool


class Candidates:
    """Judges paths for one device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # By identity of the only pair, which is held weakly.
        self._known: dict[tuple[int, int], tuple[ref[KVLayout], ref[KVLayout], Verdict]] = {}

    def choose(self, plan: Plan, *, capturing: bool) -> tuple[Path, bool]:
        """The path for a plan, and whether pageable memory is in it; nothing has moved when it refuses.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are virtual.
            HostMemoryError: the path is for pinned memory, and this is not.
            PathError: the path, or every path, cannot serve the plan.
        """
        runtime = self._runtime
        name = runtime.policy.path
        verdict = self._verdict(plan)
        if name == "auto":
            name = "kernel" if capturing else self._auto(plan, verdict)
        elif capturing and not runtime.paths[name].capturable:
            raise PathError(f"path {name!r} cannot be captured into a CUDA graph; path 'kernel' can")
        self._check(plan, name, verdict)
        return runtime.paths[name], verdict.pageable

    def check(self, plan: Plan, name: str) -> None:
        """A path can serve a plan.

        Raises:
            LayoutError, HostMemoryError, PathError: it cannot.
        """
        self._check(plan, name, self._verdict(plan))

    def _check(self, plan: Plan, name: str, verdict: Verdict) -> None:
        if name in verdict.refused:
            kind, text = verdict.refused[name]
            raise kind(text)
        if name == "staged":
            self._runtime.staged.check(plan)

    def _verdict(self, plan: Plan) -> Verdict:
        if len(plan.layouts) > 1:
            return self._judge(plan)
        src, dst = plan.layouts[0]
        key = (id(src), id(dst))
        known = self._known.get(key)
        if known is not None and known[0]() is src and known[1]() is dst:
            return known[2]
        verdict = self._judge(plan)
        if not verdict.pageable:  # it may be pinned by the next time

            def forget(_: object) -> None:
                self._known.pop(key, None)

            self._known[key] = (ref(src, forget), ref(dst, forget), verdict)
        return verdict

    def _judge(self, plan: Plan) -> Verdict:
        """Check the layouts, and say which paths cannot serve and why.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are virtual.
        """
        reach = self._runtime.reach
        check_layouts(plan)
        facts = [reach.facts(layout) for pair in plan.layouts for layout in pair]
        pageable = next((fact.pageable for fact in facts if fact.pageable), "")
        mine = f"cuda:{self._runtime.device.ordinal}"
        devices = sorted({fact.device if ":" in fact.device else f"{fact.device}:0" for fact in facts} - {"cpu:0"})
        refused: dict[str, Refusal] = {}
        if plan.direction == "host":
            nobody = self._nobody(plan, "between CPU memories, the executor of device 'cpu' copies")
            refused = dict.fromkeys(GPU_PATHS, nobody)
        elif mine not in devices:
            nobody = self._nobody(plan, f"moves memory of {mine}, and this plan is of {', '.join(devices)}")
            refused = dict.fromkeys(GPU_PATHS, nobody)
        else:
            for name in ("kernel", "staged"):
                if devices != [mine]:
                    text = f"path {name!r} reaches {mine} and pinned memory; the plan is of {', '.join(devices)}"
                    refused[name] = PathError, text
                elif pageable:
                    text = f"path {name!r} reaches pinned memory only: {pageable}; pin it (kvplan.allocate, torch's "
                    refused[name] = HostMemoryError, text + "pin_memory, cudaHostRegister) or take path 'copy_engine'"
            if plan.direction == "device":
                text = "path 'staged' is for loads and stores; within a GPU there is nothing to stage"
                refused["staged"] = PathError, text
        return Verdict(refused, bool(pageable), len(devices) > 1)

    def _nobody(self, plan: Plan, why: str) -> Refusal:
        reasons = "; ".join(f"{path}: {why}" for path in GPU_PATHS)
        return PathError, f"no path serves this {plan.direction!r} plan: {reasons}"

    def _auto(self, plan: Plan, verdict: Verdict) -> str:
        if verdict.several or verdict.pageable:
            return "copy_engine"
        copies = copies_of(plan)
        if plan.nbytes >= LARGE_RUN * copies:
            return "copy_engine"
        if plan.direction == "device" or plan.nbytes < STAGED_NBYTES or "staged" in verdict.refused:
            return "kernel"
        if self._extent_nbytes(plan) < LARGE_EXTENT:
            return "kernel"
        try:
            self._runtime.staged.check(plan)
        except PathError:
            return "kernel"
        return "staged"

    def _extent_nbytes(self, plan: Plan) -> float:
        """Mean bytes of what the host's side has in one piece."""
        extents = nbytes = 0.0
        for part in plan.parts:
            staging = self._runtime.staging(part.group, plan.direction)
            extents += part.units.shape[1] * staging.extents.shape[1] / staging.granule_units
            nbytes += part.nbytes
        return nbytes / max(extents, 1)

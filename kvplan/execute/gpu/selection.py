"""Which path serves a plan, which cannot and why, and which one ``auto`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from kvplan.cost import model as cost
from kvplan.cost.policy import GPU_PATHS
from kvplan.cost.profile import DIRECTIONS, TERMS, DeviceProfile
from kvplan.cost.statistics import chains, facts_of, follow, statistics_of
from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.gpu.kernel_path import copies_of
from kvplan.execute.transfer import check_layouts
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.descriptors import Part
from kvplan.plan.halves import LARGE_RUN, halves_of
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Path, Runtime

MOST_DECISIONS = 4096  # that are remembered
MOST_PARTS = 8  # of a plan whose decision is


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


class Choice(NamedTuple):
    """What is to move a plan.

    Attributes:
        path: that moves it.
        predicted: seconds on the GPU that it is expected to take; None where there is no model, or nobody asked.
        pageable: whether pageable memory is in it.
    """

    path: Path
    predicted: float | None
    pageable: bool


class Candidates:
    """Judges paths for one device."""

    def __init__(self, runtime: Runtime, profile: DeviceProfile | None) -> None:
        self._runtime = runtime
        self._profile = profile
        # By what tells plans apart; groups and layouts, told by their identity, are held weakly.
        self._decided: dict[Any, tuple[tuple[ref[Any], ...], Choice]] = {}
        # By identity of the only pair, which is held weakly.
        self._known: dict[tuple[int, int], tuple[ref[KVLayout], ref[KVLayout], Verdict]] = {}

    @property
    def profile(self) -> DeviceProfile:
        """Of the device, found when first asked for."""
        if self._profile is None:
            from kvplan.cost.store import find_for

            self._profile = find_for(self._runtime.device.ordinal)
        return self._profile

    def choose(self, plan: Plan, *, capturing: bool) -> Choice:
        """The path for a plan; nothing has moved when it refuses.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            HostMemoryError: the path is for pinned memory, and this is not.
            PathError: the path, or every path, cannot serve the plan.
        """
        runtime = self._runtime
        name = runtime.policy.path
        if name == "auto" and not capturing:
            return self._auto(plan)
        verdict = self._verdict(plan)
        if name == "auto":
            name = "kernel"
        elif capturing and not runtime.paths[name].capturable:
            raise PathError(f"path {name!r} cannot be captured into a CUDA graph; path 'kernel' can")
        self._check(plan, name, verdict)
        return Choice(runtime.paths[name], None, verdict.pageable)

    def all(self, plan: Plan) -> list[cost.Candidate]:
        """Every path with what it is expected to take, the one that ``auto`` takes first; refused ones last.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            PathError: within a GPU, where nothing was measured.
        """
        verdict = self._verdict(plan)
        found = self._candidates(plan, verdict)
        ruled = _ruled(plan, verdict)
        return sorted(found, key=lambda one: one.path != ruled) if ruled else found

    def _candidates(self, plan: Plan, verdict: Verdict) -> list[cost.Candidate]:
        refused = {name: text for name, (_, text) in verdict.refused.items()}
        if "staged" not in refused:
            try:
                self._runtime.staged.check(plan)
            except PathError as error:
                refused["staged"] = str(error)
        staging = self._runtime.staging
        large, small = halves_of(plan)
        halves = (statistics_of(large, staging), statistics_of(small, staging)) if large and small else None
        return cost.candidates(statistics_of(plan, staging), self.profile, self._runtime.policy, refused, halves)

    def expected(self, plan: Plan, name: str) -> float | None:
        """Seconds on the GPU that a path is expected to take for a plan; None where nothing was measured."""
        if plan.direction not in DIRECTIONS or not plan.nbytes or name not in TERMS:
            return None
        verdict = self._verdict(plan)
        if verdict.pageable or verdict.several:
            return None
        made = statistics_of(plan, self._runtime.staging)
        return cost.predict(name, made, self.profile, self._runtime.policy).seconds

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
            LayoutError: a destination that is read-only, or addresses that are not this process's.
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
            if not triton_is_there():
                for name in ("kernel", "staged"):
                    text = f"path {name!r} needs Triton, which is not installed: pip install 'kvplan[cuda]'"
                    refused.setdefault(name, (PathError, text))
            if plan.direction == "device":
                text = "path 'staged' is for loads and stores; within a GPU there is nothing to stage"
                refused["staged"] = PathError, text
        return Verdict(refused, bool(pageable), len(devices) > 1)

    def _nobody(self, plan: Plan, why: str) -> Refusal:
        reasons = "; ".join(f"{path}: {why}" for path in GPU_PATHS)
        return PathError, f"no path serves this {plan.direction!r} plan: {reasons}"

    def _auto(self, plan: Plan) -> Choice:
        """What the model makes the cheapest; within a GPU, and of pageable memory, what the rule says.

        Plans of the same run groups, and as many units that merge as much, are decided once. What merges is counted
        only where the path may depend on it: that takes as long as moving a small plan.
        """
        whatever: Any = None
        if len(plan.parts) == 1 and len(plan.layouts) == 1:
            part = plan.parts[0]
            src, dst = plan.layouts[0]
            whatever = id(part.group), id(src), id(dst), part.units.shape[1]
            known = self._decided.get(whatever)
            if known is not None:
                return known[1]
            key: Any = (*whatever, *self._merging(part, plan, 0))
        elif len(plan.parts) <= MOST_PARTS:
            key = (
                *((id(part.group), part.units.shape[1], *self._merging(part, plan, k))
                  for k, part in enumerate(plan.parts)),
                *(id(layout) for pair in plan.layouts for layout in pair),
            )  # fmt: skip
        else:
            return self._weigh(plan)
        known = self._decided.get(key)
        if known is not None:
            return known[1]
        choice = self._weigh(plan)
        if not choice.pageable:  # it may be pinned by the next time
            if whatever is not None and self._holds_whatever_merges(plan, choice):
                key = whatever
            self._remember(key, plan, choice)
        return choice

    def _remember(self, key: Any, plan: Plan, choice: Choice) -> None:
        """Keep a decision as long as all groups and layouts live whose identities are in its key."""
        if len(self._decided) >= MOST_DECISIONS:
            self._decided.clear()

        def forget(_: object) -> None:  # before the identity is given to another object
            self._decided.pop(key, None)

        held = (*(part.group for part in plan.parts), *(layout for pair in plan.layouts for layout in pair))
        self._decided[key] = (tuple(ref(thing, forget) for thing in held), choice)

    def _holds_whatever_merges(self, plan: Plan, choice: Choice) -> bool:
        """Whether the kernel, to which merging is nothing, is taken though all copies of the others were one."""
        if choice.path is not self._runtime.kernel or choice.predicted is None or all(halves_of(plan)):
            return False
        refused = self._verdict(plan).refused
        made = statistics_of(plan, self._runtime.staging)
        return cost.kernel_whatever_merges(made, self.profile, self._runtime.policy, refused)

    def _merging(self, part: Part, plan: Plan, at: int) -> tuple[int, ...]:
        """How far copies of a part's units merge, and how far its pieces on the host do, to four binary digits.

        Plans of random blocks differ by a few copies; no choice depends on so few.
        """
        group, count = part.group, part.units.shape[1]
        if count < 2:
            return ()
        left = [chains(part.units, nbytes) for nbytes in group.sizes] if group.chainable else []
        facts = facts_of(group, plan.direction, self._runtime.staging)
        pieces = count - follow(part, facts, plan.direction, plan.skips[at]) if facts.joinable else count
        return (_rounded(pieces), *map(_rounded, left))

    def _weigh(self, plan: Plan) -> Choice:
        paths, verdict = self._runtime.paths, self._verdict(plan)
        name = _ruled(plan, verdict)
        if name:
            self._check(plan, name, verdict)
            return Choice(paths[name], None, verdict.pageable)
        every = self._candidates(plan, verdict)
        if every[0].refused:
            if len({one.refused for one in every}) == 1:  # of all the same, which names each
                raise PathError(every[0].refused)
            reasons = "; ".join(f"{one.path}: {one.refused}" for one in every)
            raise PathError(f"no path serves this {plan.direction!r} plan: {reasons}")
        return Choice(paths[every[0].path], every[0].seconds, verdict.pageable)


def _ruled(plan: Plan, verdict: Verdict) -> str:
    """The path of plans of which nothing is measured; "" for the others."""
    if verdict.several or verdict.pageable:
        return "copy_engine"
    if plan.direction in DIRECTIONS and plan.nbytes:
        return ""
    return "copy_engine" if plan.nbytes >= LARGE_RUN * max(copies_of(plan), 1) else "kernel"


def _rounded(count: int) -> int:
    """A count to its first four binary digits.

    >>> [_rounded(count) for count in (7, 15, 33, 1000)]
    [7, 15, 32, 960]
    """
    shift = max(count.bit_length() - 4, 0)
    return count >> shift << shift


@cache
def triton_is_there() -> bool:
    """Whether the paths that launch kernels have their compiler."""
    return find_spec("triton") is not None

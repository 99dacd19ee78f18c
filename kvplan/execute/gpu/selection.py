"""Selection: finds the paths that serve a plan, says why others cannot, and chooses the path of ``auto``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import ref

from kvplan.cost import model as cost
from kvplan.cost.policy import GPU_PATHS
from kvplan.cost.profile import DIRECTIONS, TERMS, DeviceProfile
from kvplan.cost.statistics import Counted, Statistics, counted, halves_statistics, statistics_of, total
from kvplan.errors import PathError
from kvplan.execute.gpu.kernel_path import copies_of
from kvplan.execute.gpu.path import Path, Refusal, Sides, sides_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import check_layouts
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.halves import LARGE_RUN
from kvplan.plan.plan import Plan

MOST_PARTS = 8  # of a plan whose decision is remembered


class Choice(NamedTuple):
    """A chosen path.

    Attributes:
        path: moves the plan.
        predicted: seconds on the GPU that it is expected to take; None where there is no model, or it was not asked.
        pageable: whether pageable memory is in it.
    """

    path: Path
    predicted: float | None
    pageable: bool


class Selection:
    """Judges paths for one device.

    Args:
        resources: of the executor.
        paths: by their names.
        profile: of the device; None finds it when first asked for.
    """

    def __init__(self, resources: Resources, paths: Mapping[str, Path], profile: DeviceProfile | None) -> None:
        self._resources = resources
        self._paths = paths
        self._profile = profile
        # By what tells plans apart; groups and layouts, told by their identity, are held weakly.
        self._decided: dict[Any, tuple[tuple[ref[Any], ...], Choice]] = {}
        # By identity of the only pair, which is held weakly.
        self._known: dict[tuple[int, int], tuple[ref[KVLayout], ref[KVLayout], Sides]] = {}

    @property
    def profile(self) -> DeviceProfile:
        """Of the device, found when first asked for."""
        if self._profile is None:
            from kvplan.cost.store import find_for

            self._profile = find_for(self._resources.device.ordinal)
        return self._profile

    def choose(self, plan: Plan, *, capturing: bool) -> Choice:
        """The path for a plan; nothing has moved when it refuses.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            HostMemoryError: the path is for pinned memory, and this is not.
            PathError: the path, or every path, cannot serve the plan.
        """
        name = self._resources.policy.path
        if name == "auto" and not capturing:
            return self._auto(plan)
        sides = self._sides(plan)
        path = self._paths["kernel" if name == "auto" else name]
        if capturing and not path.capturable:
            raise PathError(f"path {name!r} cannot be captured into a CUDA graph; path 'kernel' can")
        refusal = _refusal(path, plan, sides) if sides.unserved else path.refuse(plan, sides)
        if refusal is not None:
            raise refusal[0](refusal[1])
        return Choice(path, None, bool(sides.pageable))

    def all(self, plan: Plan) -> list[cost.Candidate]:
        """Every path with what it is expected to take, the one that ``auto`` takes first; refused ones last.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            PathError: within a GPU, where nothing was measured.
        """
        sides = self._sides(plan)
        counts = counted(plan)
        found = self._candidates(plan, sides, counts, total(plan.direction, counts))
        ruled = _ruled(plan, sides)
        return sorted(found, key=lambda one: one.path != ruled) if ruled else found

    def likely(self, plan: Plan) -> list[Path]:
        """The path of the policy; of ``auto``, all that plans may take that are larger or smaller, or merge less."""
        chosen = self.choose(plan, capturing=False)
        if chosen.predicted is None:
            return [chosen.path]
        return [self._paths[one.path] for one in self.all(plan) if not one.refused]

    def expected(self, plan: Plan, name: str) -> float | None:
        """Seconds on the GPU that a path is expected to take for a plan; None where nothing was measured."""
        if plan.direction not in DIRECTIONS or not plan.nbytes or name not in TERMS:
            return None
        sides = self._sides(plan)
        if sides.pageable or len(sides.devices) > 1:
            return None
        return cost.predict(name, statistics_of(plan), self.profile, self._resources.policy).seconds

    def check(self, name: str, plan: Plan) -> None:
        """A path can serve a plan.

        Raises:
            LayoutError, HostMemoryError, PathError: it cannot.
        """
        self._check(self._paths[name], plan, self._sides(plan))

    def _check(self, path: Path, plan: Plan, sides: Sides) -> None:
        refusal = _refusal(path, plan, sides)
        if refusal is not None:
            kind, text = refusal
            raise kind(text)

    def _candidates(
        self, plan: Plan, sides: Sides, counts: list[Counted], statistics: Statistics
    ) -> list[cost.Candidate]:
        found = {name: _refusal(path, plan, sides) for name, path in self._paths.items()}
        refused = {name: refusal[1] for name, refusal in found.items() if refusal is not None}
        halves = halves_statistics(plan.direction, counts)
        return cost.candidates(statistics, self.profile, self._resources.policy, refused, halves)

    def _sides(self, plan: Plan) -> Sides:
        """Ask the driver about a plan's memory, once for each pair of layouts.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
        """
        if len(plan.layouts) > 1:
            return self._look(plan)
        src, dst = plan.layouts[0]
        key = (id(src), id(dst))
        known = self._known.get(key)
        if known is not None and known[0]() is src and known[1]() is dst:
            return known[2]
        sides = self._look(plan)
        if not sides.pageable:  # it may be pinned by the next time

            def forget(_: object) -> None:
                self._known.pop(key, None)

            self._known[key] = (ref(src, forget), ref(dst, forget), sides)
        return sides

    def _look(self, plan: Plan) -> Sides:
        check_layouts(plan)
        facts = [self._resources.reach.facts(layout) for pair in plan.layouts for layout in pair]
        return sides_of(f"cuda:{self._resources.device.ordinal}", facts, plan.direction)

    def _auto(self, plan: Plan) -> Choice:
        """Choose the path that the model makes the cheapest; within a GPU, and of pageable memory, by the rule.

        Plans of the same run groups, and as many units that merge as much, are decided once. What merges is counted
        once, and only where the path may depend on it: counting takes as long as moving a small plan.
        """
        unmerged: Any = None  # a key without what merges
        if len(plan.parts) == 1 and len(plan.layouts) == 1:
            part = plan.parts[0]
            src, dst = plan.layouts[0]
            unmerged = id(part.group), id(src), id(dst), part.units.shape[1]
            known = self._decided.get(unmerged)
            if known is not None:
                return known[1]
        counts = counted(plan)
        key: Any = None
        if unmerged is not None:
            key = (*unmerged, *map(_rounded, counts[0][-1]))
            known = self._decided.get(key)
            if known is not None:
                return known[1]
        elif len(plan.parts) <= MOST_PARTS:
            layouts = (id(layout) for pair in plan.layouts for layout in pair)
            key = (*layouts, *((id(part.group), units, *map(_rounded, merged)) for part, _, units, _, merged in counts))
            known = self._decided.get(key)
            if known is not None:
                return known[1]
        sides = self._sides(plan)
        name = _ruled(plan, sides)
        if name:
            self._check(self._paths[name], plan, sides)
            choice = Choice(self._paths[name], None, bool(sides.pageable))
        else:
            statistics = total(plan.direction, counts)
            best = self._best(plan, sides, counts, statistics)
            choice = Choice(self._paths[best.path], best.seconds, bool(sides.pageable))
            if (
                unmerged is not None
                and best.path == "kernel"
                and self._whatever_merges(plan, sides, counts, statistics)
            ):
                key = unmerged
        if key is not None and not sides.pageable:  # it may be pinned by the next time
            self._remember(key, plan, choice)
        return choice

    def _remember(self, key: Any, plan: Plan, choice: Choice) -> None:
        """Keep a decision as long as all groups and layouts live whose identities are in its key."""
        if len(self._decided) >= self._resources.limits.decisions:
            self._decided.clear()

        def forget(_: object) -> None:  # before the identity is given to another object
            self._decided.pop(key, None)

        held = (*(part.group for part in plan.parts), *(layout for pair in plan.layouts for layout in pair))
        self._decided[key] = (tuple(ref(thing, forget) for thing in held), choice)

    def _whatever_merges(
        self, plan: Plan, sides: Sides, counts: list[Counted], statistics: Statistics
    ) -> bool:  # fmt: skip
        """Whether the kernel, to which merging is nothing, is taken though all copies of the others were one."""
        if halves_statistics(plan.direction, counts) is not None:
            return False
        refused = [name for name, path in self._paths.items() if _refusal(path, plan, sides) is not None]
        return cost.kernel_whatever_merges(statistics, self.profile, self._resources.policy, refused)

    def _best(self, plan: Plan, sides: Sides, counts: list[Counted], statistics: Statistics) -> cost.Candidate:
        every = self._candidates(plan, sides, counts, statistics)
        if every[0].refused:
            if len({one.refused for one in every}) == 1:  # of all the same, which names each
                raise PathError(every[0].refused)
            reasons = "; ".join(f"{one.path}: {one.refused}" for one in every)
            raise PathError(f"no path serves this {plan.direction!r} plan: {reasons}")
        return every[0]


def _refusal(path: Path, plan: Plan, sides: Sides) -> Refusal | None:
    """Why a path cannot serve a plan; None where it can."""
    if sides.unserved:
        reasons = "; ".join(f"{name}: {sides.unserved}" for name in GPU_PATHS)
        return PathError, f"no path serves this {plan.direction!r} plan: {reasons}"
    return path.refuse(plan, sides)


def _ruled(plan: Plan, sides: Sides) -> str:
    """The path of plans of which nothing is measured; "" for the others."""
    if len(sides.devices) > 1 or sides.pageable:
        return "copy_engine"
    if plan.direction in DIRECTIONS and plan.nbytes:
        return ""
    return "copy_engine" if plan.nbytes >= LARGE_RUN * max(copies_of(plan), 1) else "kernel"


def _rounded(count: int) -> int:
    """A count to its first four binary digits: plans of random blocks differ by a few copies, and no choice by so few.

    >>> [_rounded(count) for count in (7, 15, 33, 1000)]
    [7, 15, 32, 960]
    """
    shift = max(count.bit_length() - 4, 0)
    return count >> shift << shift

"""The choice of a path: which paths can serve a plan, why others cannot, and which path ``auto`` takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from kvplan.cost import store
from kvplan.cost.model import PREFERRED, Candidate, Prices, candidates, first_near
from kvplan.cost.policy import GPU_PATHS, HOST_ROUTES, PEER_ROUTES, ROUTES
from kvplan.cost.profile import DeviceProfile
from kvplan.cost.statistics import counted, facts_in
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.gpu.paths import Path, Sides, sides_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import check_layouts
from kvplan.plan.layers import Edges
from kvplan.plan.plan import Plan, PlannedBy

MOST_CHOICES = 4096  # kept for plans of a program

Choice = tuple[Path, float | None, bool]


class Offer(NamedTuple):
    """The paths that a choice for plans of the same run groups is between, and what they cost.

    Attributes:
        paths: the paths that can serve such plans; or the one that they take.
        prices: (2, paths, 1 + run groups): predicted seconds on the GPU, and what paths are compared by; for what comes
            before the first unit, and for a unit of each run group. None where no costs are measured.
    """

    paths: list[Path]
    prices: NDArray[np.float64] | None


class Known:
    """What is known of the plans of a program, and of the programs that it was joined with.

    Attributes:
        sides: the memory of both sides.
        others: the other programs.
        offers: by the groups of layers and the run groups of a plan with bytes.
        choices: by these, and by the numbers of units.
    """

    def __init__(self, programs: Sequence[PlannedBy], sides: Sides) -> None:
        self.others, self.sides = [ref(other) for other in programs[1:]], sides
        self.offers: dict[Hashable, Offer] = {}
        self.choices: dict[Hashable, Choice] = {}


class Selection:
    """An object that chooses paths for plans on one device.

    Args:
        backend: the executor.
        paths: the paths, by name.
        profile: profile of the device, or of it and its peers; what it lacks is looked up at the first use.
    """

    def __init__(self, backend: Resources, paths: Mapping[str, Path], profile: DeviceProfile | None) -> None:
        self._backend, self._policy, self._paths, self._given = backend, backend.policy, paths, profile
        self._profiles: dict[int | None, DeviceProfile] = {}  # by the number of the other GPU, if there is one
        self._known: WeakKeyDictionary[PlannedBy, Known] = WeakKeyDictionary()  # by the first program of a plan

    def choose(self, plan: Plan, edges: Edges = ()) -> Choice:
        """Choose the path for a plan, before any bytes move.

        Args:
            plan: the plan.
            edges: groups of layers that the transfer is cut into; () if it is not by layers.

        Returns:
            The path; its predicted seconds on the GPU, None if no costs are measured for it; and whether the plan has
            pageable memory.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
            HostMemoryError: the path needs pinned memory, and some of the plan's memory is pageable.
            PathError: the path, or every path, cannot serve the plan.
        """
        known, parts = self._know(plan), plan.parts
        key = edges, *[(group, units.shape[1]) for group, units in parts]
        choice = known.choices.get(key)
        if choice is None:
            offer, times = self.offer(plan, edges, known), [1, *(units.shape[1] for _, units in parts)]
            seconds, scores = [None], [0.0]
            if offer.prices is not None:
                seconds, scores = (offer.prices @ times).tolist()
            best = first_near(scores)
            if len(known.choices) >= MOST_CHOICES:
                known.choices.clear()
            choice = known.choices[key] = offer.paths[best], seconds[best], bool(known.sides.pageable)
        return choice

    def offer(self, plan: Plan, edges: Edges = (), known: Known | None = None) -> Offer:
        """Return the paths that plans like this one, of any size, are served by; see :meth:`choose`."""
        known, key = known or self._know(plan), (edges, bool(plan.nbytes), *[part.group for part in plan.parts])
        offer = known.offers.get(key)
        if offer is None:
            offer = known.offers[key] = self._offer(plan, known.sides, edges)
        return offer

    def _offer(self, plan: Plan, sides: Sides, edges: Edges) -> Offer:
        """Find the paths that can serve a plan; or the path of the policy, or of such a plan; and their costs."""
        ruled = _ruled(plan, sides)
        name = self._policy.path if self._policy.path != "auto" else ruled
        names = (name,) if name else PREFERRED
        refused = self._refused(plan, sides, names)
        able = [name for name in names if name not in refused]
        if not able:
            if len({str(error) for error in refused.values()}) == 1:
                raise refused[names[0]]
            raise _no_path(plan, "; ".join(f"{name}: {error}" for name, error in refused.items()))
        prices = None
        profile = None if ruled or sides.route not in ROUTES else self._profile(sides)
        if profile is not None and (not name or name in profile.costs.get(sides.route, ())):
            facts = [facts_in(plan, group, edges) for group, _ in plan.parts]
            paths = [Prices(path, sides.route, profile, self._policy) for path in able]
            rates = [[path.fixed, *map(path.unit, facts)] for path in paths]
            prices = np.array([[(each.seconds, each.wall + each.compute_seconds) for each in rate] for rate in rates])
            prices = prices.transpose(2, 0, 1)
        return Offer([self._paths[path] for path in able], prices)

    def all(self, plan: Plan, edges: Edges = ()) -> list[Candidate]:
        """Return every path with its predicted time: the path that ``auto`` takes first, refused paths last.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        sides = self._know(plan).sides
        refused = {name: str(error) for name, error in self._refused(plan, sides, GPU_PATHS).items()}
        if sides.unserved:  # such a plan may have a route without costs
            return [Candidate(name, refused=refused[name]) for name in GPU_PATHS]
        every = candidates(counted(plan, edges), sides.route, self._profile(sides), self._policy, refused)
        ruled = _ruled(plan, sides)
        return sorted(every, key=lambda candidate: candidate.path != ruled)

    def _refused(self, plan: Plan, sides: Sides, names: Sequence[str]) -> dict[str, KVPlanError]:
        """Return why paths cannot serve a plan, for those that cannot."""
        if sides.unserved:
            reasons = "; ".join(f"{name}: {sides.unserved}" for name in GPU_PATHS)
            return dict.fromkeys(names, _no_path(plan, reasons))
        refusals = {name: self._paths[name].refuse(plan, sides) for name in names}
        return {name: refusal for name, refusal in refusals.items() if refusal is not None}

    def _profile(self, sides: Sides) -> DeviceProfile:
        """Return the profile of the device, or of the device and its peer."""
        peer = sides.peer if sides.route in PEER_ROUTES else None
        if self._given is not None and ("load" if peer is None else "push") in self._given.costs:
            return self._given
        if peer not in self._profiles:
            self._profiles[peer] = store.find_for(self._backend.device.ordinal, peer)
        return self._profiles[peer]

    def _know(self, plan: Plan) -> Known:
        """Describe the memory of a plan. The driver is called once for each program, or each time if memory may change.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        programs, known = plan.programs, self._known.get(plan.programs[0])
        joined = len(programs) > 1 or (known is not None and known.others)
        if known is None or (joined and [other() for other in known.others] != [*programs[1:]]):
            check_layouts(plan)
            facts = [self._backend.reach.facts(layout) for pair in plan.layouts for layout in pair]
            known = Known(plan.programs, sides_of(f"cuda:{self._backend.device.ordinal}", plan, facts))
            if not known.sides.passing:
                self._known[plan.programs[0]] = known
        return known


def _no_path(plan: Plan, reasons: str) -> KVPlanError:
    return PathError(f"no path serves this {plan.direction!r} plan: {reasons}")


def _ruled(plan: Plan, sides: Sides) -> str:
    """Return the path of a plan for which no costs are measured; "" for every other plan."""
    if sides.unserved:
        return ""
    if sides.passing or (sides.route in HOST_ROUTES and len(sides.devices) > 1):
        return "copy_engine"
    return "" if plan.nbytes else "kernel"

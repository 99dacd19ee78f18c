"""The choice of a path: which paths can serve a plan, why others cannot, and which path ``auto`` takes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from kvplan.cost import store
from kvplan.cost.model import PREFERRED, TIE, Candidate, Price, Prices, candidates, first_near
from kvplan.cost.policy import GPU_PATHS, HOST_ROUTES, PEER_ROUTES, ROUTES
from kvplan.cost.profile import DeviceProfile, route_paths
from kvplan.cost.statistics import counted, facts_in
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.gpu.path import Path, Sides, sides_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import check_layouts
from kvplan.plan.layers import Edges
from kvplan.plan.plan import Plan, PlannedBy
from kvplan.program.program import RunGroup

MOST_UNITS = 1 << 40  # no plan has more


class Costs(NamedTuple):
    """What a transfer costs before its first unit, or what one unit costs, on each of some paths.

    Attributes:
        seconds: predicted seconds on the GPU.
        scores: what paths are compared by.
    """

    seconds: list[float]
    scores: list[float]


class Unit(NamedTuple):
    """What one unit of a run group costs, and what transfers of this run group alone take.

    Attributes:
        costs: the costs of one unit.
        starts, taken: numbers of units, ascending, and the path that is taken from each of them on.
    """

    costs: Costs
    starts: list[int]
    taken: list[int]


class Offer(NamedTuple):
    """The paths that a choice is between, and what they cost.

    Attributes:
        paths: the paths that can serve a plan; or the one that it takes.
        fixed: their costs before the first unit; None if there is nothing to choose.
        units: by run group and groups of layers, what a unit costs on them.
        pageable: whether plans have pageable memory.
    """

    paths: list[Path]
    fixed: Costs | None
    units: dict[tuple[RunGroup, Edges | None], Unit]
    pageable: bool


class Known:
    """What is known of the plans of a program, and of the programs that it was joined with.

    Attributes:
        sides: the memory of both sides.
        offers: by the run groups of a plan with bytes: one, or a set of them.
    """

    __slots__ = ("_others", "offers", "sides")

    def __init__(self, programs: Sequence[PlannedBy], sides: Sides) -> None:
        self._others, self.sides = [ref(other) for other in programs[1:]], sides
        self.offers: dict[RunGroup | frozenset[RunGroup], Offer] = {}

    def serves(self, programs: Sequence[PlannedBy]) -> bool:
        """Return whether it is of the plans of these programs, of which the first is the same."""
        return len(programs) == 1 if not self._others else [other() for other in self._others] == list(programs[1:])


class Selection:
    """An object that chooses paths for plans on one device.

    Args:
        backend: the executor.
        paths: the paths, by name.
        profile: profile of the device, or of it and its peers; what it lacks is looked up at the first use.
    """

    def __init__(self, backend: Resources, paths: Mapping[str, Path], profile: DeviceProfile | None) -> None:
        self._backend = backend
        self._policy = backend.policy
        self._paths = paths
        self._given = profile
        self._profiles: dict[int, DeviceProfile] = {}  # by the number of the other GPU; -1 is for the device alone
        self._known: WeakKeyDictionary[PlannedBy, Known] = WeakKeyDictionary()  # by the first program of a plan

    @property
    def profile(self) -> DeviceProfile:
        """Return the profile of the device. The first use looks it up."""
        return self._profile(-1)

    def choose(self, plan: Plan, edges: Edges | None = None) -> tuple[Path, float | None, bool]:
        """Choose the path for a plan, before any bytes move.

        Args:
            plan: the plan.
            edges: groups of layers that the transfer is cut into; None if it is not by layers.

        Returns:
            The path; its predicted seconds on the GPU, None without a prediction or a choice; and whether the plan
            has pageable memory.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
            HostMemoryError: the path needs pinned memory, and some of the plan's memory is pageable.
            PathError: the path, or every path, cannot serve the plan.
        """
        known, parts = self._known.get(plan.programs[0]), plan.parts
        if known is None or not known.serves(plan.programs):
            known = self._know(plan)
        groups = parts[0].group if len(parts) == 1 else frozenset([part.group for part in parts])
        offer = known.offers.get(groups) if plan.nbytes else self._offer(plan, known.sides)
        if offer is None:
            offer = known.offers[groups] = self._offer(plan, known.sides)
        paths, fixed, units, pageable = offer
        if fixed is None:
            return paths[0], None, pageable
        if len(parts) == 1:
            ((group, some),) = parts
            count, unit = some.shape[1], units.get((group, edges)) or self._unit(plan, group, edges, offer)
            best = unit.taken[bisect(unit.starts, count) - 1]
            return paths[best], fixed.seconds[best] + count * unit.costs.seconds[best], pageable
        costs = fixed
        for group, some in parts:
            unit = units.get((group, edges)) or self._unit(plan, group, edges, offer)
            costs = Costs(*(_sums(*pair, some.shape[1]) for pair in zip(costs, unit.costs, strict=True)))
        best = first_near(costs.scores)
        return paths[best], costs.seconds[best], pageable

    def _offer(self, plan: Plan, sides: Sides) -> Offer:
        """Return the paths that can serve a plan, with their costs; or the path of the policy, or of such a plan."""
        name = self._policy.path if self._policy.path != "auto" else _ruled(plan, sides)
        names = (name,) if name else PREFERRED
        refused = self._refused(plan, sides, names)
        able = [one for one in names if one not in refused]
        if not able:
            if len({str(error) for error in refused.values()}) == 1:
                raise refused[names[0]]
            raise _no_path(plan, "; ".join(f"{name}: {error}" for name, error in refused.items()))
        fixed = None if name else _costs([self._prices(path, sides).fixed for path in able])
        return Offer([self._paths[path] for path in able], fixed, {}, bool(sides.pageable))

    def _unit(self, plan: Plan, group: RunGroup, edges: Edges | None, offer: Offer) -> Unit:
        """Price one unit of a run group, once for an offer."""
        sides, facts = self._sides(plan), facts_in(plan, group, edges or ())
        costs = _costs([self._prices(path.name, sides).unit(facts) for path in offer.paths])
        fixed = offer.fixed.scores if offer.fixed is not None else []
        starts = _crossings(fixed, costs.scores)
        taken = [first_near(_sums(fixed, costs.scores, count)) for count in starts]
        made = offer.units[group, edges] = Unit(costs, starts, taken)
        return made

    def all(self, plan: Plan, edges: Edges | None = None) -> list[Candidate]:
        """Return every path with its predicted time: the path that ``auto`` takes first, refused paths last.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        sides = self._sides(plan)
        refused = {name: str(error) for name, error in self._refused(plan, sides, GPU_PATHS).items()}
        if sides.unserved:  # such a plan may have a route without costs
            return [Candidate(name, refused=refused[name]) for name in GPU_PATHS]
        profile = self._profile(_peer(sides))
        found = candidates(counted(plan, edges or ()), sides.route, profile, self._policy, refused)
        ruled = _ruled(plan, sides)
        return sorted(found, key=lambda one: one.path != ruled) if ruled else found

    def likely(self, plan: Plan, edges: Edges | None = None) -> list[Path]:
        """Return the path of the policy. For ``auto``, return all paths that plans of other sizes may take."""
        path, predicted, _ = self.choose(plan, edges)
        if predicted is None:
            return [path]
        return [self._paths[one.path] for one in self.all(plan, edges) if not one.refused]

    def expected(self, plan: Plan, name: str, edges: Edges | None = None) -> float | None:
        """Return the predicted seconds on the GPU of a plan by a path; None if no costs are measured for it."""
        with self._backend.device.current():
            sides = self._sides(plan)
        if _ruled(plan, sides) or sides.route not in ROUTES or name not in route_paths(sides.route):
            return None
        return self._prices(name, sides).of(counted(plan, edges or ())).seconds

    def _refused(self, plan: Plan, sides: Sides, names: Sequence[str]) -> dict[str, KVPlanError]:
        """Return why paths cannot serve a plan, for those that cannot."""
        if sides.unserved:
            reasons = "; ".join(f"{name}: {sides.unserved}" for name in GPU_PATHS)
            return dict.fromkeys(names, _no_path(plan, reasons))
        refusals = {name: self._paths[name].refuse(plan, sides) for name in names}
        return {name: refusal for name, refusal in refusals.items() if refusal is not None}

    def _prices(self, name: str, sides: Sides) -> Prices:
        return Prices(name, sides.route, self._profile(_peer(sides)), self._policy)

    def _profile(self, peer: int) -> DeviceProfile:
        """Return the profile of the device, for -1, or of the device and its peer."""
        if self._given is not None and ("load" if peer < 0 else "push") in self._given.costs:
            return self._given
        if peer not in self._profiles:
            here = self._backend.device.ordinal
            self._profiles[peer] = store.find_for(here, None if peer < 0 else peer)
        return self._profiles[peer]

    def _sides(self, plan: Plan) -> Sides:
        known = self._known.get(plan.programs[0])
        return known.sides if known is not None and known.serves(plan.programs) else self._know(plan).sides

    def _know(self, plan: Plan) -> Known:
        """Describe the memory of a plan. The driver is called once for each program, or each time if memory may change.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        check_layouts(plan)
        facts = [self._backend.reach.facts(layout) for pair in plan.layouts for layout in pair]
        known = Known(plan.programs, sides_of(f"cuda:{self._backend.device.ordinal}", plan, facts))
        if not known.sides.passing:
            self._known[plan.programs[0]] = known
        return known


def _costs(prices: Sequence[Price]) -> Costs:
    return Costs([one.seconds for one in prices], [one.wall + one.compute_seconds for one in prices])


def _sums(fixed: Sequence[float], each: Sequence[float], count: int) -> list[float]:
    return [a + count * b for a, b in zip(fixed, each, strict=True)]


def _crossings(fixed: Sequence[float], each: Sequence[float]) -> list[int]:
    """Return the numbers of units, ascending from 1, between which :func:`first_near` takes the same path."""
    found = {1}
    for (a, b), (c, d) in permutations(zip(fixed, each, strict=True), 2):
        slope = b - (1 + TIE) * d  # from where on a path is as near to another as ties are
        crossing = ((1 + TIE) * c - a) / slope if slope else 0
        found |= {int(crossing) + k for k in (-1, 0, 1, 2) if 1 <= crossing < MOST_UNITS}
    return sorted(count for count in found if count >= 1)


def _peer(sides: Sides) -> int:
    return sides.peer if sides.route in PEER_ROUTES else -1


def _no_path(plan: Plan, reasons: str) -> KVPlanError:
    return PathError(f"no path serves this {plan.direction!r} plan: {reasons}")


def _ruled(plan: Plan, sides: Sides) -> str:
    """Return the path of a plan for which no costs are measured; "" for every other plan."""
    if sides.unserved:
        return ""
    if sides.passing or (sides.route in HOST_ROUTES and len(sides.devices) > 1):
        return "copy_engine"
    return "" if plan.nbytes else "kernel"

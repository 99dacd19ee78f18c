"""The choice of a path: which paths can serve a plan, why others cannot, and which path ``auto`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from kvplan.cost import store
from kvplan.cost.model import PREFERRED, Candidate, Price, Prices, candidates, first_near, summed
from kvplan.cost.policy import GPU_PATHS, HOST_ROUTES, PEER_ROUTES, ROUTES, layer_edges
from kvplan.cost.profile import DeviceProfile, route_paths
from kvplan.cost.statistics import counted, facts_in
from kvplan.errors import PathError
from kvplan.execute.gpu.path import Path, Refusal, Sides, sides_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import check_layouts
from kvplan.plan.layers import Edges
from kvplan.plan.plan import Plan, PlannedBy
from kvplan.program.program import RunGroup


class Choice(NamedTuple):
    """A chosen path.

    Attributes:
        path: the path that moves the plan.
        predicted: predicted seconds on the GPU; None if there is no prediction for the plan, or none was needed.
        pageable: whether the plan has pageable memory.
    """

    path: Path
    predicted: float | None
    pageable: bool


class Line(NamedTuple):
    """A path, and what plans of one run group cost on it: a fixed part, and one for each unit.

    Attributes:
        path: the path.
        fixed, each: predicted seconds on the GPU.
        fixed_score, each_score: what paths are compared by.
    """

    path: Path
    fixed: float
    each: float
    fixed_score: float
    each_score: float


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
        # By route and other GPU: the prices of paths.
        self._prices: dict[tuple[str, int], dict[str, Prices]] = {}
        # By run group, for each route, other GPU and groups of layers: the prices of a unit on each of these paths.
        self._units: WeakKeyDictionary[RunGroup, dict[tuple[tuple[str, int], Edges], dict[str, Price]]]
        self._units = WeakKeyDictionary()
        # By the first program of a plan: its other programs, and the memory of both sides.
        self._known: WeakKeyDictionary[PlannedBy, tuple[list[ref[PlannedBy]], Sides]] = WeakKeyDictionary()
        # By program, for each of its run groups and groups of layers: the paths that can serve plans of this run group.
        self._lines: WeakKeyDictionary[PlannedBy, dict[tuple[RunGroup, Edges | None], list[Line]]] = WeakKeyDictionary()

    @property
    def profile(self) -> DeviceProfile:
        """Return the profile of the device. The first use looks it up."""
        return self._profile(-1)

    def edges(self, plan: Plan) -> Edges:
        """Return the groups of layers that a transfer by layers is cut into; see :func:`layer_edges`."""
        return layer_edges(plan.nbytes, len(plan.layers))

    def choose(self, plan: Plan, edges: Edges | None = None) -> Choice:
        """Choose the path for a plan, before any bytes move.

        Args:
            plan: the plan.
            edges: groups of layers that the transfer is cut into; None if it is not by layers.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
            HostMemoryError: the path needs pinned memory, and some of the plan's memory is pageable.
            PathError: the path, or every path, cannot serve the plan.
        """
        single, lines = len(plan.parts) == len(plan.programs) == 1 and plan.nbytes, None
        if single:
            known = self._lines.get(plan.programs[0])
            lines = None if known is None else known.get((plan.parts[0].group, edges))
        if not lines:
            sides = self._sides(plan)
            if single and not sides.passing and not sides.unserved:
                lines = self._lines_of(plan, sides, edges)
                self._lines.setdefault(plan.programs[0], {})[plan.parts[0].group, edges] = lines
        if lines:
            count = plan.units
            line = lines[0] if len(lines) == 1 else lines[first_near([one[3] + count * one[4] for one in lines])]
            return Choice(line[0], line[1] + count * line[2] or None, False)  # noqa: FBT003
        name = self._policy.path if self._policy.path != "auto" else _ruled(plan, sides)
        if name:
            self._check(name, plan, sides)
            return Choice(self._paths[name], None, bool(sides.pageable))
        refused = self._refused(plan, sides)
        able = [name for name in PREFERRED if name not in refused]
        if not able:
            reasons = dict.fromkeys(text for _, text in refused.values())
            several = "; ".join(f"{name}: {text}" for name, (_, text) in refused.items())
            raise PathError(next(iter(reasons)) if len(reasons) == 1 else _no_path(plan, several))
        prices = self._prices_for(sides)
        units = [(self._unit(plan, part.group, sides, edges or ()), part.units.shape[1]) for part in plan.parts]
        made = [summed(prices[name].fixed, units, name) for name in able]
        best = first_near([price[1] + price[2] for price in made])
        return Choice(self._paths[able[best]], made[best][0], bool(sides.pageable))

    def _lines_of(self, plan: Plan, sides: Sides, edges: Edges | None) -> list[Line]:
        """Return the path of the policy, or the paths that can serve a plan of one run group, with their prices."""
        name = self._policy.path if self._policy.path != "auto" else _ruled(plan, sides)
        if name:
            self._check(name, plan, sides)
            return [Line(self._paths[name], 0.0, 0.0, 0.0, 0.0)]
        refused, prices = self._refused(plan, sides), self._prices_for(sides)
        units = self._unit(plan, plan.parts[0].group, sides, edges or ())
        able = [name for name in PREFERRED if name in prices and name not in refused]
        return [
            Line(self._paths[name], fixed[0], each[0], fixed[1] + fixed[2], each[1] + each[2])
            for name, fixed, each in ((name, prices[name].fixed, units[name]) for name in able)
        ]

    def all(self, plan: Plan, edges: Edges | None = None) -> list[Candidate]:
        """Return every path with its predicted time: the path that ``auto`` takes first, refused paths last.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        sides = self._sides(plan)
        refused = {name: text for name, (_, text) in self._refused(plan, sides).items()}
        if sides.unserved:  # such a plan may have a route without costs
            return [Candidate(name, refused=refused[name]) for name in GPU_PATHS]
        profile = self._profile(_peer(sides))
        found = candidates(counted(plan, edges or ()), sides.route, profile, self._policy, refused)
        ruled = _ruled(plan, sides)
        return sorted(found, key=lambda one: one.path != ruled) if ruled else found

    def likely(self, plan: Plan, edges: Edges | None = None) -> list[Path]:
        """Return the path of the policy. For ``auto``, return all paths that plans of other sizes may take."""
        chosen = self.choose(plan, edges)
        if chosen.predicted is None:
            return [chosen.path]
        return [self._paths[one.path] for one in self.all(plan, edges) if not one.refused]

    def expected(self, plan: Plan, name: str, edges: Edges | None = None) -> float | None:
        """Return the predicted seconds on the GPU of a plan by a path; None if no costs are measured for it."""
        with self._backend.device.current():
            sides = self._sides(plan)
        if _ruled(plan, sides) or sides.route not in ROUTES or name not in route_paths(sides.route):
            return None
        return self._prices_for(sides)[name].of(counted(plan, edges or ())).seconds

    def _check(self, name: str, plan: Plan, sides: Sides) -> None:
        refusal = self._refused(plan, sides, (name,)).get(name)
        if refusal is not None:
            raise refusal[0](refusal[1])

    def _refused(self, plan: Plan, sides: Sides, names: Sequence[str] = ()) -> dict[str, Refusal]:
        """Return why paths cannot serve a plan, for those that cannot."""
        if sides.unserved:
            reasons = "; ".join(f"{name}: {sides.unserved}" for name in GPU_PATHS)
            return dict.fromkeys(self._paths, (PathError, _no_path(plan, reasons)))
        found = {}
        for name in names or self._paths:
            refusal = self._paths[name].refuse(plan, sides)
            if refusal is not None:
                found[name] = refusal
        return found

    def _unit(self, plan: Plan, group: RunGroup, sides: Sides, edges: Edges) -> dict[str, Price]:
        """Return the prices of one unit of a run group, by path."""
        known, key = self._units.get(group), ((sides.route, _peer(sides)), edges)
        if known is None:
            known = self._units[group] = {}
        if key not in known:
            facts = facts_in(plan, group, edges)
            known[key] = {name: prices.unit(facts) for name, prices in self._prices_for(sides).items()}
        return known[key]

    def _prices_for(self, sides: Sides) -> dict[str, Prices]:
        """Return the prices of each path for the route of a plan."""
        route, peer = key = sides.route, _peer(sides)
        if key not in self._prices:
            profile = self._profile(peer)
            self._prices[key] = {name: Prices(name, route, profile, self._policy) for name in route_paths(route)}
        return self._prices[key]

    def _profile(self, peer: int) -> DeviceProfile:
        """Return the profile of the device, for -1, or of the device and its peer."""
        if self._given is not None and ("load" if peer < 0 else "push") in self._given.costs:
            return self._given
        if peer not in self._profiles:
            here = self._backend.device.ordinal
            self._profiles[peer] = store.find_for(here, None if peer < 0 else peer)
        return self._profiles[peer]

    def _sides(self, plan: Plan) -> Sides:
        """Describe the memory of a plan. The driver is called once for each program, or each time if memory may change.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        first, *others = plan.programs
        known = self._known.get(first)
        if known is not None and [other() for other in known[0]] == others:
            return known[1]
        check_layouts(plan)
        facts = [self._backend.reach.facts(layout) for pair in plan.layouts for layout in pair]
        sides = sides_of(f"cuda:{self._backend.device.ordinal}", plan, facts)
        if not sides.passing:
            self._known[first] = [ref(other) for other in others], sides
        return sides


def _peer(sides: Sides) -> int:
    return sides.peer if sides.route in PEER_ROUTES else -1


def _no_path(plan: Plan, reasons: str) -> str:
    return f"no path serves this {plan.direction!r} plan: {reasons}"


def _ruled(plan: Plan, sides: Sides) -> str:
    """Return the path of a plan for which no costs are measured; "" for every other plan."""
    if sides.unserved:
        return ""
    if sides.passing or (sides.route in HOST_ROUTES and len(sides.devices) > 1):
        return "copy_engine"
    return "" if plan.nbytes else "kernel"

"""The choice of a path: which paths can serve a plan, why others cannot, and which path ``auto`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from kvplan.cost import model as cost
from kvplan.cost.by_layer import LayerCut, candidates_by_layer, hiding_of, in_sequence, kernel_wins_by_layer
from kvplan.cost.policy import GPU_PATHS, HOST_ROUTES, PEER_ROUTES, ROUTES, Hiding, layer_groups
from kvplan.cost.profile import DeviceProfile, route_paths
from kvplan.cost.statistics import Counted, counted, scattered, total
from kvplan.errors import PathError
from kvplan.execute.gpu.path import Path, Refusal, Sides, sides_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import check_layouts
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.layers import Cutting
from kvplan.plan.plan import Plan

# Decisions are remembered for plans of at most this number of plan parts; by layers, a decision takes longer than the
# look-up of any number.
MOST_PARTS = 8


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


class Selection:
    """An object that chooses paths for plans on one device.

    Args:
        resources: resources of the executor.
        paths: the paths, by name.
        profile: profile of the device; if None, it is looked up at the first use.
    """

    def __init__(self, resources: Resources, paths: Mapping[str, Path], profile: DeviceProfile | None) -> None:
        self._resources = resources
        self._paths = paths
        # The given profile, if it has the routes of a GPU; and by the other GPU's number, the profiles of pairs.
        self._profile = profile if profile is None or "load" in profile.costs else None
        self._given_pair = profile if profile is not None and "push" in profile.costs else None
        self._pairs: dict[int, DeviceProfile] = {}
        # By the data that a decision depends on: the decision, and the bytes of the plan that it was made for. Run
        # groups and layouts are in the key by id, and held weakly.
        self._decided: dict[Any, tuple[tuple[ref[Any], ...], Choice, int]] = {}
        # By run groups, layouts and groups of layers, likewise: the run groups cut by layers.
        self._cuts: dict[Any, tuple[tuple[ref[Any], ...], LayerCut]] = {}
        # By the ids of a plan's only pair of layouts, which is held weakly.
        self._known: dict[tuple[int, int], tuple[ref[KVLayout], ref[KVLayout], Sides]] = {}

    @property
    def profile(self) -> DeviceProfile:
        """Return the profile of the device. The first use looks it up."""
        if self._profile is None:
            from kvplan.cost.store import find_for

            self._profile = find_for(self._resources.device.ordinal)
        return self._profile

    def profile_of(self, sides: Sides) -> DeviceProfile:
        """Return the profile for a route: of the device, or of the pair of GPUs. The first use looks it up."""
        if sides.route not in PEER_ROUTES:
            return self.profile
        if self._given_pair is not None:
            return self._given_pair
        peer = sides.peer
        found = self._pairs.get(peer)
        if found is None:
            from kvplan.cost.store import find_pair

            found = self._pairs[peer] = find_pair(self._resources.device.ordinal, peer)
        return found

    def groups(self, plan: Plan, *, by_layer: bool, beside_seconds: float | None = None) -> Cutting | None:
        """Return the groups of layers that a transfer is cut into; None if it is not by layers.

        Args:
            plan: the plan.
            by_layer: whether it is submitted by layers.
            beside_seconds: seconds of the compute that waits for the layers; None if they are not known.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        if not by_layer:
            return None
        limits = self._resources.limits
        return layer_groups(
            plan.nbytes,
            plan.units,
            len(plan.layers),
            limits.layer_groups,
            limits.layer_group_nbytes,
            limits.halved_nbytes,
            limits.halved_piece_nbytes,
            hiding=self._hiding(plan, beside_seconds),
        )

    def _hiding(self, plan: Plan, seconds: float | None) -> Hiding | None:
        """Return the compute that hides a plan's copies; None if no speed of such copies was measured."""
        if not seconds:
            return None
        sides = self._sides(plan)
        if sides.unserved or _ruled(plan, sides):
            return None
        return hiding_of(plan.nbytes, sides.route, self.profile_of(sides), seconds)

    def choose(self, plan: Plan, *, groups: Cutting | None = None) -> Choice:
        """Choose the path for a plan, before any bytes move.

        Args:
            plan: the plan.
            groups: groups of layers that the transfer is cut into; None if it is not by layers.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
            HostMemoryError: the path needs pinned memory, and some of the plan's memory is pageable.
            PathError: the path, or every path, cannot serve the plan.
        """
        name = self._resources.policy.path
        if name == "auto":
            return self._auto(plan, groups)
        sides = self._sides(plan)
        path = self._paths[name]
        refusal = _refusal(path, plan, sides) if sides.unserved else path.refuse(plan, sides)
        if refusal is not None:
            raise refusal[0](refusal[1])
        return Choice(path, None, bool(sides.pageable))

    def all(self, plan: Plan, groups: Cutting | None = None) -> list[cost.Candidate]:
        """Return every path with its predicted time: the path that ``auto`` takes first, refused paths last.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        sides = self._sides(plan)
        cut = self._cut(plan, groups)
        found = self._candidates(plan, sides, counted(plan) if cut is None else cut.counted(plan), cut)
        ruled = _ruled(plan, sides)
        return sorted(found, key=lambda one: one.path != ruled) if ruled else found

    def likely(self, plan: Plan, cuts: Sequence[Cutting] = ()) -> list[Path]:
        """Return the path of the policy. For ``auto``, return all paths that plans of other sizes may take.

        Args:
            plan: the plan.
            cuts: groups of layers that transfers are cut into.
        """
        chosen = self.choose(plan)
        if chosen.predicted is None:
            return [chosen.path]
        found = self.all(plan)
        for groups in cuts:
            found += self.all(plan, groups)
        return [self._paths[path] for path in dict.fromkeys(one.path for one in found if not one.refused)]

    def expected(self, plan: Plan, name: str, groups: Cutting | None = None) -> float | None:
        """Return the predicted seconds on the GPU of a plan by a path; None if no costs are measured for it."""
        if not plan.nbytes:
            return None
        with self._resources.device.current():
            sides = self._sides(plan)
        if _ruled(plan, sides) or sides.route not in ROUTES or name not in route_paths(sides.route):
            return None
        profile, policy, cut = self.profile_of(sides), self._resources.policy, self._cut(plan, groups)
        if cut is None:
            return cost.predict(name, total(sides.route, counted(plan)), profile, policy).seconds
        return in_sequence(name, cut.statistics(sides.route, cut.counted(plan)), profile, policy).seconds

    def check(self, name: str, plan: Plan) -> None:
        """Check that a path can serve a plan.

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
        self, plan: Plan, sides: Sides, counts: list[Counted], cut: LayerCut | None
    ) -> list[cost.Candidate]:  # fmt: skip
        """Return the candidates of a plan from its counts, or from those of its pieces if it is cut by layers."""
        found = {name: _refusal(path, plan, sides) for name, path in self._paths.items()}
        refused = {name: refusal[1] for name, refusal in found.items() if refusal is not None}
        if sides.unserved:  # such a plan may have a route without costs
            return [cost.Candidate(name, refused=refused[name]) for name in GPU_PATHS]
        profile, policy, route = self.profile_of(sides), self._resources.policy, sides.route
        if cut is not None:
            return candidates_by_layer(cut.statistics(route, counts), profile, policy, refused)
        return cost.candidates(total(route, counts), profile, policy, refused)

    def _cut(self, plan: Plan, groups: Cutting | None) -> LayerCut | None:
        """Return the run groups of a plan cut by layers, which are kept; None if its transfer is not cut."""
        if groups is None or groups.groups < 2 or not plan.nbytes:
            return None
        layouts = (id(layout) for pair in plan.layouts for layout in pair)
        key = groups, *layouts, *(id(part.group) for part in plan.moving)
        known = self._cuts.get(key)
        cut = LayerCut.of(plan, groups) if known is None else known[1]
        if known is None:
            self._keep(self._cuts, key, plan, cut)
        return cut if len(cut.pieces) > 1 else None

    def _sides(self, plan: Plan) -> Sides:
        """Describe the memory of a plan. The driver is called once for each pair of layouts.

        Raises:
            LayoutError: a destination is read-only, or addresses are not of this process.
        """
        if len(plan.layouts) > 1:
            return self._look(plan)
        src, dst = plan.layouts[0]
        key = (id(src), id(dst))
        known = self._known.get(key)
        if known is not None and known[0]() is src and known[1]() is dst:
            return known[2]
        sides = self._look(plan)
        if not sides.passing:
            forget = partial(self._known.pop, key)  # one C call: the dead reference is what it returns by default
            self._known[key] = (ref(src, forget), ref(dst, forget), sides)
        return sides

    def _look(self, plan: Plan) -> Sides:
        check_layouts(plan)
        facts = [self._resources.reach.facts(layout) for pair in plan.layouts for layout in pair]
        return sides_of(f"cuda:{self._resources.device.ordinal}", plan, facts)

    def _auto(self, plan: Plan, groups: Cutting | None) -> Choice:
        """Choose the path with the least predicted time; for memory that no kernel reaches, by a fixed rule.

        Plans with the same run groups, number of units and rounded merge counts share one decision. Merges are counted
        only if the path may depend on them: counting takes as long as moving a small plan. If a sample of many units
        shows that hardly any merge, the decision for such plans is taken. By layers, the number of units is rounded,
        too: such a decision takes longer than the submit, and every request of an engine has another number of units.
        """
        groups = groups if groups is not None and groups.groups > 1 else None
        unmerged: Any = plan.kind  # a key without merge counts
        apart: Any = None  # the key of plans whose units are scattered
        if unmerged is not None:
            if groups is not None:
                unmerged = *unmerged[:3], (groups, _rounded(unmerged[3]))
            known = self._decided.get(unmerged)
            if known is None and scattered(plan.parts[0].units):
                apart = (*unmerged, "scattered")
                known = self._decided.get(apart)
            if known is not None:
                return _scaled(known, plan)
        cut = self._cut(plan, groups)
        counts = counted(plan) if cut is None else cut.counted(plan)
        key: Any = None
        if unmerged is not None and cut is not None and not cut.merges:
            key = unmerged
        elif unmerged is not None:
            key = (*unmerged, *(_rounded(merged) for *_, counts_of in counts for merged in counts_of))
        elif groups or len(plan.parts) <= MOST_PARTS:
            layouts = (id(layout) for pair in plan.layouts for layout in pair)
            held = (id(part.group) for part in plan.moving)
            numbers = (
                (_rounded(units) if groups else units, *map(_rounded, merged)) for *_, units, _, merged in counts
            )
            key = (groups, *layouts, *held, *numbers)
        known = None if key is None else self._decided.get(key)
        if known is not None:
            choice = _scaled(known, plan)
            self._remember(apart, plan, choice)
            return choice
        sides = self._sides(plan)
        name = _ruled(plan, sides)
        if name:
            self._check(self._paths[name], plan, sides)
            choice = Choice(self._paths[name], None, bool(sides.pageable))
        else:
            best = self._best(plan, sides, counts, cut)
            choice = Choice(self._paths[best.path], best.seconds, bool(sides.pageable))
            depends = unmerged is not None and key is not unmerged  # on how many copies merge
            if depends and best.path == "kernel" and self._whatever_merges(plan, sides, counts, cut):
                key = unmerged
        if not sides.passing:
            self._remember(key, plan, choice)
            self._remember(apart, plan, choice)
        return choice

    def _remember(self, key: Any, plan: Plan, choice: Choice) -> None:
        """Keep a decision; without a key, do not."""
        if key is not None:
            self._keep(self._decided, key, plan, choice, plan.nbytes)

    def _keep(self, kept: dict[Any, Any], key: Any, plan: Plan, *values: object) -> None:
        """Keep values until a run group or a layout whose id is in their key is deleted."""
        if len(kept) >= self._resources.limits.decisions:
            kept.clear()
        forget = partial(kept.pop, key)  # one C call, before another object can get the id
        held = (*(part.group for part in plan.parts), *(layout for pair in plan.layouts for layout in pair))
        kept[key] = (tuple(ref(thing, forget) for thing in held), *values)

    def _whatever_merges(self, plan: Plan, sides: Sides, counts: list[Counted], cut: LayerCut | None) -> bool:
        """Return whether the kernel is the best path even if all copies of the other paths merge into one."""
        refused = [name for name, path in self._paths.items() if _refusal(path, plan, sides) is not None]
        profile, policy, route = self.profile_of(sides), self._resources.policy, sides.route
        if cut is not None:
            return kernel_wins_by_layer(cut.statistics(route, counts), profile, policy, refused)
        return cost.kernel_whatever_merges(total(route, counts), profile, policy, refused)

    def _best(self, plan: Plan, sides: Sides, counts: list[Counted], cut: LayerCut | None) -> cost.Candidate:
        every = self._candidates(plan, sides, counts, cut)
        if every[0].refused:
            if len({one.refused for one in every}) == 1:  # all paths have the same reason, which names them
                raise PathError(every[0].refused)
            reasons = "; ".join(f"{one.path}: {one.refused}" for one in every)
            raise PathError(f"no path serves this {plan.direction!r} plan: {reasons}")
        return every[0]


def _refusal(path: Path, plan: Plan, sides: Sides) -> Refusal | None:
    """Return why a path cannot serve a plan; None if it can."""
    if sides.unserved:
        reasons = "; ".join(f"{name}: {sides.unserved}" for name in GPU_PATHS)
        return PathError, f"no path serves this {plan.direction!r} plan: {reasons}"
    return path.refuse(plan, sides)


def _ruled(plan: Plan, sides: Sides) -> str:
    """Return the path of a plan for which no costs are measured; "" for every other plan."""
    if sides.passing or (sides.route in HOST_ROUTES and len(sides.devices) > 1):
        return "copy_engine"
    return "" if plan.nbytes else "kernel"


def _scaled(known: tuple[object, Choice, int], plan: Plan) -> Choice:
    """Return a decision for a plan, whose bytes may be a few more or less than those of the plan it was made for."""
    _, choice, nbytes = known
    if choice.predicted is None or nbytes == plan.nbytes:
        return choice
    return Choice(choice.path, choice.predicted * plan.nbytes / nbytes, choice.pageable)


def _rounded(count: int) -> int:
    """Round a count down to its first four binary digits: a few copies more or less do not change the choice of a path.

    >>> [_rounded(count) for count in (7, 15, 33, 1000)]
    [7, 15, 32, 960]
    """
    shift = max(count.bit_length() - 4, 0)
    return count >> shift << shift

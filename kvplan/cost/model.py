"""The cost model: it predicts the time of a plan on each path from a device profile. It touches no device.

The time of a path is linear: a fixed part, and a part for each unit of each run group. So the prices of a run group are
computed once, and a choice multiplies and adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, Beside, DeviceProfile, route_paths
from kvplan.cost.statistics import Counted, GroupFacts
from kvplan.errors import PathError

NS = 1e-9
# Of the candidates within 3 % of the best, the first in this order is taken, so that a calibration's noise does not
# change the choice. Paths whose time varies least with the sizes come first.
TIE, PREFERRED = 0.03, ("kernel", "staged", "copy_engine_2d", "copy_engine")
# Words per second of a Triton program (H200): they limit words of 1 and 2 bytes; memory and link limit wide words.
# Between the host and the GPU they are measured. The other routes have a conservative guess.
WORDS = {"load": 3.0e9, "store": 6.0e9, "device": 2.0e9, "push": 2.0e9, "pull": 2.0e9}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path, and its expected cost for a plan.

    Attributes:
        path: name of the path.
        seconds: seconds from the first to the last event on the GPU, without compute at the same time.
        wall: seconds from the call of submit until the caller knows the end, beside the compute that the policy names.
        compute_seconds: seconds that compute loses because of the path.
        refused: reason why the path cannot move the plan, or "".
    """

    path: str
    seconds: float = 0.0
    wall: float = 0.0
    compute_seconds: float = 0.0
    refused: str = ""

    @property
    def score(self) -> float:
        """Return the number by which candidates are compared: less is better."""
        return self.wall + self.compute_seconds


class Price(NamedTuple):
    """What a transfer costs before its first unit, or what one unit costs; see :class:`Candidate`."""

    seconds: float
    wall: float
    compute_seconds: float


class Prices:
    """The prices of one path for one route, by a profile and a policy.

    Args:
        path: name of a path in :data:`kvplan.cost.profile.TERMS`.
        route: a route of the profile.
        profile: profile of the device, or of the GPU and its peer.
        policy: policy with the compute beside the path, and the limits of the path.

    Raises:
        PathError: the profile has no costs of the route, or of the path for this route.
    """

    def __init__(self, path: str, route: str, profile: DeviceProfile, policy: Policy) -> None:
        if path not in profile.costs.get(route, ()):
            have = f"it has {', '.join(profile.costs) or 'none'}"
            raise PathError(f"the profile of {profile.kind} has no costs for route {route!r} by path {path!r}; {have}")
        self._path, self._route, self._profile, self._policy = path, route, profile, policy
        self._costs, self._beside = profile.costs[route][path], beside_of(path, route, profile, policy)
        self.fixed = Price(NS * self._costs.seconds["fixed"], NS * self._beside.wall["fixed"], 0.0)

    def unit(self, facts: GroupFacts) -> Price:
        """Return the price of one unit of a run group."""
        counts, terms, least = facts.terms[self._path], TERMS[self._path][1:], self._least(facts)
        seconds = max(total(counts, self._costs.seconds, terms), least)
        wall = max(total(counts, self._beside.wall, terms), least)
        return Price(seconds, wall, wall * (1 - 1 / max(self._beside.slower, 1.0)))

    def of(self, counts: Iterable[Counted]) -> Candidate:
        """Predict the cost of a plan."""
        units = [({self._path: self.unit(facts)}, units) for facts, units in counts]
        return Candidate(self._path, *summed(self.fixed, units, self._path))

    def _least(self, facts: GroupFacts) -> float:
        """Return the least seconds of a unit by the Triton programs of the policy; profiles have the default's."""
        most, processors = self._policy.max_programs, max(self._profile.multiprocessors, 1)
        if self._path == "staged" and most is not None:  # the kernel reads and writes all bytes within the GPU
            within = 2 * facts.nbytes * NS / max(self._profile.ceilings["memory"], 1e-9)
            return within * processors / min(most, processors)
        if self._path != "kernel":
            return 0.0
        programs = self._policy.kernel(self._route, processors).programs
        narrow = facts.nbytes / facts.alignment / (WORDS[self._route] * programs) if facts.alignment < 16 else 0.0
        shared = total(facts.terms["kernel"], self._costs.program, TERMS["kernel"][1:]) / programs if most else 0.0
        return max(narrow, shared)


def summed(fixed: Price, units: Iterable[tuple[Mapping[str, Price], int]], path: str) -> Price:
    """Return the price of a plan on a path: that before its first unit, and those of the units of each run group."""
    seconds, wall, compute = fixed
    for prices, count in units:
        each = prices[path]
        seconds += count * each[0]
        wall += count * each[1]
        compute += count * each[2]
    return Price(seconds, wall, compute)


def beside_of(path: str, route: str, profile: DeviceProfile, policy: Policy) -> Beside:
    """Return the costs of a path beside the compute that a policy names."""
    if policy.overlap == "idle":
        return Beside(profile.costs[route][path].wall, 1.0)
    return profile.beside[policy.overlap][route][path]


def features(path: str, counts: Iterable[Counted]) -> tuple[float, ...]:
    """Count each term of a path in a plan, in the order of :data:`kvplan.cost.profile.TERMS`."""
    each = [[units * count for count in facts.terms[path]] for facts, units in counts]
    return 1.0, *map(sum, zip(*each, strict=True))


def total(counts: Iterable[float], costs: Mapping[str, float], terms: Iterable[str]) -> float:
    """Return the seconds of a path: the sum of counts times costs."""
    return NS * sum(count * costs[term] for count, term in zip(counts, terms, strict=True))


def candidates(
    counts: Sequence[Counted], route: str, profile: DeviceProfile, policy: Policy,
    refused: Mapping[str, str] | None = None,
) -> list[Candidate]:  # fmt: skip
    """Compare all paths: the path to take is first, paths that cannot move the plan are last.

    Args:
        counts: counts of the plan; of a transfer by layers, those of all its groups of layers.
        route: route of the plan.
        profile: profile of the device, or of the GPU and its peer.
        policy: the policy; its ``path`` is not used.
        refused: paths that cannot move the plan, each with the reason.

    Raises:
        PathError: the profile has no costs for the plan's route.

    >>> from kvplan.cost.profile import default
    >>> terms = {"kernel": (1, 512), "copy_engine": (1, 0, 512), "copy_engine_2d": (1, 1, 512), "staged": (1, 0, 512)}
    >>> many = [(GroupFacts(512, 16, 512, terms), 2048)]
    >>> [candidate.path for candidate in candidates(many, "load", default(), Policy(), {"staged": "no"})]
    ['kernel', 'copy_engine', 'copy_engine_2d', 'staged']
    """
    refused = refused or {}
    paths = [path for path in PREFERRED if path in route_paths(route) and path not in refused]
    able = [Prices(path, route, profile, policy).of(counts) for path in paths]
    if able:
        first = able.pop(first_near([one.score for one in able]))
        able = [first, *sorted(able, key=lambda one: one.score)]
    return able + [Candidate(path, refused=refused[path]) for path in TERMS if path in refused]


def first_near(scores: Sequence[float]) -> int:
    """Return the position of the path to take, of at least one path in the order of :data:`PREFERRED`.

    >>> first_near([1.02, 1.5, 1.0])
    0
    """
    near, place = min(scores) * (1 + TIE), 0
    while scores[place] > near:
        place += 1
    return place

"""The cost model: it predicts the time of a plan on each path from a device profile. It touches no device."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from kvplan.cost.policy import BESIDE_COMPUTE, HOST_ROUTES, Policy
from kvplan.cost.profile import TERMS, Costs, DeviceProfile, route_paths
from kvplan.cost.statistics import Pieces, Statistics
from kvplan.errors import PathError

NS = 1e-9
# A second that compute loses counts as much as four seconds of transfer: compute is the caller's main work.
COMPUTE_WEIGHT = 4.0
# Of the candidates within 3 % of the best, the first in this order is taken, so that a calibration's noise does not
# change the choice. Paths whose time varies least with the sizes come first.
TIE, PREFERRED = 0.03, ("kernel", "staged", "copy_engine_2d", "copy_engine")
JOIN = 5e-6  # seconds for one stream to wait for another
# Words per second of a Triton program (H200): they limit words of 1 and 2 bytes; memory and link limit wide words.
# Between the host and the GPU they are measured. The other routes have a conservative guess, which counts at most one
# program per SM.
WORDS = {"load": 3.0e9, "store": 6.0e9, "device": 2.0e9, "push": 2.0e9, "pull": 2.0e9}
WIDE = 16  # bytes: the widest word of the kernel
# Seconds of the CPU for a run group beyond the first, on the kernel path: groups of one shape share a launch, and each
# has a table of its own.
EXTRA_GROUP = 3e-6
SM_WARPS = 24  # warps of the kernel that share an SM; launches beside compute have programs of fewer warps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path, and its expected cost for a plan.

    Attributes:
        path: name of the path.
        seconds: seconds from the first to the last event on the GPU, without compute at the same time.
        wall: seconds from the call of submit until the caller knows the end, beside the compute that the policy names.
        cpu_seconds: seconds from the call of submit until all work is issued.
        sm_share: share of the GPU's SMs that the path uses, averaged over its time.
        compute_seconds: seconds that compute loses because of the path.
        refused: reason why the path cannot move the plan, or "".
        groups: groups of layers that the transfer is cut into; 1 if it is not cut.
        first_group: seconds from the call of submit until the first group has arrived, like ``wall``; 0 if the transfer
            is not cut.
    """

    path: str
    seconds: float = 0.0
    wall: float = 0.0
    cpu_seconds: float = 0.0
    sm_share: float = 0.0
    compute_seconds: float = 0.0
    refused: str = ""
    groups: int = 1
    first_group: float = 0.0

    @property
    def lag(self) -> float:
        """Return how many seconds later the first group of layers arrives than its share of the whole time.

        Compute that takes as long for a group as the group takes to arrive ends so much later than the transfer.

        >>> round(Candidate("staged", wall=1.6e-3, groups=16, first_group=2.5e-4).lag * 1e6)
        150
        """
        return max(self.first_group - self.wall / self.groups, 0.0) if self.groups > 1 else 0.0

    @property
    def score(self) -> float:
        """Return the number by which candidates are compared: less is better."""
        return self.wall + self.lag + COMPUTE_WEIGHT * self.compute_seconds


def features(path: str, plan: Statistics) -> tuple[float, ...]:
    """Count each term of a path in a plan, in the order of :data:`kvplan.cost.profile.TERMS`."""
    if path == "kernel":
        return 1.0, plan.runs, plan.nbytes
    if path == "copy_engine":
        return 1.0, *_pieces(plan.copies)
    if path == "copy_engine_2d":
        single = plan.rowless.total
        return 1.0, plan.calls + single, plan.rows + single, plan.nbytes
    if path == "staged":
        return 1.0, plan.runs, *_pieces(plan.extents)
    raise PathError(f"path {path!r} has no cost model; those with one are {', '.join(TERMS)}")


def _pieces(pieces: Pieces) -> tuple[float, ...]:
    return pieces.small, pieces.small_nbytes, pieces.large, pieces.large_nbytes


def total(counts: Iterable[float], costs: Costs, terms: Iterable[str]) -> float:
    """Return the seconds of a path: the sum of counts times costs."""
    return NS * sum(count * costs[term] for count, term in zip(counts, terms, strict=True))


def predict(path: str, plan: Statistics, profile: DeviceProfile, policy: Policy) -> Candidate:
    """Predict the cost of one path for a plan.

    Args:
        path: name of a path in :data:`kvplan.cost.profile.TERMS`.
        plan: statistics of a plan, whose route is one of the profile's.
        profile: profile of the device, or of the GPU and its peer.
        policy: policy with the compute beside the path, and the limits of the path.

    Raises:
        PathError: the profile has no costs of the route, or of the path for this route.
    """
    check_route(plan.route, profile)
    counts = features(path, plan)
    if path not in profile.costs[plan.route]:
        able = ", ".join(profile.costs[plan.route])
        raise PathError(f"path {path!r} has no costs for route {plan.route!r}; those with costs are {able}")
    costs, terms = profile.costs[plan.route][path], TERMS[path]
    seconds, wall, cpu = (total(counts, some, terms) for some in (costs.seconds, costs.wall, costs.cpu))
    processors = max(profile.multiprocessors, 1)
    share = 0.0
    if path == "kernel":
        size = policy.kernel(plan.route, processors)
        slower = 0.0
        if size.programs != profile.programs[plan.route]:
            slower = _of_programs(counts, profile, plan.route, size.programs) - seconds
        slower = max(slower, _of_words(plan, size.programs, processors) - seconds)
        extra = EXTRA_GROUP * max(plan.groups - 1, 0)
        seconds, wall, cpu = seconds + slower, wall + slower + extra, cpu + extra
        seconds = max(seconds, 0.0)
        wall = max(wall, seconds)
        share = min(size.programs * min(size.warps / SM_WARPS, 1.0) / processors, 1.0)
    elif path == "staged" and seconds > 0:
        # A kernel on the SMs that the policy allows reads and writes all bytes once more within the GPU, while other
        # bytes cross the link.
        programs = min(policy.max_programs or processors, processors)
        within = 2 * plan.nbytes * NS / max(profile.ceilings["memory"], 1e-9)
        least = _of_words(plan, programs, processors)
        if programs < processors:
            least = max(least, within * processors / programs)
        slower = max(least - seconds, 0.0)
        seconds, wall = seconds + slower, wall + slower
        share = min(within / seconds, 1.0)
    cpu = min(cpu, wall)
    if policy.overlap == "idle":
        return Candidate(path, seconds, wall, cpu, share)
    beside = profile.beside[policy.overlap][plan.route][path]
    slow = max(1 + (beside.slower - 1) * _dose(path, plan.route, policy, processors), 1.0)
    wall = wall - seconds + seconds / beside.rate
    return Candidate(path, seconds, wall, cpu, share, seconds / beside.rate * max(1 - 1 / slow, 0.0))


def check_route(route: str, profile: DeviceProfile) -> None:
    """Check that a profile has costs of a route.

    Raises:
        PathError: it has none; the message names the route, the profile, and its routes.

    >>> from kvplan.cost.profile import default
    >>> check_route("push", default())
    Traceback (most recent call last):
        ...
    kvplan.errors.PathError: the profile of any GPU has no costs for route 'push'; it has load, store, device
    """
    if route not in profile.costs:
        have = ", ".join(profile.costs) or "none"
        raise PathError(f"the profile of {profile.kind} has no costs for route {route!r}; it has {have}")


def _of_programs(counts: tuple[float, ...], profile: DeviceProfile, route: str, programs: int) -> float:
    """Return the seconds of the kernel path: its Triton programs share the work, until link or memory is full."""
    one = profile.costs[route]["kernel"].program
    _, runs, nbytes = counts
    shared = NS * (runs * one["run"] + nbytes * one["byte"]) / programs
    return NS * one["fixed"] + max(shared, nbytes * NS / max(profile.ceilings[f"sm_{route}"], 1e-9))


def _of_words(plan: Statistics, programs: int, processors: int) -> float:
    """Return the least seconds that Triton programs need for narrow words; 0 if words are wide."""
    if plan.alignment >= WIDE:
        return 0.0
    if plan.route not in HOST_ROUTES:
        programs = min(programs, processors)
    return plan.nbytes / max(plan.alignment, 1) / (WORDS[plan.route] * programs)


def _dose(path: str, route: str, policy: Policy, processors: int) -> float:
    """Return the factor of compute's loss: the policy's Triton programs over the measured ones; 1 without a kernel."""
    if path != "kernel":
        return 1.0
    return policy.kernel(route, processors).programs / BESIDE_COMPUTE.kernel(route, processors).programs


def kernel_whatever_merges(plan: Statistics, profile: DeviceProfile, policy: Policy, refused: Container[str]) -> bool:
    """Return whether the kernel wins even if all copies of the other paths merge into one.

    The kernel's cost does not depend on merging. So if it wins, the copies need not be counted.

    Args:
        plan: statistics of the plan.
        profile: profile of the device.
        policy: the policy; its ``path`` is not used.
        refused: paths that cannot move the plan; never the kernel.

    >>> from kvplan.cost.profile import default
    >>> few, many = (Statistics("load", n << 12, 1, n, 16, Pieces.of(n, n << 12), n, n, Pieces(), Pieces(), 0)
    ...              for n in (4, 4096))
    >>> [kernel_whatever_merges(one, default(), Policy(), ("staged",)) for one in (few, many)]
    [True, False]
    """
    best = merged(plan)
    paths = [path for path in route_paths(plan.route) if path != "kernel" and path not in refused]
    others = (predict(path, best, profile, policy).score for path in paths)
    return predict("kernel", best, profile, policy).score <= min(others, default=math.inf) * (1 + TIE)


def merged(plan: Statistics) -> Statistics:
    """Return the statistics of a plan whose copies all merge into one, on every path that merges them."""
    return replace(plan, copies=plan.copies.as_one, extents=plan.extents.as_one)


def candidates(
    plan: Statistics, profile: DeviceProfile, policy: Policy, refused: Mapping[str, str] | None = None
) -> list[Candidate]:
    """Compare all paths: the path to take is first, paths that cannot move the plan are last.

    Args:
        plan: statistics of the plan.
        profile: profile of the device, or of the GPU and its peer.
        policy: the policy; its ``path`` is not used.
        refused: paths that cannot move the plan, each with the reason.

    Raises:
        PathError: the profile has no costs for the plan's route.

    >>> from kvplan.cost.profile import default
    >>> many = Statistics("load", 1 << 20, 1, 2048, 16, Pieces.of(2048, 1 << 20), 2048, 2048, Pieces(), Pieces(), 0)
    >>> [candidate.path for candidate in candidates(many, default(), Policy(), {"staged": "no"})]
    ['kernel', 'copy_engine', 'copy_engine_2d', 'staged']
    """
    check_route(plan.route, profile)
    refused = refused or {}
    able = [predict(path, plan, profile, policy) for path in route_paths(plan.route) if path not in refused]
    return ranked(able, refused)


def ranked(able: list[Candidate], refused: Mapping[str, str]) -> list[Candidate]:
    """Return candidates in order: the path to take first, then by score, and refused paths last.

    Args:
        able: candidates that can move the plan; sorted in place.
        refused: paths that cannot move it, each with the reason.
    """
    able.sort(key=lambda candidate: candidate.score)
    if able:
        near = [one for one in able if one.score <= able[0].score * (1 + TIE)]
        first = min(near, key=lambda one: PREFERRED.index(one.path))
        able.remove(first)
        able.insert(0, first)
    return able + [Candidate(path, refused=refused[path]) for path in TERMS if path in refused]

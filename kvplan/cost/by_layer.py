"""The cost of a transfer by layers: it moves pieces of a plan, one group of layers after another.

A piece has other statistics than the whole plan. Where the host keeps all layers of a block in one contiguous piece,
a group of layers has only a part of each, so the copy engine gets as many times more and shorter copies.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from kvplan.cost.model import JOIN, NS, TIE, Candidate, check_route, merged, predict, ranked
from kvplan.cost.policy import Hiding, Policy, layer_groups
from kvplan.cost.profile import GUESSED, DeviceProfile, route_paths
from kvplan.cost.statistics import Counted, Pieces, Statistics, count_part, facts_of, total
from kvplan.plan.descriptors import Part
from kvplan.plan.layers import Cutting, cut_groups
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# Seconds of the CPU to prepare a further group of layers: compiled code prepares all groups before the first is issued.
NEXT_GROUP = 3e-6
# Beside compute: seconds that the compute loses per second of issuing. The driver holds a lock during each call, and
# the model's own launches wait for the lock. Seen in whole engines whose prefill is bound by its launches (H200).
LAUNCHES_WAIT = 0.5


class LayerCut(NamedTuple):
    """The run groups of a plan, cut by layers. It holds no run group of the plan itself, and no units.

    Attributes:
        kinds: different run groups of some layers, each with the position in :attr:`Plan.moving` of the run group that
            it is cut from. Run groups of other layers whose pieces count the same are one kind.
        pieces: for each group of layers, positions in ``kinds``.
        merges: whether copies of different units can merge, so that the counts depend on which units a plan has.
    """

    kinds: tuple[tuple[int, RunGroup], ...]
    pieces: tuple[tuple[int, ...], ...]
    merges: bool

    @classmethod
    def of(cls, plan: Plan, cutting: Cutting | int) -> LayerCut:
        """Cut the run groups of a plan by layers, as the transfer will be cut."""
        positions = {part.group: position for position, part in enumerate(plan.moving)}
        kinds: dict[object, tuple[int, int, RunGroup]] = {}
        pieces = []
        for _, cuts in cut_groups(plan, cutting):
            piece = []
            for full, group in cuts:
                if full in positions:
                    alike = positions[full], *_signature(group, plan.direction)
                    piece.append(kinds.setdefault(alike, (len(kinds), positions[full], group))[0])
            if piece:
                pieces.append(tuple(piece))
        found = tuple((position, group) for _, position, group in kinds.values())
        return cls(found, tuple(pieces), any(_merges(group, plan.direction) for _, group in found))

    def counted(self, plan: Plan) -> list[Counted]:
        """Count the pieces of each kind after merging. The addresses of one layer's units stand for those of all.

        Args:
            plan: a plan with the run groups of the plan that was cut; its units are other ones.
        """
        skips = {part.group: skip for part, skip in zip(plan.parts, plan.skips, strict=True)}
        moving = plan.moving
        return [
            count_part(Part(group, moving[position].units), plan.direction, skips[moving[position].group])
            for position, group in self.kinds
        ]

    def statistics(self, route: str, counts: Sequence[Counted]) -> tuple[Statistics, ...]:
        """Return the statistics of each group of layers, in order, from the counts of all kinds."""
        known = {piece: total(route, [counts[kind] for kind in piece]) for piece in dict.fromkeys(self.pieces)}
        return tuple(known[piece] for piece in self.pieces)


def _merges(group: RunGroup, direction: str) -> bool:
    """Return whether copies of different units can merge: those of runs, or those of granules on the host.

    Units lie at multiples of a step, so granules touch only if the step divides their size.
    """
    facts = facts_of(group, direction)
    step = (group.src if direction == "load" else group.dst).step()
    return group.chainable or (facts.joinable and bool(step) and facts.granule_nbytes % step == 0)


def _signature(group: RunGroup, direction: str) -> tuple[object, ...]:
    """Return everything on which the statistics of a run group depend, besides its units."""
    return group.nbytes, group.alignment, group.chainable, facts_of(group, direction)


def hiding_of(nbytes: int, route: str, profile: DeviceProfile, seconds: float | None) -> Hiding | None:
    """Return the compute that hides the copies of a transfer by layers.

    Args:
        nbytes: bytes of the transfer.
        route: the route of its bytes.
        profile: profile of the device, or of the GPU and its peer.
        seconds: seconds of the compute; None if they are not known.

    Returns:
        The compute, or None: its seconds are not known, or the speed of the copies is a guess.

    >>> from dataclasses import replace
    >>> from kvplan.cost.profile import default
    >>> measured = replace(default(), how="calibrated")
    >>> hiding_of(24_000_000, "load", measured, 0.01), hiding_of(24_000_000, "load", default(), 0.01)
    (Hiding(seconds=0.01, copying=0.001), None)
    """
    if not seconds or profile.how == GUESSED:
        return None
    return Hiding(seconds, nbytes * NS / max(profile.ceilings[route], 1e-9))


def statistics_by_layer(plan: Plan, route: str = "", groups: Cutting | int | None = None) -> tuple[Statistics, ...]:
    """Count the pieces that each path would copy for each group of layers of a plan that is submitted ``by_layer``.

    Args:
        plan: the plan.
        route: the plan's route, by default its direction.
        groups: groups of layers, or their maximum number; by default those of an executor.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> made = statistics_by_layer(kvplan.compile(gpu, host).plan([1, 3], [3, 4]), groups=2)
    >>> [(one.nbytes, one.runs, one.copies.total) for one in made]
    [(4096, 4, 4), (4096, 4, 4)]
    """
    cut = LayerCut.of(plan, layer_groups(plan.nbytes, plan.units, len(plan.layers)) if groups is None else groups)
    return cut.statistics(route or plan.direction, cut.counted(plan))


def in_sequence(path: str, pieces: Sequence[Statistics], profile: DeviceProfile, policy: Policy) -> Candidate:
    """Predict the cost of one path for pieces of a plan that it moves one after another.

    A thread issues the pieces in order, while the GPU moves them. So a piece ends when the GPU has moved it after the
    piece before, but not before it is issued. Copies of the copy engine queue up, so later pieces take no time to
    begin. A launch of the kernel path begins when the launch before it has ended.

    Args:
        path: name of a path in :data:`kvplan.cost.profile.TERMS`.
        pieces: statistics of each piece, in order; at least one.
        profile: profile of the device, or of the GPU and its peer.
        policy: policy with the compute beside the path, and the limits of the path.

    Raises:
        PathError: the profile has no costs of the route, or of the path for this route.

    >>> from kvplan.cost.profile import default
    >>> piece = Statistics("load", 1 << 24, 1, 256, 16, Pieces.of(256, 1 << 24), 1, 256, Pieces(), Pieces(), 0)
    >>> one, four = (in_sequence("kernel", [piece] * count, default(), Policy()) for count in (1, 4))
    >>> one == predict("kernel", piece, default(), Policy()), four.groups, four.first_group < four.wall / 3
    (True, 4, True)
    """
    made = {piece: predict(path, piece, profile, policy) for piece in dict.fromkeys(pieces)}
    first, *later = (made[piece] for piece in pieces)
    if not later:
        return first
    route = pieces[0].route
    rate = 1.0 if policy.overlap == "idle" else profile.beside[policy.overlap][route][path].rate
    empty = predict(path, Statistics(route, 0, 0, 0, 16, Pieces(), 0, 0, Pieces(), Pieces(), 0), profile, policy)
    saved = {"kernel": 0.0, "copy_engine": empty.seconds - JOIN}.get(path, empty.seconds)
    moving = [max(one.seconds - saved, 0.0) for one in later]
    issuing = [max(one.cpu_seconds - empty.cpu_seconds, 0.0) for one in later]
    issued = first.cpu_seconds + NEXT_GROUP * len(later)
    before = first.wall - first.seconds / rate + NEXT_GROUP * len(later)
    wall = _end(before + first.seconds / rate, issued, [one / rate for one in moving], issuing)
    seconds = _end(before + first.seconds, issued, moving, issuing) - before
    shares = sum(one.sm_share * took for one, took in zip((first, *later), (first.seconds, *moving), strict=True))
    lost = first.compute_seconds / max(first.seconds, 1e-12) * (first.seconds + sum(moving))
    if policy.overlap != "idle":
        lost += LAUNCHES_WAIT * (issued + sum(issuing))
    return Candidate(
        path, seconds, wall, min(issued + sum(issuing), wall), shares / max(seconds, 1e-12), lost,
        groups=len(pieces), first_group=before + first.seconds / rate,
    )  # fmt: skip


def _end(end: float, issued: float, moving: Sequence[float], issuing: Sequence[float]) -> float:
    """Return the end of the last piece, from the end and the issue of the first and the seconds of each later piece.

    >>> _end(10.0, 1.0, [5.0, 5.0], [1.0, 1.0]), _end(10.0, 1.0, [5.0, 5.0], [20.0, 1.0])
    (20.0, 26.0)
    """
    for gpu, cpu in zip(moving, issuing, strict=True):
        issued += cpu
        end = max(end + gpu, issued)
    return end


def candidates_by_layer(
    pieces: Sequence[Statistics], profile: DeviceProfile, policy: Policy, refused: Mapping[str, str] | None = None,
) -> list[Candidate]:  # fmt: skip
    """Compare all paths for a transfer by layers, as :func:`kvplan.cost.model.candidates` does for an uncut transfer.

    Args:
        pieces: statistics of each group of layers, in order; at least one.
        profile: profile of the device, or of the GPU and its peer.
        policy: the policy; its ``path`` is not used.
        refused: paths that cannot move the plan, each with the reason.

    Raises:
        PathError: the profile has no costs for the plan's route.

    >>> from kvplan.cost.profile import default
    >>> piece = Statistics("load", 1 << 24, 1, 256, 16, Pieces.of(256, 1 << 24), 1, 256, Pieces(), Pieces(), 0)
    >>> [(one.path, one.groups) for one in candidates_by_layer([piece] * 4, default(), Policy(), {"staged": "no"})]
    [('kernel', 4), ('copy_engine_2d', 4), ('copy_engine', 4), ('staged', 1)]
    """
    check_route(pieces[0].route, profile)
    refused = refused or {}
    paths = [path for path in route_paths(pieces[0].route) if path not in refused]
    able = [in_sequence(path, pieces, profile, policy) for path in paths]
    return ranked(able, refused)


def kernel_wins_by_layer(
    pieces: Sequence[Statistics], profile: DeviceProfile, policy: Policy, refused: Container[str]
) -> bool:
    """Return whether the kernel wins even if all copies of each piece merge into one, on every other path.

    It is :func:`kvplan.cost.model.kernel_whatever_merges` for a transfer by layers.
    """
    best = [merged(piece) for piece in pieces]
    paths = [path for path in route_paths(best[0].route) if path != "kernel" and path not in refused]
    others = (in_sequence(path, best, profile, policy).score for path in paths)
    return in_sequence("kernel", best, profile, policy).score <= min(others, default=math.inf) * (1 + TIE)

"""Slots of this process's ring for its peers: those with use for more get free ones, or ones that others return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvplan.agents.packed.pack_lane import PATIENCE, Lane
from kvplan.agents.packed.slot_ring import RingSlot

LEAST_SENDS, MOST_SENDS = 3, 16  # slots to gather into by default, if there are so many
MOST_SHARE = 16  # slots of a peer by default
LEAST_GRANT = 3  # slots that a peer with transfers gets, if there are so many, though others lose their last one


def slots_to_gather(slots: int) -> int:
    """Return how many slots of a ring its owner gathers into, by default.

    >>> [slots_to_gather(slots) for slots in (2, 8, 16, 64)]
    [1, 3, 5, 16]
    """
    return min(max(min(LEAST_SENDS, slots // 2), slots // 3), MOST_SENDS)


def most_to_gather(sends: int, lanes: int) -> int:
    """Return how many of the slots to gather into one lane has at most: a slow peer leaves some to the others.

    Args:
        sends: slots to gather into.
        lanes: number of all lanes. One that is alone leaves one slot for a peer that may come, if there are over three.

    >>> [(most_to_gather(sends, 1), most_to_gather(sends, 2)) for sends in (1, 3, 8, 16)]
    [(1, 1), (3, 3), (7, 6), (15, 11)]
    """
    left = 1 if lanes == 1 else sends // 3
    return min(sends, max(LEAST_SENDS, sends - left))


def most_of_a_peer(usable: int, granted: int | None = None) -> int:
    """Return how many slots one peer has at most: not all, since a peer that stops returns none.

    Args:
        usable: slots that peers may write.
        granted: most slots of a peer; None for the default.

    >>> most_of_a_peer(5), most_of_a_peer(48), most_of_a_peer(48, 20)
    (4, 16, 20)
    """
    return min(granted or MOST_SHARE, max(1, usable - 1))


class Share(NamedTuple):
    """The state of a ring that is shared.

    Attributes:
        usable: number of slots for peers.
        most: most slots of a peer.
        take: takes at most so many free slots.
        now: the time, in seconds.
    """

    usable: int
    most: int
    take: Callable[[int], list[RingSlot]]
    now: float


def share(lanes: Sequence[Lane], state: Share) -> bool:
    """Grant slots to peers that have use for more, and recall slots of others if too few are free.

    Peers with transfers have equal parts of the ring. Others keep what they have until it is needed, so that their next
    transfer begins at once.

    Args:
        lanes: lanes that are open.
        state: the ring.

    Returns:
        Whether anything was granted or recalled.
    """
    short = [lane for lane in lanes if lane.short]
    if not short:
        return False
    users = [lane for lane in lanes if lane.wants or lane.receiver.inbounds]
    idle = [lane for lane in lanes if lane not in users]
    due = max(1, state.usable // len(users))
    changed, missing, first = False, 0, 0
    for lane in sorted(short, key=lambda one: (_held(one), one.since)):
        room = min(lane.wants, due, state.most) - _held(lane)
        if room > 0:
            got = state.take(room)
            if got:
                lane.grant(got)
                changed = True
            missing += room - len(got)
            first += max(0, min(room - len(got), LEAST_GRANT - _held(lane)))
    coming = sum([len(lane.receiver.recalled) for lane in lanes if state.now - lane.recalled_at <= PATIENCE])
    recalled = _recall(idle, 1, missing - coming)
    recalled += _recall(users, due, missing - coming - recalled)
    recalled += _recall(idle, 0, first - coming - recalled)
    if missing and not coming and not recalled and not all(map(_held, short)):
        # More peers have transfers than there are slots: they take turns, and each writes at least once, if it can.
        through = [lane for lane in users if lane.receiver.used or (_held(lane) and state.now - lane.since > PATIENCE)]
        oldest = min(through, key=lambda lane: lane.since, default=None)
        recalled += 0 if oldest is None else _recall([oldest], _held(oldest) - 1, 1)
    return changed or recalled > 0


def _held(lane: Lane) -> int:
    return len(lane.receiver.granted)


def _recall(lanes: Iterable[Lane], keep: int, count: int) -> int:
    """Recall at most ``count`` slots, one by one of the lane that has most; each keeps ``keep``. Return how many."""
    left = {lane: _held(lane) - len(lane.receiver.recalled) for lane in lanes}
    found: dict[Lane, int] = {}
    while left and sum(found.values()) < count:
        lane = max(left, key=lambda one: left[one])
        if left[lane] <= keep:
            break
        left[lane] -= 1
        found[lane] = found.get(lane, 0) + 1
    for lane, slots in found.items():
        lane.recall(slots)
    return sum(found.values())

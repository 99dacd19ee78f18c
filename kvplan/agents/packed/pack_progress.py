"""Progress of an end: one thread at a time takes what has arrived, and moves all lanes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvplan.agents.packed.pack_lane import Lane
from kvplan.agents.packed.pack_peers import Peers
from kvplan.base.process import check_process, generation


class _Poll:
    """A call of :meth:`End.poll` that has not returned."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False


class Progress:
    """Makes progress, whichever thread calls :meth:`poll`.

    Args:
        peers: the lanes.
        arrivals: called first; it puts the notes that have come into the inbox.
        now: clock, in seconds.

    Attributes:
        calls: calls for the thread that polls. An interrupted call comes again.
        inbox: notes that have come, as (peer, note).
    """

    def __init__(self, peers: Peers, arrivals: Callable[[], object], now: Callable[[], float]) -> None:
        self.calls: deque[Callable[[], object]] = deque()
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._peers, self._arrivals, self._now = peers, arrivals, now
        self._lock = threading.RLock()  # a signal handler in the same thread may take it again
        self._polls: _Poll | None = None  # the call that polls
        self._turns = 0
        self._broken = False
        self._settled = False  # whether a further step changes something only if a note comes, or something ends
        self._generation = generation()

    @property
    def busy(self) -> bool:
        """Whether there is work, or a transfer is in flight."""
        return bool(self.calls or self.inbox) or any(lane.busy for lane in self._peers.every)

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything changed.

        If another thread polls, or this one does so already, it returns False at once. If a signal handler raises an
        error meanwhile, all transfers in flight fail, and the lanes begin anew.
        """
        check_process(self._generation)
        mine = _Poll()
        try:
            with self._lock:
                if self._polls is not None and not self._polls.over:
                    return False
                self._polls = mine
            if self._broken:
                self._mend()
            try:
                return self._step()
            except BaseException:
                self._broken = True
                raise
        finally:
            mine.over = True  # no interrupt comes before this

    def _step(self) -> bool:
        self._arrivals()
        changed = False
        settled, self._settled = self._settled, False  # an interrupt may come
        while self.calls:
            changed = True
            self.calls[0]()
            self.calls.popleft()  # last: an interrupt may come between; each call may come twice
        while self.inbox:
            changed = True  # other threads may add a note at any time
            self._peers.hear(*self.inbox[0])
            self.inbox.popleft()
        if changed:
            for lane in self._peers.every:  # first of all: what has come waits for nothing else
                lane.receiver.scatter()
        lanes = [lane for lane in self._peers.every if lane.waits]
        if not lanes:
            return changed
        now = self._now()
        stirred = [lane for lane in lanes if lane.look(now)]
        if (
            settled
            and not changed
            and not stirred
            and not (len(self._peers.every) > 1 and any(lane.short for lane in lanes))
        ):
            self._settled = True  # nothing came, nothing has ended, and no peer has slots that another one waits for
            return False
        if len(lanes) > 1:  # another lane is the first to get slots
            self._turns += 1
            first = self._turns % len(lanes)
            lanes = lanes[first:] + lanes[:first]
        for lane in lanes:
            changed |= lane.step(now)
        changed |= self._peers.share()
        written = False
        for lane in lanes:
            if lane.sender.together:  # a GPU has gathered it; the next submit would keep the wire waiting
                changed |= lane.sender.step()
        changed |= _begin(lanes, now)  # gather before a write of host memory, which may block
        for lane in lanes:
            if not lane.sender.together:
                written |= lane.sender.step()
        if written:
            changed = True
            _begin(lanes, now)
        for lane in lanes:
            lane.tell()
        if any(lane.why is not None for lane in lanes):
            self._peers.drop()
        else:
            self._settled = True
        return changed

    def _mend(self) -> None:
        """Begin anew on all lanes after a step was interrupted."""
        self._peers.restart("progress was interrupted; the destination may still change")
        self._broken = False


def _begin(lanes: list[Lane], now: float) -> bool:
    """Gather chunks while there are slots, those of high priority first; return whether any has begun."""
    began = False
    senders = [lane.sender for lane in lanes if lane.sender.waits]
    for urgent in (True, False) if senders else ():
        if not urgent and any(sender.held for sender in senders):
            break
        for sender in senders:
            began |= sender.begin(now, urgent=urgent)
    return began

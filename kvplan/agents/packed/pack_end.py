"""This process's end of packed transfers: its ring, the lanes to its peers, and who makes progress."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from kvplan.agents.packed.pack_lane import Lane, Own
from kvplan.agents.packed.pack_messages import LEAST_NOTE, MAGIC
from kvplan.agents.packed.pack_rows import Mover, pieces_of, readies_of
from kvplan.agents.packed.pack_transfer import PackedTransfer, Wish
from kvplan.agents.packed.slot_ring import SlotRing
from kvplan.agents.packed.wire import Wire
from kvplan.base.integers import integer
from kvplan.base.latch import Wake
from kvplan.base.process import check_process, generation
from kvplan.base.threads import Worker
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.executor import PRIORITIES
from kvplan.execute.stats import ExecutorStats, Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import Memory

MOST_ATTEMPTS = 1000  # of a chunk's write
BUSY_SECONDS, IDLE_SECONDS = 20e-6, 1e-3  # between two polls of the thread, with and without work
LEFT = "the peer was forgotten, or this end was closed"


class _Frame:
    """An object that lives as long as the call that made it."""

    __slots__ = ("__weakref__",)


class End:
    """This process's end of packed transfers, with one ring.

    Progress is made by :meth:`poll`, and by every wait for a transfer; or by a thread after :meth:`start`. Any thread
    may call the methods. One of them polls at a time, and no lock is held while it submits plans.

    Args:
        name: name of this process.
        memory: memory of the ring, which peers can write.
        slot_nbytes: bytes of a slot; a multiple of 256. A chunk has at most as many.
        executor: moves bytes between the ring and the layouts.
        arrivals: called at every poll; it gives the notes that have come to :meth:`take`.
        sending: slots to gather into; the other slots are for peers. By default a third of the slots, and at least one.
        granted: slots for each peer; by default a third of those for peers, at least 3 if there are so many.
        now: clock, in seconds.

    Attributes:
        name: as given.
        ring: the slots.
        tally: sums over all transfers.
        threaded: whether a thread makes progress.

    Raises:
        LayoutError: the ring has less than two slots.

    >>> import numpy as np, kvplan
    >>> pool = np.zeros(1 << 16, np.uint8)
    >>> with kvplan.Executor() as executor:
    ...     end = End("decode-0", Memory(pool.ctypes.data, pool.nbytes, "cpu", pool), 4096, executor, lambda: None)
    ...     end.poll(), end.take("prefill-0", b"a note of a user"), end.notes()
    (False, False, [])
    >>> end.close()
    """

    def __init__(
        self, name: str, memory: Memory, slot_nbytes: int, executor: Mover, arrivals: Callable[[], object], *,
        sending: int | None = None, granted: int | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = name
        self.ring = SlotRing(memory, slot_nbytes)
        self.tally = Tally()
        slots = len(self.ring.slots)
        if slots < 2:
            raise LayoutError(f"a ring of {slots} slots; give memory for at least two, to gather into and to receive")
        sends = min(max(1, slots // 3), 16) if sending is None else sending
        integer("sending", sends, least=1, most=slots - 1)
        self._sends = self.ring.take(sends)
        self._all_sends = tuple(self._sends)
        self._granted = min(max(3, (slots - sends) // 3), 16) if granted is None else granted
        self._own = Own(self.ring, self._sends, executor, now, self._number)
        self._arrivals, self._now = arrivals, now
        self._lock = threading.RLock()  # of lanes, slots and numbers; never held while something is submitted
        self._last_number = 0
        self._lanes: dict[str, Lane] = {}
        self._old: list[Lane] = []  # lanes that are closed, but may still use their slots
        self._calls: deque[Callable[[], object]] = deque()  # for the thread that polls
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._notes: deque[tuple[str, bytes]] = deque()
        self._poller: weakref.ref[_Frame] | None = None
        self._broken = self._closed = self._stopped = False
        self._generation = generation()
        self._wake: Wake = SimpleQueue()
        self._thread = Worker("kvplan-packed", self._serve, "no thread moves packed transfers", set())

    @property
    def threaded(self) -> bool:
        """Whether a thread makes progress."""
        return self._thread.started and not self._stopped

    @property
    def sending(self) -> int:
        """Number of slots to gather into."""
        return len(self._all_sends)

    @property
    def busy(self) -> bool:
        """Whether there is work, or a peer is waited for."""
        return bool(self._calls) or any(lane.busy for lane in self._every())

    # ---- peers -------------------------------------------------------------------------------------------------------

    def add(self, peer: str, wire: Wire, offered: Mapping[str, KVLayout] | Sequence[KVLayout]) -> None:
        """Greet a peer; the lane to an earlier peer of that name ends as lost.

        Args:
            peer: name of the peer.
            wire: the wire to it.
            offered: layouts of this process that the peer may read and write.

        Raises:
            PathError: all slots are taken, or a note of the wire is too short.
            TransferError: this end is closed.
        """
        if wire.most_note < LEAST_NOTE:
            raise PathError(f"a note of the wire has {wire.most_note} bytes; it has at least {LEAST_NOTE}")
        layouts = list(offered.values()) if isinstance(offered, Mapping) else offered
        with self._lock:
            self._check_open()
            if peer in self._lanes:
                self.lost(peer, "another peer of its name was met")
            lane = Lane(peer, wire, Offered(layouts), self._own, self.ring.take(self._granted))
            self._lanes[peer] = lane
        self.wake()

    def take(self, peer: str, note: bytes) -> bool:
        """Take a note of a peer; return False if it is a user's. Any thread may call it, also within a poll."""
        if not note.startswith(MAGIC):
            return False
        self._inbox.append((peer, bytes(note)))
        return True

    def lost(self, peer: str, why: str) -> None:
        """End the lane to a peer that is gone: its transfers fail, and its slots have other uses."""
        with self._lock:
            lane = self._lanes.pop(peer, None)
            if lane is not None:
                self._old.append(lane)
                lane.why = lane.why or why
            left = [one for one in self._old if one.name == peer]
        for one in left:
            self._calls.append(lambda one=one: one.lost(why))  # type: ignore[misc]
        self.wake()

    def forget(self, peer: str) -> None:
        """End the lane to a peer that lives: its transfers fail, and it is told.

        Its slots have other uses once the peer has answered that it writes no more.
        """
        with self._lock:
            lane = self._lanes.pop(peer, None)
            if lane is not None:
                self._old.append(lane)
                self._calls.append(lambda: lane.leave(LEFT))
        self.wake()

    def in_flight(self, peer: str) -> int:
        """Return the number of this process's transfers with a peer that have not ended."""
        return sum(lane.starts.in_flight for lane in self._every() if lane.name == peer)

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes of pushes that have ended since the last call, as (peer, note)."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._notes.popleft())
        return found

    def stats(self) -> ExecutorStats:
        """Return the sums of this end's transfers so far; see :meth:`kvplan.Executor.stats`."""
        return self.tally.stats()

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def submit(
        self, peer: str, plan: Plan, *, reading: bool, note: bytes = b"", after: Any = None,
        deadline: float | None = None, by_layer: bool = False, priority: str = "normal", attempts: int = 1,
    ) -> PackedTransfer:  # fmt: skip
        """Begin a transfer, and return at once.

        A transfer that waits for its ``after=`` does not delay the others.

        Args:
            peer: name of the peer.
            plan: a plan between layouts of this process and layouts of the peer.
            reading: whether it reads from the peer; otherwise it writes.
            note: note for the peer, which gets it after the last byte. Notes come in the order in which the transfers
                of their priority began. A transfer that reads has none.
            after: a stream, an event, a Transfer, or None: the transfer begins when this has completed. For a push by
                layer, also a mapping from numbers of layers to such objects: each group of layers is sent when those
                of its layers have completed. An event of CUDA that is not recorded yet counts as completed.
            deadline: seconds until the transfer is given up.
            by_layer: whether layers arrive in their order; see :meth:`kvplan.Transfer.wait_layer`.
            priority: ``"high"`` or ``"normal"``; chunks of high priority are sent first.
            attempts: how often a chunk's write is posted, at most.

        Raises:
            KVPlanError: an argument is wrong.
            TransferError: there is no such peer, or this end is closed.
        """
        lane = self._lanes.get(peer)
        self._check_open()
        if lane is None:
            raise TransferError(f"{self.name!r} has no packed transfers with {peer!r}")
        if priority not in PRIORITIES:
            raise KVPlanError(f"priority is {priority!r}; give 'high' or 'normal'")
        if reading and note:
            raise KVPlanError("a note goes with a transfer that writes; send a note by itself after a packed read")
        if isinstance(after, Mapping) and (reading or not by_layer):
            raise KVPlanError("after is a mapping of layers; give it with by_layer=True, and to write")
        integer("attempts", attempts, least=1, most=MOST_ATTEMPTS, error=KVPlanError)
        ready, after_layers = readies_of(plan, after)
        wish = Wish(plan, peer, reading, note, attempts, deadline, priority == "high")
        transfer = PackedTransfer(
            wish, self, self._now,
            lambda nbytes: pieces_of(plan, nbytes, ready, by_layer=by_layer, after_layers=after_layers),
        )  # fmt: skip
        if lane.chunk_nbytes:
            transfer.make(lane.chunk_nbytes)
        lane.take(transfer)
        if self.threaded:
            self.wake()
        else:
            self.poll()
        return transfer

    # ---- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything changed.

        If another thread polls, or this one does so already, it returns False at once. If a signal handler raises an
        error meanwhile, all transfers in flight fail, and the lanes begin anew.
        """
        check_process(self._generation)
        frame = _Frame()
        try:
            with self._lock:
                poller = self._poller
                if poller is not None and poller() is not None:
                    return False
                self._poller = weakref.ref(frame)
            if self._broken:
                self._mend()
            try:
                return self._step()
            except BaseException:
                self._broken = True
                raise
        finally:
            with self._lock:
                if self._poller is not None and self._poller() is frame:
                    self._poller = None

    def _step(self) -> bool:
        self._arrivals()
        changed = bool(self._calls or self._inbox)
        while self._calls:
            self._calls.popleft()()
        lanes = self._every()
        while self._inbox:
            peer, note = self._inbox.popleft()
            for lane in lanes:
                if lane.name == peer:
                    lane.hear(note)
        now = self._now()
        for urgent in (True, False):
            for lane in lanes:
                changed |= lane.sender.begin(now, urgent=urgent)  # gather before a write, which may block
        for lane in lanes:
            changed |= lane.step(now)
            while lane.notes:
                self._notes.append((lane.name, lane.notes.popleft()))
        for urgent in (True, False):
            for lane in lanes:
                changed |= lane.sender.begin(now, urgent=urgent)
        if self._old or any(lane.why is not None for lane in lanes):
            self._drop()
        elif len(lanes) > 1:
            self._turn()
        return changed

    def _every(self) -> list[Lane]:
        with self._lock:
            return [*self._lanes.values(), *self._old]

    def _turn(self) -> None:
        """Let another lane be the first to get slots."""
        with self._lock:
            for peer in list(self._lanes)[:1]:
                self._lanes[peer] = self._lanes.pop(peer)

    def _drop(self) -> None:
        """Take the slots of lanes back where nothing moves any more."""
        with self._lock:
            for peer, lane in list(self._lanes.items()):
                if lane.why is not None:
                    self._old.append(self._lanes.pop(peer))
            for lane in [one for one in self._old if one.over]:
                self._old.remove(lane)
                self.ring.give(lane.granted)

    def _mend(self) -> None:
        """Begin anew on all lanes after a step was interrupted."""
        lanes = self._every()
        for lane in lanes:
            lane.restart("progress was interrupted; the destination may still change")
        used = set().union(*(lane.sender.slots() for lane in lanes)) if lanes else set()
        self._sends[:] = [slot for slot in self._all_sends if slot.number not in used]
        self._broken = False

    def start(self) -> None:
        """Let a thread make progress from now on; raise TransferError if the system cannot start one."""
        self._check_open()
        if not self._thread.started:
            self._thread.start()

    def wake(self) -> None:
        """Let the thread poll now."""
        if self._thread.started:
            self._wake.put(None)

    def _serve(self) -> None:
        while not self._stopped:
            changed = self.poll()
            if changed:
                continue
            busy = any(lane.busy for lane in self._every())
            with suppress(Empty):
                self._wake.get(timeout=BUSY_SECONDS if busy else IDLE_SECONDS)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Forget all peers, and wait until nothing moves in the ring.

        Raises:
            TransferError: a peer has not said in time that its writes have ended, so that they may still move; or a
                chunk still moves here. Another call waits again.
        """
        if self._generation != generation():
            return
        self._closed = True
        for peer in list(self._lanes):
            self.forget(peer)
        end = time.monotonic() + timeout
        while (self._old or self._lanes) and time.monotonic() < end:
            if self.threaded or not self.poll():
                time.sleep(BUSY_SECONDS)
        left = [lane.name for lane in self._every()]
        if not left:
            self._stopped = True
            self.wake()
            self._thread.join(timeout)
            return
        raise TransferError(
            f"{self.name!r} closes, and writes of {', '.join(map(repr, left))} may still move in its ring"
        )

    def _check_open(self) -> None:
        check_process(self._generation)
        if self._closed:
            raise TransferError(f"the packed transfers of {self.name!r} are closed")

    def _number(self) -> int:
        with self._lock:
            self._last_number = max(self._last_number + 1, time.time_ns())
            return self._last_number

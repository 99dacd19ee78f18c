"""This process's end of packed transfers: its ring, the lanes to its peers, and who makes progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvplan.agents.packed.pack_jobs import Job
from kvplan.agents.packed.pack_lane import Lane
from kvplan.agents.packed.pack_messages import LEAST_NOTE, MAGIC, MOST_GRANT
from kvplan.agents.packed.pack_peers import Peers, ending
from kvplan.agents.packed.pack_progress import Progress
from kvplan.agents.packed.pack_rows import Mover, pieces_of, readies_of
from kvplan.agents.packed.pack_sharing import slots_to_gather
from kvplan.agents.packed.pack_starts import LEG_UNITS
from kvplan.agents.packed.pack_transfer import Inbound, PackedTransfer, Wish
from kvplan.agents.packed.slot_ring import Own, SlotRing
from kvplan.agents.packed.wire import Wire
from kvplan.base.integers import integer
from kvplan.base.process import check_process, generation
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.executor import PRIORITIES
from kvplan.execute.stats import ExecutorStats, Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import Memory

MOST_ATTEMPTS = 1000  # of a chunk's write
CLOSE_NAP = 20e-6  # seconds between two polls of a close
LEFT = "the peer was forgotten, or this end was closed"


def _nothing() -> bool:
    return False


class End:
    """This process's end of packed transfers, with one ring.

    Progress is made by :meth:`poll`: the owner's thread or an engine's step calls it, and so does every wait for a
    transfer, unless a thread polls. Any thread may call the methods. One of them polls at a time, and no lock is held
    while it submits plans.

    Args:
        name: name of this process.
        memory: memory of the ring, which peers can write.
        slot_nbytes: bytes of a slot; a multiple of 256. A chunk has at most as many.
        executor: moves bytes between the ring and the layouts.
        arrivals: called at every poll; it gives the notes that have come to :meth:`take`.
        sending: slots to gather into; the other slots are for peers. By default a third of the slots, at least 3 if
            there are so many, and at most 16.
        granted: slots for each peer, at most 48. By default a new peer gets a third of those that are free, at least 3
            and at most 16, if there are so many. Peers with transfers get more on demand, which others return.
        now: clock, in seconds.
        threaded: returns whether a thread of the owner polls, so that waits sleep.
        wake: called when there is something to do, so that the thread polls now.
        tally: sums to which transfers are added; by default those of this end alone.
        together: whether one submit copies several chunks, if they wait. By default, a GPU's ring has this: a submit
            takes as long as the GPU copies a chunk. On the CPU, the wire waits for the first chunk only.
        leg_units: an order of more units is told in legs of at most so many, and its transfer begins with the first.

    Attributes:
        name: as given.
        ring: the slots.
        tally, wake: as given.

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
        threaded: Callable[[], bool] = _nothing, wake: Callable[[], object] = _nothing, tally: Tally | None = None,
        together: bool | None = None, leg_units: int = LEG_UNITS,
    ) -> None:  # fmt: skip
        self.name, self.wake = name, wake
        self.ring = SlotRing(memory, slot_nbytes)
        self.tally = Tally() if tally is None else tally
        slots = len(self.ring.slots)
        if slots < 2:
            raise LayoutError(f"a ring of {slots} slots; give memory for at least two, to gather into and to receive")
        sends = slots_to_gather(slots) if sending is None else sending
        free = self.ring.take(integer("sending", sends, least=1, most=slots - 1))
        self._notes: deque[tuple[str, bytes]] = deque()
        senders = frozenset(slot.number for slot in free)
        if granted is not None:
            integer("granted", granted, least=1, most=MOST_GRANT)
        together = memory.device != "cpu" if together is None else together
        own = Own(self.ring, free, senders, executor, now, self._number, self._notes, together, leg_units)
        self._own, self._peers = own, Peers(own, granted)
        self._progress = Progress(self._peers, arrivals, now)
        self._threaded = threaded
        self._lock = threading.RLock()  # of the last number
        self._last_number = 0
        self._generation = generation()

    @property
    def threaded(self) -> bool:
        """Whether a thread of the owner polls."""
        return self._threaded()

    @property
    def sending(self) -> int:
        """Number of slots to gather into."""
        return len(self._own.senders)

    @property
    def busy(self) -> bool:
        """Whether there is work, or a transfer is in flight. Peers that are greeted, or that leave, need slow polls."""
        return self._progress.busy

    # ---- peers -------------------------------------------------------------------------------------------------------

    def add(self, peer: str, wire: Wire, offered: Mapping[str, KVLayout] | Sequence[KVLayout] | Offered) -> None:
        """Greet a peer; the lane to an earlier peer of that name ends as lost.

        Args:
            peer: name of the peer.
            wire: the wire to it. The end closes it after the peer is lost or forgotten, once nothing moves any more.
            offered: layouts of this process that the peer may read and write; an :class:`Offered` can change them.

        Raises:
            PathError: a note of the wire is too short.
            TransferError: this end is closed.
        """
        if wire.most_note < LEAST_NOTE:
            raise PathError(f"a note of the wire has {wire.most_note} bytes; it has at least {LEAST_NOTE}")
        self._check_open()
        made = offered
        if not isinstance(made, Offered):
            made = Offered(list(made.values()) if isinstance(made, Mapping) else made)
        before = self._peers.add(peer, wire, made)
        if before is not None:
            end = ending([before], lambda lane: lane.lost("another peer of its name was met"))
            self._progress.calls.append(end)
        self.wake()

    def has(self, peer: str) -> bool:
        """Return whether transfers with a peer can begin: it was added, and the lane to it has not ended."""
        lane = self._peers.lanes.get(peer)
        return lane is not None and lane.why is None

    def take(self, peer: str, note: bytes) -> bool:
        """Take a note of a peer; return False if it is a user's. Any thread may call it, also within a poll."""
        if not note.startswith(MAGIC):
            return False
        self._progress.inbox.append((peer, bytes(note)))
        return True

    def lost(self, peer: str, why: str) -> None:
        """End the lane to a peer that is gone: its transfers fail, and its slots have other uses."""
        self._remove(peer, lambda lane: lane.lost(why))

    def forget(self, peer: str) -> None:
        """End the lane to a peer that lives: its transfers fail, and it is told.

        Its slots have other uses once the peer has answered that it writes no more, or counts as lost.
        """
        self._remove(peer, lambda lane: lane.leave(LEFT))

    def _remove(self, peer: str, end: Callable[[Lane], object]) -> None:
        self._progress.calls.append(ending(self._peers.remove(peer), end))
        self.wake()

    def in_flight(self, peer: str) -> int:
        """Return the number of this process's transfers with a peer that have not ended."""
        return sum(lane.starts.in_flight for lane in self._peers.every if lane.name == peer)

    def served(self) -> frozenset[Job | Inbound]:
        """Return the peers' transfers whose bytes are gathered from this process's memory, or scattered to it."""
        return frozenset(one for lane in self._peers.every for one in lane.served)

    def refuse(self, served: Collection[Job | Inbound], why: str) -> None:
        """Let the thread that polls end some of the transfers that :meth:`served` returned."""
        self.later(partial(self._peers.refuse, served, why))

    def touches(self, transfer: PackedTransfer) -> bool:
        """Return whether a transfer may still read or write this process's memory, although it has ended."""
        return any(lane.touches(transfer) for lane in self._peers.every)

    def later(self, call: Callable[[], object]) -> None:
        """Let the thread that polls call a function between two of its steps, perhaps twice."""
        self._progress.calls.append(call)
        self.wake()

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
        counted: bool = True,
    ) -> PackedTransfer:  # fmt: skip
        """Begin a transfer, and return at once.

        A transfer that waits for its ``after=`` does not delay the others.

        Args:
            peer: name of the peer.
            plan: a plan between layouts of this process and layouts of the peer.
            reading: whether it reads from the peer; otherwise it writes.
            note: note for the peer, which gets it after the last byte. A transfer that reads has none.
            after: a stream, an event, a Transfer, or None: the transfer begins when this has completed. For a push by
                layer, also a mapping from numbers of layers to such objects: each group of layers is sent when those
                of its layers have completed. An event of CUDA that is not recorded yet counts as completed.
            deadline: seconds until the transfer is given up.
            by_layer: whether layers arrive in their order; see :meth:`kvplan.Transfer.wait_layer`.
            priority: ``"high"`` or ``"normal"``; chunks of high priority are sent first.
            attempts: how often a chunk's write is posted, at most.
            counted: whether its end is added to the sums.

        Raises:
            KVPlanError: an argument is wrong.
            TransferError: there is no such peer, or this end is closed.
        """
        lane = self._peers.lanes.get(peer)
        self._check_open()
        if lane is None:
            why = self._peers.why_gone(peer)
            raise TransferError(f"{self.name!r} has no packed transfers with {peer!r}: {why}")
        if priority not in PRIORITIES:
            raise KVPlanError(f"priority is {priority!r}; give 'high' or 'normal'")
        if reading and note:
            raise KVPlanError("a note goes with a transfer that writes; send a note by itself after a packed read")
        if isinstance(after, Mapping) and (reading or not by_layer):
            raise KVPlanError("after is a mapping of layers; give it with by_layer=True, and to write")
        integer("attempts", attempts, least=1, most=MOST_ATTEMPTS, error=KVPlanError)
        ready, after_layers = readies_of(plan, after)
        wish = Wish(plan, peer, reading, note, attempts, deadline, priority == "high", counted)
        transfer = PackedTransfer(
            wish, self, self._own.now,
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

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything changed.

        If another thread polls, or this one does so already, it returns False at once. If a signal handler raises an
        error meanwhile, all transfers in flight fail, and the lanes begin anew.
        """
        return self._progress.poll()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Forget all peers, and wait until nothing moves in the ring.

        Raises:
            TransferError: a peer has not said in time that its writes have ended, so that they may still move; or a
                chunk still moves here. Another call waits again.
        """
        if self._generation != generation():
            return
        self._peers.closed = True
        for peer in list(self._peers.lanes):
            self.forget(peer)
        end = time.monotonic() + timeout
        while self._peers.every and time.monotonic() < end:
            if self.threaded or not self.poll():
                time.sleep(CLOSE_NAP)
        if self._peers.every:
            left = ", ".join(sorted({repr(lane.name) for lane in self._peers.every}))
            raise TransferError(f"{self.name!r} closes, and writes of {left} may still move in its ring")

    def _check_open(self) -> None:
        check_process(self._generation)
        if self._peers.closed:
            raise TransferError(f"the packed transfers of {self.name!r} are closed")

    def _number(self) -> int:
        with self._lock:
            self._last_number = max(self._last_number + 1, time.time_ns())
            return self._last_number

"""The ways of kvplan to a peer: its memory is open here, or rows are packed into few large messages of NIXL."""

from __future__ import annotations

import logging
import weakref
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from kvplan.agents.agent import Agent
from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_link import PACKED_VERSION, NixlPacked
from kvplan.agents.card import read_card
from kvplan.agents.packed.line import far_memory
from kvplan.agents.packed.ring import Slots
from kvplan.agents.peer_transfer import Order
from kvplan.base.process import generation
from kvplan.engines.nixl.descriptor_rows import Placed, RegisteredMemory, Rows, areas_of, placed_in
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.execute.host import load_loops
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

AUTO, ALWAYS, NEVER = WHEN = ("auto", "always", "never")
CLOSE_SECONDS = 10.0  # that memory which is deregistered waits for transfers of peers, and then for copies that run
GREET_SECONDS = 5.0  # that a packed transfer waits for a peer that has not answered; then NIXL moves it
PART_SECONDS = 1.0  # that a removal waits for the peer's answer to a goodbye, and an end for those of all peers
SAMPLE = 1 << 15  # most rows of a list by which it is known whether such rows are packed; a long prompt has as many

log = logging.getLogger("kvplan.engines.nixl")
_far = cache(far_memory)  # by device


class NearEnd:
    """This process's end of transfers within a machine: it offers memory, and opens that of peers.

    Args:
        name: name of the agent.
        memory: the memory that is registered.

    Attributes:
        peers: its peers, by name.
        memory: as given.

    Raises:
        KVPlanError: the name is too long for a card, or cannot be printed; or the system has no socket.
    """

    key = "agent"  # of its part of a card

    def __init__(self, name: str, memory: RegisteredMemory) -> None:
        self.peers: dict[str, NearPeer] = {}
        self.agent, self.memory, self._offered = Agent(name, {}, transports=("cuda_ipc", "shm")), memory, memory.layouts
        weakref.finalize(self, _close_soon, self.agent).atexit = False

    def part(self) -> str | None:
        """Offer the memory that is registered now; return this end's part of the card, or None."""
        self._offer()
        return self.agent.card().decode() if self.agent.layouts else None

    def withdraw(self) -> None:
        """Wait until peers have ended their transfers of memory that is not registered any more."""
        self._offer()
        self.agent.withdraw(timeout=CLOSE_SECONDS)

    def _offer(self) -> None:
        layouts = self.memory.layouts
        if layouts is not self._offered:
            reasons, self._offered = self.agent.offer(layouts), layouts
            if refused := len(layouts) - len(self.agent.layouts):
                log.info("%d of %d ranges are not offered to peers: %s", refused, len(layouts), reasons)

    def meet(self, name: str, part: Any) -> None:
        """Open the memory of a peer, by its part of a card; raise KVPlanError if that cannot be."""
        self.peers[name] = NearPeer(self, name, part)


class _Peer:
    """A way to a peer.

    Args:
        end: this process's end.
        name: name of the peer, as NIXL knows it.
        part: its part of a card.

    Attributes:
        end, name, part: as given.
        left: why NIXL moves all transfers with it; None while kvplan moves some.
    """

    left: str | None = None

    def __init__(self, end: Any, name: str, part: Any) -> None:
        self.name, self.part, self.end = name, part, end

    def leave(self, why: str) -> None:
        """Let NIXL move all later transfers with it, for a reason."""
        self.left = why
        if self.end.peers.get(self.name) is self:
            del self.end.peers[self.name]
        with guarded(f"the memory of {self.name!r} is still open"):  # it closes once its transfers have ended
            self.close()

    def close(self) -> None:
        """Part from the peer."""

    def prepare(self, rows: Placed) -> None:
        """Warm up for rows of the peer, if that is needed: the first transfer compiles nothing."""

    def give_up(self, moving: Transfer) -> None:
        """End a transfer that has begun, if that is possible."""


class NearPeer(_Peer):
    """A peer in another process of this machine, whose memory is open here."""

    def __init__(self, end: NearEnd, name: str, part: str) -> None:
        super().__init__(end, name, part)
        self._peer = end.agent.meet(part.encode())
        self._areas = areas_of(read_card(part.encode()).layouts, self._peer.layouts)
        log.info("kvplan takes over transfers with %s by %s; all others go by NIXL", name, self._peer.transport)

    def place(self, rows: Rows) -> Placed | None:
        """Return rows of the peer at their addresses in this process; None if NIXL must move them."""
        return placed_in(self._areas, rows)

    def prepare(self, rows: Placed) -> None:
        """See :meth:`_Peer.prepare`."""
        for area in self.end.memory.areas:
            first, size = np.array([area.layout.regions[0].address]), int(np.max(rows.size))
            plan = RowProgram(rows.layout, area.layout).plan(rows.address[:1], first, size, rows.alignment)
            self._peer.prepare(plan)

    def wants(self, plan: Plan) -> bool:
        """Return whether kvplan is to move a plan."""
        return plan.nbytes > 0

    def submit(self, plan: Plan) -> Transfer:
        """Begin to move a plan; raise an error if no byte has moved and none will."""
        return self._peer.submit(plan)

    def gone(self, moving: object = None) -> str | None:
        """Return why the peer can no longer be moved to and from, or None, when a transfer has ended."""
        del moving
        return self._peer.gone

    def close(self) -> None:
        """Let go of the memory, once no transfer is in flight."""
        self.end.agent.forget(self._peer)


class PackedEnd:
    """This process's end of packed transfers.

    A thread of kvplan makes progress. It begins with the first card, or with the first peer. It ends with this object,
    to which it does not refer.

    Args:
        name: name of the agent.
        memory: the memory that peers may name; a GPU of it has the ring.
        real: NIXL's agent. Two threads may call it at a time.
        known: names of the peers that the engine has added, and not removed.
        always: whether every transfer is packed that can be; otherwise a model of the wire says which are.
        slots: the ring, or None for one that fits its device.

    Attributes:
        peers: its peers, by name.
        always: as given.
        way: the end.

    Raises:
        KVPlanError: the name is too long for a card, or cannot be printed.
    """

    key = "packed"

    def __init__(
        self, name: str, memory: RegisteredMemory, real: Any, known: set[str], slots: Slots | None, *, always: bool
    ) -> None:  # fmt: skip
        self.peers: dict[str, PackedPeer] = {}
        self.always = always
        nixl = NixlEnd(name, {}, real, tuple(real.backends) or ("UCX",), progress_thread=False, others=known).open()
        self.way = NixlPacked(name, nixl, lambda: memory.offer, cache(Executor), slots)
        weakref.finalize(self, _close, self.way, real, generation())

    def part(self) -> int:
        """Serve peers from now on; return this end's part of the card: the version by which it packs."""
        load_loops()  # now, so that the first request need not wait for a compiler
        return self.way.serve_peers()

    def meet(self, name: str, part: Any) -> None:
        """Take a peer; raise KVPlanError if it packs by another version."""
        if part != PACKED_VERSION:
            raise KVPlanError(f"it packs by version {part!r}, and this kvplan by {PACKED_VERSION}")
        load_loops()  # of an agent that has given no card
        self.way.met(name)
        log.info("transfers with %s that NIXL moves: many small rows are packed into few large messages", name)
        self.peers[name] = PackedPeer(self, name, part)

    def prepare(self, rows: Placed) -> None:
        """Warm up for rows of this process on a GPU, if they will be packed: the first transfer compiles nothing."""
        mine = rows.layout
        if mine.device == "cpu" or not isinstance(rows.size, int):
            return
        some = rows.address[::-2][:SAMPLE]  # every second one, so that none touch
        for reading in (True, False):
            sides = (_far(mine.device), mine) if reading else (mine, _far(mine.device))
            plan = RowProgram(*sides).plan(some, some, rows.size, rows.alignment)
            if self.always or self.way.choose(plan, reading=reading).way == "packed":
                self.way.prepare(plan, mine, reading=reading)

    def withdraw(self) -> None:
        """Wait until transfers of peers that have begun have ended, since memory is deregistered; then end the rest."""
        if self.way.ring is not None and not self.way.withdraw(CLOSE_SECONDS):
            log.warning("memory is deregistered while packed transfers of peers may still use it")

    def notes(self) -> dict[str, list[bytes]]:
        """Return the engine's notifications that have come since the last call, by the names of peers."""
        notes: dict[str, list[bytes]] = {}
        for name, note in self.way.notes():
            notes.setdefault(name, []).append(note)
        return notes


class PackedPeer(_Peer):
    """A peer that takes packed transfers; see :class:`NearPeer` for its methods."""

    end: PackedEnd

    def place(self, rows: Rows) -> Placed:
        """Return rows at the peer's own addresses: NIXL has checked that they lie there, and the peer does so again."""
        return Placed(rows.device, rows.address, rows.size, _far(rows.device))

    def wants(self, plan: Plan) -> bool:
        """Return whether a plan is to be packed; otherwise NIXL moves it with a descriptor for each piece."""
        way, reading = self.end.way, _reading(plan)
        if way.why_not(self.name, plan, reading=reading) is not None:
            return False
        return (self.end.always or way.choose(plan, reading=reading).way == "packed") and _disjoint(plan)

    def submit(self, plan: Plan) -> Transfer:
        """Begin to move a plan; raise an error if no byte has moved and none will."""
        try:
            end = self.end.way.end()
        except KVPlanError as error:  # a full GPU: each transfer would try, and be logged
            self.left = f"this process has no ring: {error}"
            raise
        patience = {} if end.answered(self.name) else {"patience": GREET_SECONDS}
        return end.submit(Order(plan, self.name, _reading(plan)), **patience)

    def gone(self, moving: object = None) -> str | None:
        """Return why the peer can no longer be moved to and from, or None, when a transfer has ended."""
        return "NIXL reports that it is gone" if getattr(moving, "lost", False) else None

    def give_up(self, moving: Any) -> None:
        """End a transfer that has begun. This waits for the copies that run here, and not for the peer."""
        self.end.way.give_up(moving, "it was released")

    def close(self) -> None:
        """Say goodbye, and wait a little for the answer; transfers that have not ended fail."""
        way, name = self.end.way, self.name
        way.part(name, "the peer was forgotten, or this agent was closed")
        if way.ring is not None and not way.waits(lambda: name not in way.peers, PART_SECONDS):
            log.warning("%s does not say that its writes have ended; its slots stay unused until then", name)


End: TypeAlias = NearEnd | PackedEnd
Neighbour: TypeAlias = NearPeer | PackedPeer


@contextmanager
def guarded(what: str, level: int = logging.WARNING) -> Iterator[None]:
    """Log an error of kvplan, instead of raising it in the engine: NIXL can do all that kvplan does."""
    try:
        yield
    except Exception as error:
        log.log(level, "%s: %s: %s", what, type(error).__name__, error)


def _close_soon(agent: Agent) -> None:
    """Close an agent in a thread of its own: a garbage collection, in whatever thread, must not wait for peers."""

    def close() -> None:
        with guarded("peers still use the memory of an agent of NIXL that has gone"):
            agent.close(timeout=PART_SECONDS)

    with guarded("an agent of NIXL that has gone stays open"):
        start_new_thread(close, ())  # a threading.Thread would wait for its start


def _close(way: NixlPacked, real: object, made_in: int) -> None:
    """Part from all peers, and end the thread; a forked child leaves that to its parent."""
    if made_in == generation():
        if way.ring is not None:  # it stays as long as NIXL, which may write there for peers
            weakref.finalize(real, id, way.ring.memory)
        with guarded("packed transfers end while a peer may still write"):
            way.close(PART_SECONDS)
        way.stop(PART_SECONDS)


def _reading(plan: Plan) -> bool:
    """Return whether a plan reads from the peer."""
    return plan.layouts[0][1].addresses == "memory"


def _disjoint(plan: Plan) -> bool:
    """Return whether no two rows of a plan have a destination byte in common."""
    starts = np.concatenate([part.units[1] for part in plan.parts])
    sizes = np.repeat([part.group.runs[0].nbytes for part in plan.parts], [part.units.shape[1] for part in plan.parts])
    order = np.argsort(starts)
    return bool((starts[order][1:] >= (starts + sizes)[order][:-1]).all())

"""Peers to which kvplan packs the rows of a transfer into few large messages of NIXL."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_packed import PACKED_VERSION, NixlPacked, PackedWay
from kvplan.agents.packed.line import Moving
from kvplan.agents.packed.packed_transfer import PackedTransfer
from kvplan.agents.packed.programs import Offer, far_memory
from kvplan.agents.packed.ring import Slots
from kvplan.base.process import generation
from kvplan.engines.nixl.descriptor_rows import Placed, Rows
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.host.path import load_loops
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

AUTO, ALWAYS, NEVER = WHEN = ("auto", "always", "never")
CLOSE_SECONDS = 10.0  # that memory which is deregistered, or a release, waits for copies that run
GREET_SECONDS = 5.0  # that the first transfer waits for a peer's answer; then NIXL moves it
PART_SECONDS = 1.0  # that a removal waits for the peer's answer to a goodbye, and an end for those of all peers
LOOK_SECONDS = 1e-4  # between two looks of such a wait
SAMPLE = 1 << 15  # most rows of a list by which it is known whether such rows are packed; a long prompt has as many

log = logging.getLogger("kvplan.engines.nixl")


class _Shared:
    """NIXL's agent, of which packed transfers remove no peer that the engine has added."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.known: set[str] = set()  # by the engine

    def remove_remote_agent(self, name: str) -> None:
        if name not in self.known:
            self._real.remove_remote_agent(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Mine:
    """What the thread that makes progress asks for, without holding :class:`PackedPeers`."""

    def __init__(self) -> None:
        self.offer = Offer()
        self.device = "cpu"  # for the ring
        self.executor = cache(Executor)


class PackedPeers:
    """This process's end of the packed transfers of an engine's agent, and the peers that take them.

    A thread of kvplan makes progress. It begins with the first card, or with the first peer.

    Args:
        name: name of the agent.
        real: NIXL's agent. Two threads may call it at a time.
        when: ``"auto"``: where a model of the wire says that packing is faster. ``"always"``: wherever it is possible,
            also within a machine.
        slots: the ring, or None for one that fits its device.

    Attributes:
        peers: by name, peers that take packed transfers.
        known: names of the peers that the engine has added, and not removed.
        always: whether every transfer is packed that can be.
        way: the end.

    Raises:
        KVPlanError: the name is too long for a card, or cannot be printed.
    """

    def __init__(self, name: str, real: Any, when: str, slots: Slots | None) -> None:
        self.peers: dict[str, PackedPeer] = {}
        self.always = when == ALWAYS
        self._name, shared, self._mine = name, _Shared(real), _Mine()
        self.known = shared.known
        self._prepared: set[object] = set()  # device, bytes and alignment of rows
        backends = tuple(getattr(real, "backends", ())) or ("UCX",)
        end, mine = NixlEnd(name, {}, shared, backends, progress_thread=False), self._mine
        end.agent()
        way = PackedWay(slots)
        self.way = NixlPacked(name, end, lambda: mine.offer, mine.executor, way, lambda: mine.device)
        self.finalize = weakref.finalize(self, _close, self.way, real, generation())

    # ---- memory ------------------------------------------------------------------------------------------------------

    def serve(self, layouts: Iterable[KVLayout]) -> int:
        """Let peers name these layouts from now on; return the version for the card, or 0 if there are none."""
        self._mine.offer = Offer(layouts)
        for layout in self._mine.offer.layouts:
            self.ring_on(layout.device)
        if not self._mine.offer.layouts:
            return 0
        load_loops()  # now, so that the first request need not wait for a compiler
        return self.way.serve_peers()

    def prepare(self, placed: Placed) -> None:
        """Warm up for rows of this process on a GPU, if such rows will be packed: the first transfer compiles nothing.

        Args:
            placed: the rows of a list.
        """
        rows, layout = placed.rows, placed.layout
        key = layout.device, rows.size, rows.alignment
        if layout.device == "cpu" or not isinstance(rows.size, int) or key in self._prepared:
            return
        self._prepared.add(key)
        self.ring_on(layout.device)  # engines prepare lists before they ask for the metadata, which says so, too
        some, far = rows.address[::-2][:SAMPLE], far_memory(layout.device)  # every second one, so that none touch
        for reading in (True, False):
            sides = (far, layout) if reading else (layout, far)
            plan = RowProgram(*sides).plan(some, some, rows.size, rows.alignment)
            if self.always or self.way.choose(plan, reading=reading).way == "packed":
                self.way.prepare(plan, layout, reading=reading)

    def ring_on(self, device: str) -> None:
        """Prefer a device for the ring; a GPU is preferred to the CPU. A ring that is allocated stays."""
        if device != "cpu" and self._mine.device == "cpu":
            self._mine.device = device

    def withdraw(self, layouts: Iterable[KVLayout]) -> Callable[[], None] | None:
        """Let peers name these layouts only, if they may name any.

        Returns:
            A function that waits until the transfers of peers that had begun before have ended. Those that stall are
            ended. None if there is nothing to wait for.
        """
        if self._mine.offer.layouts:
            self._mine.offer = Offer(layouts)
        if self.way.opened is None:
            return None
        end, before = self.way.opened.end, list[frozenset[Moving]]()
        end.later(lambda: before.append(end.served()))

        def wait() -> None:
            if self._await(lambda: bool(before) and not before[0] & end.served(), CLOSE_SECONDS):
                return
            left = before[0] & end.served() if before else frozenset()
            end.later(lambda: end.refuse(left, "its memory was deregistered"))  # nothing may touch it later
            if not before or not self._await(lambda: not left & end.served() and not end.copying, CLOSE_SECONDS):
                log.warning("memory is deregistered while packed transfers of peers may still use it")

        return wait

    # ---- peers -------------------------------------------------------------------------------------------------------

    def met(self, name: str, version: object) -> None:
        """Take a peer that the engine has added, if its card says that it takes packed transfers of this version."""
        self.known.add(name)
        takes = version == PACKED_VERSION and name != self._name
        if version and not takes:
            log.info("%s packs by version %r, and this kvplan by %d", name, version, PACKED_VERSION)
        if self.way.opened is not None:
            self.way.opened.end.refusals.pop(name, None)
        known = self.peers.get(name)
        if known is not None and (not takes or known.gone() is not None or known.refused is not None):
            self.leave(name)
        if takes and name not in self.peers:
            load_loops()  # of an agent that has given no card
            self.peers[name] = PackedPeer(name, self)
            self.way.start()
            log.info("transfers with %s that NIXL moves: many small rows are packed into few large messages", name)

    def leave(self, name: str) -> None:
        """Say goodbye to a peer, and wait a little for its answer; its transfers that have not ended fail."""
        peer = self.peers.pop(name, None)
        if peer is not None:
            peer.left, peer.why = True, peer.why or f"the peer {name!r} was removed"
        if self.way.opened is not None:
            end = self.way.opened.end
            self.way.forget(name)
            if not self._await(lambda: name not in end.peers, PART_SECONDS):
                log.warning("%s does not say that its writes have ended; its slots stay unused until then", name)

    def notes(self) -> dict[str, list[bytes]]:
        """Return the engine's notifications that have come since the last call, by the names of peers."""
        found: dict[str, list[bytes]] = {}
        for name, note in self.way.notes():
            found.setdefault(name, []).append(note)
        return found

    def _await(self, over: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not over():
            if time.monotonic() > until:
                return False
            self.way.wake()
            time.sleep(LOOK_SECONDS)
        return True


class PackedPeer:
    """A peer that takes packed transfers; its methods are those of :class:`kvplan.engines.nixl.local_peers.LocalPeer`.

    Args:
        name: name of the peer.
        mine: this process's end.

    Attributes:
        why: why it is gone; None while it is not.
        refused: why NIXL moves all transfers with it, although it lives; None while some are packed.
    """

    left = removed = False

    def __init__(self, name: str, mine: PackedPeers) -> None:
        self.name = name
        self.why: str | None = None
        self.refused: str | None = None
        self._mine = mine
        self._until: float | None = None  # when the peer must have answered
        self._layouts: dict[str, KVLayout] = {}

    def place(self, rows: Rows) -> Placed:
        """Return rows at the peer's own addresses: NIXL has checked that they lie there, and the peer does so again."""
        if rows.device not in self._layouts:
            self._layouts[rows.device] = far_memory(rows.device)
        return Placed(rows, self._layouts[rows.device])

    def wants(self, plan: Plan) -> bool:
        """Return whether a plan is to be packed; otherwise NIXL moves it with a descriptor for each piece."""
        mine, reading = self._mine, _reading(plan)
        mine.ring_on(plan.layouts[0][1 if reading else 0].device)
        if self.why or self.refused or mine.way.why_not(self.name, plan, reading=reading) is not None:
            return False
        return (mine.always or mine.way.choose(plan, reading=reading).way == "packed") and _disjoint(plan)

    def submit(self, plan: Plan) -> Transfer:
        """Begin to move a plan."""
        if (why := self.why or self.refused) is not None:
            raise TransferError(why)
        try:
            end = self._mine.way.end()
        except KVPlanError as error:  # a full GPU: each transfer would try, and be logged
            self.refused = f"this process has no ring: {error}"
            raise
        if self._until is None:
            self._until = time.monotonic() + GREET_SECONDS
        return end.submit(self.name, plan, reading=_reading(plan))

    def ended(self, moving: Transfer) -> bool:
        """Return whether a transfer has ended; it does so if the peer does not answer at all."""
        opened, late = self._mine.way.opened, self._until is not None and time.monotonic() > self._until
        if late and not moving.done() and opened is not None and not opened.end.answered(self.name):
            self.refused = "it has not answered"
            moving.cancel()
        return moving.done()

    def gone(self) -> str | None:
        """Return why it is gone, or None."""
        opened = self._mine.way.opened
        if self.why is None and opened is not None and opened.reach.lost(self.name):
            self.why = "NIXL reports that it is gone"
        return self.why

    def close(self) -> None:
        """Part from the peer."""
        self._mine.leave(self.name)

    def end(self, moving: Transfer) -> bool:
        """Give a transfer up. This waits for the copies that run here, and not for the peer."""
        opened = self._mine.way.opened
        if not moving.cancel() and opened is not None and isinstance(moving, PackedTransfer):
            opened.end.give_up(moving, "it was released")
        with suppress(TransferError):
            moving.synchronize(CLOSE_SECONDS)
        return moving.done()


def _reading(plan: Plan) -> bool:
    """Return whether a plan reads from the peer."""
    return plan.layouts[0][1].addresses == "memory"


def _disjoint(plan: Plan) -> bool:
    """Return whether no two rows of a plan have a destination byte in common."""
    starts = np.concatenate([part.units[1] for part in plan.parts])
    sizes = np.repeat([part.group.runs[0].nbytes for part in plan.parts], [part.units.shape[1] for part in plan.parts])
    order = np.argsort(starts)
    return bool((starts[order][1:] >= (starts + sizes)[order][:-1]).all())


def _close(way: NixlPacked, real: object, made_in: int) -> None:
    """Part from all peers, and end the thread; a forked child leaves that to its parent."""
    if made_in != generation():
        return
    try:
        way.close(PART_SECONDS)
    except TransferError as error:
        log.warning("packed transfers end while a peer may still write: %s", error)
        way.stop(PART_SECONDS)
        if way.ring is not None:  # it stays as long as NIXL, which may write there for peers
            weakref.finalize(real, id, way.ring.memory)

"""Peers to which kvplan packs the rows of a transfer into few large messages of NIXL."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_packed import PACKED_VERSION, NixlPacked, PackedWay
from kvplan.agents.packed.line import Moving
from kvplan.agents.packed.programs import Offer
from kvplan.base.process import compiling, generation
from kvplan.base.quoting import quoted
from kvplan.engines.nixl.neighbours import CLOSE_SECONDS, PACKED, card_of
from kvplan.engines.nixl.packed_options import ALWAYS, PackedOptions
from kvplan.engines.nixl.packed_transfers import FarMemory, FarTransfer
from kvplan.engines.nixl.shared_nixl import SharedNixl
from kvplan.engines.nixl.spans import Placed
from kvplan.errors import KVPlanError, LayoutError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.host.path import load_loops
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

PART_SECONDS = 1.0  # that a removal waits for the peer's answer to a goodbye, and an end for those of all peers
SAMPLE = 1 << 15  # most rows of a list by which it is known whether such rows are packed; a long prompt has as many
LOOK_SECONDS = 1e-4  # between two looks of such a wait

log = logging.getLogger("kvplan.engines.nixl")


class PackedPeers:
    """This process's end of the packed transfers of an engine's agent, and the peers that take them.

    A thread of kvplan makes progress. It begins with the first card, or with the first peer.

    Args:
        name: name of the agent.
        real: NIXL's agent. Two threads may call it at a time.
        options: when transfers are packed, and the ring.

    Attributes:
        peers: by name, peers that take packed transfers.
        always: whether every transfer is packed that can be.

    Raises:
        KVPlanError: the name is too long for a card, or cannot be printed.
    """

    def __init__(self, name: str, real: Any, options: PackedOptions) -> None:
        self.peers: dict[str, PackedPeer] = {}
        self.always = options.when == ALWAYS
        self._name = name
        self._shared = SharedNixl(real)
        self._offers = offers = [Offer()]  # the one of now
        self._devices = devices = {"ring": "cpu"}
        self._ready = False  # whether compiled loops were loaded
        self._prepared: set[tuple[str, int, int]] = set()  # device, bytes and alignment of rows
        backends = tuple(getattr(real, "backends", ())) or ("UCX",)
        end = NixlEnd(name, {}, self._shared, backends, progress_thread=False)
        end.agent()
        way = PackedWay(options.slots)
        self.way = NixlPacked(name, end, lambda: offers[0], _once_each(Executor), way, set(), lambda: devices["ring"])
        self.finalize = weakref.finalize(self, _close, self.way, real, generation())

    # ---- memory ------------------------------------------------------------------------------------------------------

    def serve(self, layouts: Iterable[KVLayout]) -> int:
        """Let peers name these layouts from now on; return the version for the card, or 0 if none are taken."""
        held = list(layouts)
        self._offers[0] = Offer(held)
        for layout in held:
            self.ring_on(layout.device)
        if held:
            self._warm_up()
        return self.way.serve_peers() if held else 0

    def _warm_up(self) -> None:
        """Load compiled loops while the engine starts, so that the first request need not wait for a compiler."""
        if self._ready:
            return
        self._ready = True
        try:
            load_loops()
            with compiling():  # a fork waits for imports of numba
                from kvplan.engines.nixl import row_loops

                row_loops.load()
        except Exception as error:  # noqa: BLE001  # the engine starts in any case
            log.warning("the first packed transfer will wait: %s: %s", type(error).__name__, error)

    def prepare(self, placed: Placed) -> None:
        """Warm up for rows of this process on a GPU, if such rows will be packed: the first transfer compiles nothing.

        Args:
            placed: the rows of a list.
        """
        rows, layout = placed.rows, placed.layout
        key = layout.device, rows.one_size, rows.alignment
        far = FarMemory().place(rows)
        if far is None or key in self._prepared or layout.device == "cpu" or not self._may_ring_on(layout.device):
            return
        self._prepared.add(key)
        self.ring_on(layout.device)  # engines prepare lists before they ask for the metadata, which says so, too
        some = rows.addresses(np.arange(len(rows) - 1, -1, -2)[:SAMPLE])  # every second one, so that none touch
        for reading in (True, False):
            sides = (far.layout, layout) if reading else (layout, far.layout)
            plan = RowProgram(*sides).plan(some, some, rows.one_size, rows.alignment) if rows.one_size else None
            if plan is not None and (self.always or self.way.choose(plan, reading=reading).way == "packed"):
                self.way.prepare(plan, layout, reading=reading)

    def _may_ring_on(self, device: str) -> bool:
        """Return whether the ring is on a GPU, or may be allocated there."""
        chosen = self.way.ring_device
        return chosen == device or (chosen == "cpu" and self.way.opened is None)

    def ring_on(self, device: str) -> None:
        """Prefer a device for the ring; a GPU is preferred to the CPU. A ring that is allocated stays."""
        if device != "cpu" and self._devices["ring"] == "cpu":
            self._devices["ring"] = device

    def withdraw(self, layouts: Iterable[KVLayout]) -> Callable[[], None]:
        """Let peers name these layouts only, if they may name any.

        Returns:
            A function that waits until the transfers of peers that had begun before have ended. Those that stall are
            ended.
        """
        if self._offers[0].layouts:
            self._offers[0] = Offer(layouts)
        opened = self.way.opened
        if opened is None:
            return _nothing
        end, before = opened.end, list[frozenset[Moving]]()
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

    def met(self, name: str, card: bytes | None) -> None:
        """Take a peer that the engine has added, if its card says that it takes packed transfers.

        Args:
            name: its name.
            card: its card; None if it has none.
        """
        self._shared.known.add(name)
        known = self.peers.get(name)
        try:
            takes = card is not None and name != self._name and self._takes(name, card_of(name, card).get(PACKED))
        except LayoutError as error:
            log.info("no transfer with %s is packed: %s", name, error)
            takes = False
        if self.way.opened is not None:
            self.way.opened.end.refusals.pop(name, None)
        if known is not None and (not takes or known.gone() is not None or known.refused is not None):
            self.leave(name)
        if takes and name not in self.peers:
            self._warm_up()  # an agent that has given no card
            self.peers[name] = PackedPeer(name, self)
            self.way.start()
            log.info("transfers with %s that NIXL moves: %s", name, PackedPeer.words)

    def _takes(self, name: str, told: object) -> bool:
        if told is None:
            return False
        if isinstance(told, bool) or not isinstance(told, int) or not 0 < told < 1 << 16:
            raise LayoutError(f"the card of {name!r} has {PACKED} {quoted(told)}; expected a version, from 1 on")
        if told != PACKED_VERSION:
            log.info("%s packs by version %d, and this kvplan by %d", name, told, PACKED_VERSION)
        return told == PACKED_VERSION

    def knows(self, peer: object) -> bool:
        """Return whether a peer has been neither removed nor added again since."""
        return isinstance(peer, PackedPeer) and self.peers.get(peer.name) is peer

    def leave(self, name: str) -> None:
        """Say goodbye to a peer, and wait a little for its answer; its transfers that have not ended fail."""
        peer = self.peers.pop(name, None)
        if peer is not None:
            peer.why = peer.why or f"the peer {name!r} was removed"
        opened = self.way.opened
        if opened is not None:
            self.way.forget(name)
            if not self._await(lambda: name not in opened.end.peers, PART_SECONDS):
                log.warning("%s does not say that its writes have ended; its slots stay unused until then", name)

    def removed(self, name: str) -> None:
        """Take it that the engine has removed a peer."""
        self._shared.known.discard(name)

    def _await(self, over: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not over():
            if time.monotonic() > until:
                return False
            self.way.wake()
            time.sleep(LOOK_SECONDS)
        return True

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the engine's notifications that have come since the last call, as (peer, notification)."""
        return self.way.notes()


class PackedPeer:
    """A peer that takes packed transfers; see :class:`kvplan.engines.nixl.transfer_handles.Neighbour`.

    Args:
        name: name of the peer.
        mine: this process's end.

    Attributes:
        name, spans, words: see :class:`kvplan.engines.nixl.transfer_handles.Neighbour`.
        why: why it is gone; None while it is not.
        refused: why NIXL moves all transfers with it, although it lives; None while some are packed.
    """

    words = "many small rows are packed into few large messages"

    def __init__(self, name: str, mine: PackedPeers) -> None:
        self.name = name
        self.spans: Any = FarMemory()
        self.why: str | None = None
        self.refused: str | None = None
        self._mine = mine

    def wants(self, plan: Plan) -> bool:
        """Return whether a plan is to be packed; otherwise NIXL moves it with a descriptor for each piece."""
        mine, reading = self._mine, _reading(plan)
        mine.ring_on(plan.layouts[0][1 if reading else 0].device)
        why = self.why or self.refused or mine.way.why_not(self.name, plan, reading=reading)
        if why is None and not mine.always:
            choice = mine.way.choose(plan, reading=reading)
            why = None if choice.way == "packed" else choice.why
        if why is None and not _disjoint(plan):
            why = "it writes some bytes twice"
        if why is not None:
            log.debug("%r with %s is not packed: %s", plan, self.name, why)
        return why is None

    def submit(self, plan: Plan) -> Transfer:
        """See :meth:`Neighbour.submit`."""
        if (why := self.why or self.refused) is not None:
            raise TransferError(why)
        try:
            end = self._mine.way.end()
        except KVPlanError as error:  # a full GPU: each transfer would try, and be logged
            self.refused = f"this process has no ring: {error}"
            raise
        made = end.submit(self.name, plan, reading=_reading(plan))
        return FarTransfer(made, lambda: end.answered(self.name), self._silent, end.give_up)

    def _silent(self) -> None:
        self.refused = "it has not answered"

    def prepare(self, plan: Plan) -> None:
        """Do nothing: the ring is allocated with the first transfer that is packed."""

    def gone(self) -> str | None:
        """See :meth:`Neighbour.gone`."""
        opened = self._mine.way.opened
        if self.why is None and opened is not None and opened.reach.lost(self.name):
            self.why = "NIXL reports that it is gone"
        return self.why

    def close(self) -> None:
        """See :meth:`Neighbour.close`."""
        self._mine.leave(self.name)


def _once_each(make: Callable[[str], Executor]) -> Callable[[str], Executor]:
    """Return a function that makes an executor of each device once, also if two threads ask at the same time."""
    lock, made = threading.Lock(), cache(make)

    def get(device: str) -> Executor:
        with lock:
            return made(device)

    return get


def _nothing() -> None:
    pass


def _reading(plan: Plan) -> bool:
    """Return whether a plan reads from the peer."""
    return plan.layouts[0][1].addresses == "memory"


def _disjoint(plan: Plan) -> bool:
    """Return whether no two rows of a plan have a destination byte in common."""
    starts = [part.units[1] for part in plan.parts]
    if len(plan.parts) == 1:
        nbytes = plan.parts[0].group.runs[0].nbytes
        return bool((np.diff(np.sort(starts[0])) >= nbytes).all())
    sizes = [np.full(part.units.shape[1], part.group.runs[0].nbytes, dtype=np.int64) for part in plan.parts]
    start, size = np.concatenate(starts), np.concatenate(sizes)
    order = np.argsort(start)
    return bool((start[order][1:] >= (start + size)[order][:-1]).all())


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
            weakref.finalize(real, _nothing_with, way.ring.memory)


def _nothing_with(memory: object) -> None:
    del memory

"""The registered memory of an agent, its peers, and its choice of the transfers that kvplan moves."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvplan.agents.agent import Agent as LocalAgent
from kvplan.agents.packed.ring import Slots
from kvplan.agents.transport import LOCAL
from kvplan.base.reading import json_of
from kvplan.engines.nixl.descriptor_rows import Held, Placed, Range, Rows, disjoint, indices, ranges_of, rows_of
from kvplan.engines.nixl.local_peers import LocalPeer, placed_in
from kvplan.engines.nixl.packed_peers import CLOSE_SECONDS, NEVER, PackedPeer, PackedPeers
from kvplan.engines.nixl.transfers import PreparedList, TakenTransfer, bytes_of
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import Memory, RowProgram, layout_of

OPERATIONS = ("READ", "WRITE")
log = logging.getLogger("kvplan.engines.nixl")


Neighbour = LocalPeer | PackedPeer


class Peers:
    """The state of an agent of NIXL with kvplan in front of it.

    Args:
        real: NIXL's agent.
        when, slots: when transfers are packed, and the ring for that.

    Attributes:
        real: as given.
        packed: peers whose transfers are packed; None if no transfer is.
        near: by name, peers whose memory is open here.
    """

    def __init__(self, real: Any, when: str = NEVER, slots: Slots | None = None) -> None:
        self.real = real
        self.near: dict[str, LocalPeer] = {}
        self._name = str(getattr(real, "name", ""))
        self._registered: Counter[Range] = Counter()
        self._held: list[Held] | None = []  # None once it is out of date
        self._agent: LocalAgent | None = None  # it offers memory, and opens that of peers
        self._offered: set[Range] = set()
        self._refused: set[Range] = set()  # no transport offers it
        self._lock = threading.RLock()
        self._programs: dict[tuple[int, int], RowProgram] = {}
        self.packed: PackedPeers | None = None
        try:
            self.packed = None if when == NEVER else PackedPeers(self._name, real, when, slots)
        except KVPlanError as error:
            log.info("no transfer is packed: %s", error)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def remember(self, descriptors: Any) -> None:
        """Remember registered memory."""
        rows = judged(rows_of, descriptors)
        if rows is not None:
            with self._lock:
                self._registered.update(ranges_of(rows))
                self._held = None

    def forget(self, descriptors: Any) -> None:
        """Forget memory; withdraw it from peers, and wait until they have ended their transfers."""
        rows = judged(rows_of, descriptors)
        if rows is None:
            return
        with self._lock:
            self._registered -= Counter(ranges_of(rows))
            self._held = None
            wait = None if self.packed is None else self.packed.withdraw(one.layout for one in self.held())
        try:
            if self._agent is not None and self._offered:
                with self._lock:
                    self._offer(self._agent)
                self._agent.withdraw(timeout=CLOSE_SECONDS)
        except Exception as error:  # noqa: BLE001  # NIXL deregisters it now
            log.warning("memory is deregistered while peers may still use it: %s", told(error))
        if wait is not None:
            wait()

    def held(self) -> list[Held]:
        """Return the registered memory, with a layout for each device."""
        with self._lock:
            if self._held is None:
                self._programs.clear()
                devices: dict[str, list[Range]] = {}
                for one in disjoint(self._registered):
                    devices.setdefault(one.device, []).append(one)
                self._held = [
                    Held(some, [one.address for one in some], layout_of([_memory(one) for one in some]))
                    for some in devices.values()
                ]
            return self._held

    def card(self) -> bytes | None:
        """Return the card for peers; None if there is nothing to offer."""
        with self._lock:
            try:
                layouts = [one.layout for one in self.held()]
                packed = 0 if self.packed is None else self.packed.serve(layouts)
                agent = self._local()
                self._offer(agent)
                card = agent.card().decode() if agent.layouts else None
            except Exception as error:  # noqa: BLE001  # NIXL's metadata is enough
                log.warning("kvplan offers no memory to peers, NIXL moves all transfers: %s", told(error))
                return None
            return json.dumps({"agent": card, "packed": packed}).encode() if card or packed else None

    def _offer(self, agent: LocalAgent) -> None:
        """Let an agent offer the memory that is registered now, if that has changed."""
        ranges = set(disjoint(self._registered))
        self._refused &= ranges
        if ranges - self._refused == self._offered:
            return
        named = {f"{one.kind} {k}": one for k, one in enumerate(sorted(ranges))}
        reasons = agent.offer(
            {name: KVLayout.from_tensors("block dim", _memory(one), layer_start=k)
             for k, (name, one) in enumerate(named.items())}
        )  # fmt: skip
        self._offered = {named[name] for name in agent.layouts}
        self._refused = ranges - self._offered
        if self._refused:
            why = "; ".join(f"{name}: {text}" for name, text in reasons.items())
            log.info("%d of %d ranges are not offered to peers: %s", len(self._refused), len(ranges), why)

    def _local(self) -> LocalAgent:
        if self._agent is None:
            self._agent = LocalAgent(self._name, {}, transports=tuple(LOCAL))
        return self._agent

    # ---- peers -------------------------------------------------------------------------------------------------------

    def met(self, name: str, card: bytes | None) -> None:
        """Open the memory of a peer that was added, if its card is of this machine."""
        try:
            document = {} if card is None else json_of(card)
            agent, packed = document.get("agent"), document.get("packed", 0)
        except (LayoutError, AttributeError) as error:
            log.info("transfers with %s go by NIXL: its card cannot be read: %s", name, error)
            agent, packed = None, 0
        with self._lock:
            if self.packed is not None:
                self.packed.met(name, packed)
            known = self.near.get(name)
            if known is not None and agent == known.card and not known.gone():
                return
            if known is not None:
                self._shut(known)
            if agent is None or (self.packed is not None and self.packed.always):
                return
            try:
                peer = self.near[name] = LocalPeer(name, self._local(), agent)
            except Exception as error:  # noqa: BLE001  # NIXL serves the peer
                log.info("transfers with %s go by NIXL: %s", name, told(error))
                return
        log.info("kvplan takes over transfers with %s by %s; all others go by NIXL", name, peer.transport)

    def remove(self, agent: Any) -> None:
        """Remove a peer, also from NIXL. Transfers made before cannot be posted any more, as by NIXL."""
        name = text(agent)
        for one in self.ways(name):
            one.removed = True
            self._shut(one)
        try:
            self.real.remove_remote_agent(agent)
        finally:
            if self.packed is not None:
                self.packed.known.discard(name)

    def lost(self, neighbour: Neighbour, why: str) -> None:
        """Let go of a peer that is gone, or withdraws its memory: NIXL tells of it from now on."""
        if not neighbour.left:
            log.warning("transfers with %s go by NIXL from now on: %s", neighbour.name, why)
            self._shut(neighbour)

    def _shut(self, neighbour: Neighbour) -> None:
        with self._lock:
            neighbour.left = True
            if self.near.get(neighbour.name) is neighbour:
                del self.near[neighbour.name]
            self._programs.clear()
        try:
            neighbour.close()
        except Exception as error:  # noqa: BLE001  # it closes once its transfers have ended
            log.warning("the memory of %s is still open: %s", neighbour.name, told(error))

    def ways(self, name: str) -> list[Neighbour]:
        """Return the ways to a peer by kvplan, in the order in which they are asked for rows."""
        packed = {} if self.packed is None else self.packed.peers
        found: list[Neighbour | None] = [self.near.get(name), packed.get(name)]
        return [one for one in found if one is not None]

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def listed(self, own: Any, peer: str, rows: Rows | None) -> PreparedList:
        """Return a prepared list, whose rows were looked up, and warm up for its transfers.

        Args:
            own: NIXL's handle, or None.
            peer: name of the peer; "" for this process.
            rows: its rows; None if kvplan cannot move them.
        """
        made = PreparedList(own, peer, rows)
        self._place(made)
        return made

    def _place(self, made: PreparedList) -> None:
        rows = made.rows
        if rows is None:
            return
        try:
            if not made.peer:
                made.among = held = self.held()
                made.placed = placed_in(held, rows)
            for neighbour in self.ways(made.peer):
                if made.placed is None:
                    made.neighbour, made.placed = neighbour, neighbour.place(rows)
        except Exception as error:  # noqa: BLE001  # NIXL moves such rows
            log.warning("NIXL moves transfers of a list: %s", told(error))
            made.placed = None

    def prepare(self, made: PreparedList) -> None:
        """Warm up for a list's rows, so that the first transfer does not wait for compilers."""
        there, held = made.placed, self.held()
        try:
            if there is not None and not made.peer and self.packed is not None:
                self.packed.prepare(there)
            elif there is not None and isinstance(made.neighbour, LocalPeer) and held:
                here = max(held, key=lambda one: one.kind)  # the GPU's
                size, some = int(np.max(there.rows.size)), there.rows.address[:1]
                program = self._program(there.layout, here.layout)
                made.neighbour.prepare(program.plan(some, np.array([here.first]), size, there.rows.alignment))
        except Exception as error:  # noqa: BLE001  # the first transfer compiles, or is refused
            log.warning("the first transfer with %s may wait: %s", made.peer or "a peer", told(error))

    def take(
        self, operation: str, lists: tuple[Any, Any], chosen: tuple[Any, Any], note: Any, by_nixl: Callable[..., Any]
    ) -> TakenTransfer | None:
        """Return a transfer that kvplan moves; None if NIXL must make it, or refuse it.

        Args:
            operation: ``"READ"`` or ``"WRITE"``.
            lists: the list of this process's memory, and the list of the peer's.
            chosen: the indices of descriptors in each list.
            note: notification for the peer.
            by_nixl: makes the transfer by NIXL, of a notification and the indices in each list.
        """
        local, remote = lists
        if operation not in OPERATIONS or not isinstance(local, PreparedList) or not isinstance(remote, PreparedList):
            return None
        neighbour = remote.neighbour
        if neighbour is None or neighbour.left or local.peer:
            return None
        try:
            if local.among is not self.held():
                self._place(local)
            here, there = local.placed, remote.placed
            if here is None or there is None:
                return None
            at, to = indices(chosen[0], len(here.rows)), indices(chosen[1], len(there.rows))
            if at is None or to is None or at.size != to.size:
                return None
            plan = self._plan(operation, here, there, at, to)
            if plan is None or not neighbour.wants(plan):
                return None
            return TakenTransfer(
                self.real, self.lost, neighbour, plan, bytes_of(note), lambda note: by_nixl(note, at, to)
            )
        except Exception as error:  # noqa: BLE001  # NIXL makes it, or refuses it
            log.warning("NIXL moves a transfer: %s", told(error))
            return None

    def _plan(self, operation: str, here: Placed, there: Placed, at: Int64Array, to: Int64Array) -> Plan | None:
        """Return the plan of rows of two lists; None if their sizes differ."""
        size, its_size = here.rows.sizes(at), there.rows.sizes(to)
        if not (size == its_size if isinstance(size, int) and isinstance(its_size, int) else np.all(size == its_size)):
            return None
        units = np.empty((2, at.size), dtype=np.int64)
        mine, its = units[::-1] if operation == "READ" else units
        here.rows.address.take(at, out=mine, mode="clip")
        there.rows.address.take(to, out=its, mode="clip")
        layouts = (there.layout, here.layout) if operation == "READ" else (here.layout, there.layout)
        program, alignment = self._program(*layouts), min(here.rows.alignment, there.rows.alignment)
        if isinstance(size, int):
            return program.of_units(units, size, alignment)
        return program.plan(units[0], units[1], size, alignment)

    def _program(self, src: KVLayout, dst: KVLayout) -> RowProgram:
        known = self._programs.get((id(src), id(dst)))
        if known is None or known.src is not src or known.dst is not dst:
            known = self._programs[id(src), id(dst)] = RowProgram(src, dst)
        return known


def judged(read: Callable[..., Rows], *given: Any) -> Rows | None:
    """Return the rows that a function reads; None if kvplan cannot move such rows, of which NIXL is the judge."""
    try:
        return read(*given)
    except Exception as error:  # noqa: BLE001
        log.debug("left to NIXL: %s", told(error))
        return None


def text(name: Any) -> str:
    """Return a peer's name as a text."""
    return name.decode() if isinstance(name, bytes) else str(name)


def told(error: Exception) -> str:
    """Return an error as the log shows it."""
    return str(error) if isinstance(error, KVPlanError) else f"{type(error).__name__}: {error}"


def _memory(one: Range) -> Memory:
    return Memory(one.address, one.nbytes, one.device)

"""The agent of NIXL as engines call it, with kvplan in front, and the transfers that kvplan takes over."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvplan.agents.packed.ring import Slots, checked_slots
from kvplan.base.files import json_of
from kvplan.base.values import listed, quoted
from kvplan.engines.nixl.descriptor_rows import EVERY, Placed, RegisteredMemory, Rows, indices
from kvplan.engines.nixl.neighbours import ALWAYS, AUTO, NEVER, WHEN, End, NearEnd, Neighbour, PackedEnd, guarded
from kvplan.engines.nixl.transfers import REMOVED, PreparedList, TakenTransfer, bytes_of, nixl_error
from kvplan.errors import KVPlanError, PathError
from kvplan.layout.strides import Int64Array
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

PACKED = "KVPLAN_NIXL_PACKED"
MODULE, CLASS = "nixl._api", "nixl_agent"
replaced: list[Any] = []  # the class that the switch has replaced
log = logging.getLogger("kvplan.engines.nixl")
# The front of metadata, and the name of a backend that no NIXL has.
FRONT, BACKEND = b"nixlSerDes|", b"KVPLAN"


class Agent:
    """An agent with the interface of ``nixl._api.nixl_agent`` (NIXL 1.5.1), which moves bytes within a machine itself.

    It makes NIXL's agent and passes every call on to it. It takes over a transfer whose descriptors lie in memory that
    a peer of this machine offers. All other transfers, metadata and notifications are NIXL's.
    ``docs/start/nixl.md`` says which memory a peer can offer.

    Args:
        agent_name, nixl_conf, instantiate_all: as for ``nixl_agent``.
        agent: an existing agent of NIXL to put kvplan in front of; then the first three arguments are not used.
        packed: when rows are packed into few large messages between machines: ``"auto"``, ``"always"`` or ``"never"``.
            None: as the variable ``KVPLAN_NIXL_PACKED`` says, or ``"auto"``; for an existing agent ``"never"``.
        slots: the ring for that, as of :class:`kvplan.Agent`.

    Raises:
        PathError: NIXL is not installed.
    """

    _kvplan: Peers

    def __init__(
        self, agent_name: str = "", nixl_conf: Any = None, instantiate_all: bool = False, *, agent: Any = None,
        packed: str | None = None, slots: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        when, ring = when_packed(NEVER if agent is not None and packed is None else packed), checked_slots(slots)
        if agent is None:
            agent, when = own_agent(agent_name, nixl_conf, instantiate_all, when)
        object.__setattr__(self, "_kvplan", Peers(agent, when, ring))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kvplan.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kvplan.real, name, value)

    # Memory and metadata.

    def register_memory(self, reg_list: Any, *given: Any, **named: Any) -> Any:
        """Register memory with NIXL, and remember it to offer it to peers."""
        registered = self._kvplan.real.register_memory(reg_list, *given, **named)
        self._kvplan.change(registered, 1)
        return registered

    def deregister_memory(self, dereg_list: Any, *given: Any, **named: Any) -> None:
        """Deregister memory, and no longer offer it to peers."""
        self._kvplan.change(dereg_list, -1)
        self._kvplan.real.deregister_memory(dereg_list, *given, **named)

    def get_agent_metadata(self) -> bytes:
        """Return NIXL's metadata with kvplan's card in it, if there is something to offer."""
        metadata: bytes = self._kvplan.real.get_agent_metadata()
        card = self._kvplan.card()
        return metadata if card is None else joined(metadata, card)

    def add_remote_agent(self, metadata: bytes) -> Any:
        """Add a peer to NIXL, and open its memory if its metadata has a card of this machine. Return its name."""
        name = self._kvplan.real.add_remote_agent(metadata)
        self._kvplan.met(text(name), card_in(metadata))
        return name

    def remove_remote_agent(self, agent: Any) -> None:
        """Remove a peer from NIXL, and let go of its memory."""
        self._kvplan.remove(agent)

    # Transfers.

    def prep_xfer_dlist(self, agent_name: Any, xfer_list: Any, mem_type: Any = None, *given: Any, **named: Any) -> Any:
        """Prepare a descriptor list by NIXL, and look up where its rows lie in this process."""
        state = self._kvplan
        if not isinstance(xfer_list, np.ndarray):
            xfer_list = state.real.get_xfer_descs(xfer_list, mem_type)
        own = state.real.prep_xfer_dlist(agent_name, xfer_list, mem_type, *given, **named)
        return state.listed(own, text(agent_name), xfer_list, mem_type, prepare=True)

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: PreparedList, local_indices: Any, remote_xfer_side: PreparedList,
        remote_indices: Any, notif_msg: Any = b"", *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Make a transfer of some descriptors of two prepared lists: kvplan's if it can move them, otherwise NIXL's."""
        real, local, remote = self._kvplan.real, local_xfer_side.own, remote_xfer_side.own
        if local is None or remote is None:
            raise nixl_error(real, "InvalidParam", "the descriptor list was released")

        def by_nixl(note: Any, at: Any, to: Any) -> Any:
            return real.make_prepped_xfer(operation, local, at, remote, to, note, *given, **named)

        sides, chosen = (local_xfer_side, remote_xfer_side), (local_indices, remote_indices)
        return self._kvplan.take(operation, sides, chosen, notif_msg, by_nixl) or by_nixl(notif_msg, *chosen)

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: Any,
        notif_msg: Any = b"", *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Make a transfer of two whole descriptor lists: kvplan's if it can move them, otherwise NIXL's."""
        state, real, name = self._kvplan, self._kvplan.real, text(remote_agent)
        if state.ways(name):
            sides = state.listed(None, "", local_descs), state.listed(None, name, remote_descs)
            copies = [real.get_serialized_descs(each) for each in (local_descs, remote_descs)]  # the lists may change

            def by_nixl(note: Any, *_: Any) -> Any:
                lists = map(real.deserialize_descs, copies)
                return real.initialize_xfer(operation, *lists, remote_agent, note, *given, **named)

            if (taken := state.take(operation, sides, (EVERY, EVERY), notif_msg, by_nixl)) is not None:
                return taken
        return real.initialize_xfer(operation, local_descs, remote_descs, remote_agent, notif_msg, *given, **named)

    def transfer(self, handle: Any, notif_msg: Any = b"") -> Any:
        """Post a transfer; return ``"DONE"`` or ``"PROC"``."""
        own = isinstance(handle, TakenTransfer)
        return handle.post(bytes_of(notif_msg)) if own else self._kvplan.real.transfer(handle, notif_msg)

    def check_xfer_state(self, handle: Any) -> Any:
        """Return ``"DONE"``, ``"PROC"`` or, from NIXL only, ``"ERR"``."""
        return handle.look() if _taken(handle) else self._kvplan.real.check_xfer_state(_own(handle))

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """Return the figures of a finished transfer; see :class:`kvplan.engines.nixl.Telemetry`."""
        if _taken(handle) and handle.telemetry is None:
            raise nixl_error(self._kvplan.real, "NotPosted", "the transfer has not ended")
        return handle.telemetry if _taken(handle) else self._kvplan.real.get_xfer_telemetry(_own(handle))

    def query_xfer_backend(self, handle: Any) -> Any:
        """Return the name of the backend that moves a transfer; ``"KVPLAN"`` for kvplan."""
        return "KVPLAN" if _taken(handle) else self._kvplan.real.query_xfer_backend(_own(handle))

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer; one in flight is cancelled, or its bytes are waited for."""
        handle.release()

    def release_dlist_handle(self, handle: Any) -> None:
        """Release a prepared descriptor list."""
        handle.release()

    # Notifications.

    def get_new_notifs(self, *given: Any, **named: Any) -> Any:
        """Return new notifications, by the names of peers."""
        packed = self._kvplan.packed
        return self._kvplan.real.get_new_notifs(*given, **named) if packed is None else packed.notes()

    def update_notifs(self, *given: Any, **named: Any) -> Any:
        """Add new notifications to those that NIXL's agent keeps in ``notifs``, and return all of them."""
        kept: dict[str, list[bytes]] = self._kvplan.real.notifs
        for name, notes in self.get_new_notifs(*given, **named).items():
            kept.setdefault(name, []).extend(notes)
        return kept

    def check_remote_xfer_done(
        self, remote_agent_name: str, lookup_tag: bytes, backends: Sequence[str] = (), tag_is_prefix: bool = True
    ) -> bool:
        """Return whether a peer has sent a notification with a tag, and take the first such notification."""
        notes = self.update_notifs(list(backends)).get(remote_agent_name, [])
        for note in notes:
            if note.startswith(lookup_tag) if tag_is_prefix else lookup_tag in note:
                notes.remove(note)
                return True
        return False


class Peers:
    """The state of an agent of NIXL with kvplan in front of it.

    Args:
        real: NIXL's agent.
        when, slots: when transfers are packed, and the ring for that.

    Attributes:
        real: as given.
        memory: the memory that is registered.
        packed: the end of packed transfers, or None.
    """

    packed: PackedEnd | None = None

    def __init__(self, real: Any, when: str, slots: Slots | None) -> None:
        self.real, self.memory = real, RegisteredMemory()
        self._ends: list[End] = []  # in the order in which they are asked for rows
        self._known: set[str] = set()  # peers that the engine has added
        name = str(getattr(real, "name", ""))
        with guarded("NIXL moves all transfers, or packs none"):
            if when != ALWAYS:
                self._ends.append(NearEnd(name, self.memory))
            if when != NEVER:
                self.packed = PackedEnd(name, self.memory, real, self._known, slots, always=when == ALWAYS)
                self._ends.append(self.packed)

    # ---- memory and peers --------------------------------------------------------------------------------------------

    def change(self, descriptors: Any, times: int) -> None:
        """Take it that memory was registered, once, or minus once, which peers then no longer use."""
        with guarded("kvplan does not offer this memory", logging.DEBUG):
            self.memory.change(descriptors, times)
        for end in self._ends if times < 0 else ():
            with guarded("memory is deregistered while peers may still use it"):
                end.withdraw()

    def card(self) -> bytes | None:
        """Return the card for peers; None if there is nothing to offer."""
        parts: dict[str, Any] = {}
        for end in self._ends:
            with guarded("kvplan offers no memory to peers"):
                parts[end.key] = end.part()
        return json.dumps(parts).encode() if any(parts.values()) else None

    def met(self, name: str, card: bytes | None) -> None:
        """Take a peer that was added, by the ends of which its card has a part."""
        self._known.add(name)
        for end in self._ends:
            with guarded(f"transfers with {name} go by NIXL", logging.INFO):
                part = None if card is None else json_of(card).get(end.key)
                peer = end.peers.get(name)
                if peer is not None and (peer.part != part or peer.left or peer.gone()):
                    peer.leave("it has new metadata")
                if part and name not in end.peers:
                    end.meet(name, part)

    def remove(self, agent: Any) -> None:
        """Remove a peer, also from NIXL. Transfers made before cannot be posted any more, as by NIXL."""
        for way in self.ways(text(agent)):
            way.leave(REMOVED)
        self._known.discard(text(agent))
        self.real.remove_remote_agent(agent)

    def ways(self, name: str) -> list[Neighbour]:
        """Return the ways to a peer."""
        return [end.peers[name] for end in self._ends if name in end.peers]

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def listed(self, own: Any, name: str, descriptors: Any, kind: Any = None, *, prepare: bool = False) -> PreparedList:
        """Return a prepared list, whose rows were looked up.

        Args:
            own: NIXL's handle, or None.
            name: name of the peer, or what stands for this process.
            descriptors, kind: see :meth:`Rows.of`.
            prepare: whether to warm up, so that the first transfer does not wait for compilers.
        """
        prepared = PreparedList(own)
        with guarded("left to NIXL", logging.DEBUG):
            rows = Rows.of(descriptors, kind)
            if name in {"", "NIXL_INIT_AGENT"}:  # this process
                prepared.placed = self.memory.place(rows)
            for way in self.ways(name):
                if prepared.placed is None:
                    prepared.neighbour, prepared.placed = way, way.place(rows)
            if prepare and prepared.placed is not None and (warmed := prepared.neighbour or self.packed) is not None:
                warmed.prepare(prepared.placed)
        return prepared

    def take(
        self, operation: str, sides: tuple[PreparedList, PreparedList], chosen: tuple[Any, Any], note: Any, by_nixl: Any
    ) -> TakenTransfer | None:  # fmt: skip
        """Return a transfer that kvplan moves; None if NIXL must make it, or refuse it.

        Args:
            operation: ``"READ"`` or ``"WRITE"``.
            sides: the list of this process's memory, and the list of the peer's.
            chosen: the indices of descriptors in each list.
            note: notification for the peer.
            by_nixl: makes the transfer by NIXL, of a notification and the indices in each list.
        """
        here, there, way = sides[0].placed, sides[1].placed, sides[1].neighbour
        if way is None or way.left or here is None or there is None or operation not in {"READ", "WRITE"}:
            return None
        try:
            at, to = indices(chosen[0], here.address.size), indices(chosen[1], there.address.size)
            if at is None or to is None or at.size != to.size:
                return None
            plan = _plan(operation, here, there, at, to)
            if plan is None or not way.wants(plan):
                return None
            return TakenTransfer(self.real, way, plan, bytes_of(note), lambda note: by_nixl(note, at, to))
        except Exception as error:  # NIXL makes it, or refuses it
            log.warning("NIXL moves a transfer: %r", error)
            return None


def _plan(operation: str, here: Placed, there: Placed, at: Int64Array, to: Int64Array) -> Plan | None:
    """Return the plan of rows of two lists; None if their sizes differ."""
    size: Any = here.sizes(at)
    same: Any = size == there.sizes(to)
    if not (same if isinstance(same, bool) else same.all()):
        return None
    pairs, reading = ((here, at), (there, to)), operation == "READ"
    (src, first), (dst, second) = pairs[::-1] if reading else pairs
    units, alignment = np.empty((2, at.size), np.int64), min(here.alignment, there.alignment)
    src.address.take(first, out=units[0], mode="clip")  # all are in range, and checks take longer
    dst.address.take(second, out=units[1], mode="clip")
    key = here.layout, reading
    program = there.programs.get(key) or there.programs.setdefault(key, RowProgram(src.layout, dst.layout))
    if isinstance(size, int):
        return program.of_units(units, size, alignment)
    return program.plan(units[0], units[1], size, alignment)


def text(name: Any) -> str:
    """Return a peer's name as a text."""
    return name.decode() if isinstance(name, bytes) else str(name)


def _taken(handle: Any) -> bool:
    return isinstance(handle, TakenTransfer) and handle.own is None


def _own(handle: Any) -> Any:
    return handle.own if isinstance(handle, TakenTransfer) else handle


# ---- NIXL's own class of agents --------------------------------------------------------------------------------------


def agent_class() -> Any:
    """Return NIXL's own class of agents.

    Raises:
        PathError: NIXL is not installed.
    """
    try:
        module = importlib.import_module(MODULE)  # which may switch kvplan's agent on
    except ImportError as error:
        raise PathError(f"this agent needs NIXL: pip install nixl ({error})") from error
    return replaced[-1] if replaced else getattr(module, CLASS)


def own_agent(name: str, config: Any, instantiate_all: bool, when: str) -> tuple[Any, str]:
    """Make an agent of NIXL; return it, and when its transfers are packed.

    A thread of packed transfers calls it, too, so it gets a config with which NIXL locks its calls. For a config, NIXL
    ignores ``instantiate_all``.
    """
    cls, module = agent_class(), importlib.import_module(MODULE)
    modes = None if instantiate_all else getattr(module, "nixl_thread_sync_t", None)
    if when == NEVER or modes is None:
        return cls(name, config, instantiate_all), NEVER
    config = copy.copy(config) or module.nixl_agent_config()
    if config.sync_mode in (None, modes.NIXL_THREAD_SYNC_NONE):
        config.sync_mode = modes.NIXL_THREAD_SYNC_STRICT
    return cls(name, config), when


def when_packed(packed: str | None) -> str:
    """Return when transfers are packed.

    Args:
        packed: an argument of the user's, or None for what the variable ``KVPLAN_NIXL_PACKED`` says.

    Raises:
        KVPlanError: the value is unknown.

    >>> when_packed("always")
    'always'
    """
    when = (os.environ.get(PACKED) or AUTO) if packed is None else packed
    if when not in WHEN:
        raise KVPlanError(f"{PACKED if packed is None else 'packed'} is {quoted(when)}; expected one of {listed(WHEN)}")
    return when


# ---- kvplan's card within NIXL's metadata ----------------------------------------------------------------------------
#
# It is the connection of one more backend, which no NIXL has. Every NIXL skips connections of backends that it does not
# have, so a peer without kvplan reads what it expects.
#
# Source: NIXL 1.5.1, ``nixlAgent::loadRemoteMD`` and ``nixlSerDes``: a field is its tag, eight bytes for its length,
# little-endian, the content, and ``|``. In front stand the agent's name and the number of connections; each connection
# is the name of a backend and its data.


def joined(metadata: bytes, card: bytes) -> bytes:
    """Return NIXL's metadata with a card as its first connection; as it is if it has another form, or no connection.

    >>> joined(b"of another form", b"a card")
    b'of another form'
    """
    try:
        _, at = _field(metadata, len(FRONT), b"Agent")
        count, end = _field(metadata, at, b"Conns")
    except ValueError:
        log.warning("the metadata of this NIXL has an unknown form, in which no card can travel: NIXL moves all")
        return metadata
    number = int.from_bytes(count, "little")
    if not number:  # a peer would miss a backend in common
        return metadata
    more = _written(b"Conns", (number + 1).to_bytes(8, "little")) + _written(b"t", BACKEND) + _written(b"c", card)
    return metadata[:at] + more + metadata[end:]


def card_in(metadata: bytes) -> bytes | None:
    """Return the card within NIXL's metadata; None if there is none."""
    try:
        _, at = _field(metadata, len(FRONT), b"Agent")
        _, at = _field(metadata, at, b"Conns")
        backend, at = _field(metadata, at, b"t")
        return _field(metadata, at, b"c")[0] if backend == BACKEND else None
    except ValueError:
        return None


def _field(metadata: bytes, at: int, tag: bytes) -> tuple[bytes, int]:
    """Return the content of a field and its end; raise ValueError if there is no such field."""
    start = at + len(tag) + 8
    end = start + int.from_bytes(metadata[start - 8 : start], "little")
    if not metadata.startswith(FRONT) or metadata[at : start - 8] != tag or metadata[end : end + 1] != b"|":
        raise ValueError(tag)
    return metadata[start:end], end + 1


def _written(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content + b"|"

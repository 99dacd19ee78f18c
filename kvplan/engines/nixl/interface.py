"""The agent of NIXL as engines call it, with kvplan in front: transfers within a machine are moved by kvplan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvplan.agents.packed.ring import checked_slots
from kvplan.engines.nixl.descriptor_rows import Rows, rows_of
from kvplan.engines.nixl.metadata import card_in, joined
from kvplan.engines.nixl.own_class import agent_class, locked_config, when_packed
from kvplan.engines.nixl.packed_peers import NEVER
from kvplan.engines.nixl.peers import Peers, judged, text
from kvplan.engines.nixl.transfers import PreparedList, TakenTransfer, bytes_of, nixl_error

log = logging.getLogger("kvplan.engines.nixl")
LOCAL = ("NIXL_INIT_AGENT", "")  # names that stand for this process in prep_xfer_dlist


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
        when, ring = when_packed(packed, own=agent is None), checked_slots(slots)
        if agent is None:
            config = None if when == NEVER else locked_config(nixl_conf, instantiate_all=instantiate_all)
            when = NEVER if config is None else when
            agent = agent_class()(agent_name, config or nixl_conf, instantiate_all)
        object.__setattr__(self, "_kvplan", Peers(agent, when, ring))

    def __getattr__(self, name: str) -> Any:
        if name == "_kvplan":  # not made, because __init__ has failed
            raise AttributeError(name)
        return getattr(self._kvplan.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kvplan.real, name, value)

    # Memory and metadata.

    def register_memory(self, reg_list: Any, *given: Any, **named: Any) -> Any:
        """Register memory with NIXL, and remember it to offer it to peers."""
        made = self._kvplan.real.register_memory(reg_list, *given, **named)
        self._kvplan.remember(made)
        return made

    def deregister_memory(self, dereg_list: Any, *given: Any, **named: Any) -> None:
        """Deregister memory, and no longer offer it to peers."""
        self._kvplan.forget(dereg_list)
        self._kvplan.real.deregister_memory(dereg_list, *given, **named)

    def get_agent_metadata(self) -> bytes:
        """Return NIXL's metadata with kvplan's card in it, if some of the memory can be offered."""
        metadata: bytes = self._kvplan.real.get_agent_metadata()
        card = self._kvplan.card()
        whole = metadata if card is None else joined(metadata, card)
        if whole is None:
            log.warning("the metadata of this NIXL has an unknown form, in which no card can travel: NIXL moves all")
        return whole or metadata

    def add_remote_agent(self, metadata: bytes) -> Any:
        """Add a peer to NIXL, and open its memory if its metadata has a card of this machine. Return its name."""
        name = self._kvplan.real.add_remote_agent(metadata)
        self._kvplan.met(text(name), card_in(metadata))
        return name

    def remove_remote_agent(self, agent: Any) -> None:
        """Remove a peer from NIXL, and let go of its memory."""
        self._kvplan.remove(agent)

    # Transfers.

    def prep_xfer_dlist(
        self, agent_name: Any, xfer_list: Any, mem_type: str | None = None, *given: Any, **named: Any
    ) -> PreparedList:
        """Prepare a descriptor list by NIXL, and look up where its rows lie in this process."""
        state, name = self._kvplan, text(agent_name)
        if isinstance(xfer_list, np.ndarray):
            rows = judged(Rows.of, xfer_list, mem_type)
        else:
            xfer_list = state.real.get_xfer_descs(xfer_list, mem_type)
            rows = judged(rows_of, xfer_list)
        own = state.real.prep_xfer_dlist(agent_name, xfer_list, mem_type, *given, **named)
        made = state.listed(own, "" if name in LOCAL else name, rows)
        state.prepare(made)
        return made

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Any, local_indices: Any, remote_xfer_side: Any, remote_indices: Any,
        notif_msg: Any = b"", *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Make a transfer of some descriptors of two prepared lists: kvplan's if it can move them, otherwise NIXL's."""
        real, lists = self._kvplan.real, (local_xfer_side, remote_xfer_side)
        if any(isinstance(one, PreparedList) and one.own is None for one in lists):
            raise nixl_error(real, "InvalidParam", "the descriptor list was released")
        local, remote = (one.own if isinstance(one, PreparedList) else one for one in lists)

        def by_nixl(note: Any, at: Any, to: Any) -> Any:
            return real.make_prepped_xfer(operation, local, at, remote, to, note, *given, **named)

        taken = self._kvplan.take(operation, lists, (local_indices, remote_indices), notif_msg, by_nixl)
        return by_nixl(notif_msg, local_indices, remote_indices) if taken is None else taken

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: Any,
        notif_msg: Any = b"", *given: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Make a transfer of two whole descriptor lists: kvplan's if it can move them, otherwise NIXL's."""
        state, name = self._kvplan, text(remote_agent)
        here, there = (judged(rows_of, some) if state.ways(name) else None for some in (local_descs, remote_descs))
        if here is not None and there is not None:

            def by_nixl(note: bytes, *_: Any) -> Any:  # from the rows: the caller may have changed its lists
                lists = (state.real.get_xfer_descs(rows.table(), rows.kind) for rows in (here, there))
                return state.real.initialize_xfer(operation, *lists, remote_agent, note, *given, **named)

            sides, every = (state.listed(None, "", here), state.listed(None, name, there)), np.arange(len(here))
            taken = state.take(operation, sides, (every, np.arange(len(there))), notif_msg, by_nixl)
            if taken is not None:
                return taken
        return state.real.initialize_xfer(
            operation, local_descs, remote_descs, remote_agent, notif_msg, *given, **named
        )

    def transfer(self, handle: Any, notif_msg: Any = b"") -> Any:
        """Post a transfer; return ``"DONE"`` or ``"PROC"``."""
        if isinstance(handle, TakenTransfer):
            return handle.post(bytes_of(notif_msg))
        return self._kvplan.real.transfer(handle, notif_msg)

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

    def estimate_xfer_cost(self, req_handle: Any) -> Any:
        """Return microseconds, their error, and the method of the estimate; kvplan estimates nothing."""
        return (0, 0, "UNKNOWN") if _taken(req_handle) else self._kvplan.real.estimate_xfer_cost(_own(req_handle))

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
        kept = self.update_notifs(list(backends)).get(remote_agent_name, [])
        for k, note in enumerate(kept):
            if note.startswith(lookup_tag) if tag_is_prefix else lookup_tag in note:
                del kept[k]
                return True
        return False


def _taken(handle: Any) -> bool:
    return isinstance(handle, TakenTransfer) and handle.own is None


def _own(handle: Any) -> Any:
    return handle.own if isinstance(handle, TakenTransfer) else handle

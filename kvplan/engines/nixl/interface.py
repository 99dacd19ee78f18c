"""The agent of NIXL as engines call it, with kvplan in front: transfers within a machine are moved by kvplan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvplan.engines.nixl.descriptor_rows import Rows, rows_of
from kvplan.engines.nixl.metadata import joined, split
from kvplan.engines.nixl.own_class import agent_class, locked_config
from kvplan.engines.nixl.packed_options import packed_options
from kvplan.engines.nixl.taking import State, bytes_of
from kvplan.engines.nixl.transfer_handles import PreparedList, TakenTransfer, Telemetry

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

    _kvplan: State

    def __init__(
        self, agent_name: str = "", nixl_conf: Any = None, instantiate_all: bool = False, *, agent: Any = None,
        packed: str | None = None, slots: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        options = packed_options(packed, slots, own=agent is None)
        if agent is None:
            config, options = locked_config(nixl_conf, options, instantiate_all=instantiate_all)
            agent = agent_class()(agent_name, config, instantiate_all)
        object.__setattr__(self, "_kvplan", State(agent, nixl_conf, options))

    def __getattr__(self, name: str) -> Any:
        if name == "_kvplan":  # not made, because __init__ has failed
            raise AttributeError(name)
        return getattr(self._kvplan.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kvplan.real, name, value)

    # Memory and metadata.

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> Any:
        """Register memory with NIXL, and remember it to offer it to peers."""
        state = self._kvplan
        made = state.real.register_memory(reg_list, mem_type, list(backends))
        state.remember(made)
        return made

    def deregister_memory(self, dereg_list: Any, backends: Sequence[str] = ()) -> None:
        """Deregister memory, and no longer offer it to peers."""
        state = self._kvplan
        state.forget(dereg_list)
        state.real.deregister_memory(dereg_list, list(backends))

    def get_agent_metadata(self) -> bytes:
        """Return NIXL's metadata with kvplan's card behind it, if some of the memory can be offered."""
        state = self._kvplan
        metadata: bytes = state.real.get_agent_metadata()
        card = state.card()
        return metadata if card is None else joined(metadata, card)

    def add_remote_agent(self, metadata: bytes) -> Any:
        """Add a peer to NIXL, and open its memory if its metadata has a card of this machine. Return its name."""
        state = self._kvplan
        own, card = split(metadata) if isinstance(metadata, bytes) else (metadata, None)
        name = state.real.add_remote_agent(own)
        state.met(_text(name), card)
        return name

    def remove_remote_agent(self, agent: Any) -> None:
        """Remove a peer from NIXL, and let go of its memory."""
        state = self._kvplan
        state.leave(_text(agent))
        try:
            state.real.remove_remote_agent(agent)
        finally:
            state.removed(_text(agent))

    # Transfers.

    def prep_xfer_dlist(
        self, agent_name: Any, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> PreparedList:
        """Prepare a descriptor list by NIXL, and look up where its rows lie in this process."""
        state, name = self._kvplan, _text(agent_name)
        rows = None
        if isinstance(xfer_list, np.ndarray):
            if mem_type is not None:
                rows = state.rows(lambda: Rows.of(xfer_list, mem_type))
        else:
            xfer_list = state.real.get_xfer_descs(xfer_list, mem_type)
            if xfer_list is not None:
                rows = state.rows(lambda: rows_of(xfer_list))
        own = state.real.prep_xfer_dlist(agent_name, xfer_list, mem_type, list(backends))
        made = PreparedList(own, "" if name in LOCAL else name, rows=rows)
        state.place(made)
        state.prepare(made)
        return made

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> Any:
        """Make a transfer of some descriptors of two prepared lists: kvplan's if it can move them, otherwise NIXL's."""
        state = self._kvplan
        lists, chosen = (local_xfer_side, remote_xfer_side), (local_indices, remote_indices)
        local, remote = (state.own(one) if isinstance(one, PreparedList) else one for one in lists)

        def by_nixl(note: bytes, at: Any, to: Any) -> Any:
            return state.real.make_prepped_xfer(operation, local, at, remote, to, note, list(backends), skip_desc_merge)

        taken = state.take(operation, lists, chosen, notif_msg, by_nixl)
        return by_nixl(notif_msg, *chosen) if taken is None else taken

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Any,
        remote_descs: Any,
        remote_agent: Any,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> Any:
        """Make a transfer of two whole descriptor lists: kvplan's if it can move them, otherwise NIXL's."""
        state, name, taken = self._kvplan, _text(remote_agent), None
        if state.serves(name):
            sides = [PreparedList(None, peer) for peer in ("", name)]
            for side, descriptors in zip(sides, (local_descs, remote_descs), strict=True):
                side.rows = state.rows(lambda descriptors=descriptors: rows_of(descriptors))  # type: ignore[misc]
                state.place(side)
            local, remote = (side.rows for side in sides)
            if local is not None and remote is not None and len(local) == len(remote):

                def by_nixl(note: bytes, *_: Any) -> Any:  # from the rows: the caller may have changed its lists
                    here, there = (state.real.get_xfer_descs(rows.table(), rows.kind) for rows in (local, remote))
                    return state.real.initialize_xfer(operation, here, there, remote_agent, note, list(backends))

                every = np.arange(len(local), dtype=np.int64)
                taken = state.take(operation, sides, (every, every), notif_msg, by_nixl)
        if taken is not None:
            return taken
        return state.real.initialize_xfer(operation, local_descs, remote_descs, remote_agent, notif_msg, list(backends))

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        """Post a transfer; return ``"DONE"`` or ``"PROC"``."""
        if isinstance(handle, TakenTransfer):
            return handle.post(bytes_of(notif_msg))
        state: str = self._kvplan.real.transfer(handle, notif_msg)
        return state

    def check_xfer_state(self, handle: Any) -> str:
        """Return ``"DONE"``, ``"PROC"`` or, from NIXL only, ``"ERR"``."""
        if isinstance(handle, TakenTransfer) and handle.own is None:
            return handle.look()
        state: str = self._kvplan.real.check_xfer_state(_own(handle))
        return state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """Return the figures of a finished transfer; see :class:`kvplan.engines.nixl.Telemetry`."""
        if not isinstance(handle, TakenTransfer) or handle.own is not None:
            return self._kvplan.real.get_xfer_telemetry(_own(handle))
        if not self._kvplan.telemetry:
            raise self._kvplan.error("NoTelemetry", "the agent's config has no capture_telemetry")
        if handle.telemetry is None:
            raise self._kvplan.error("NotPosted", "the transfer has not ended")
        found: Telemetry = handle.telemetry
        return found

    def query_xfer_backend(self, handle: Any) -> str:
        """Return the name of the backend that moves a transfer; ``"KVPLAN"`` for kvplan."""
        if isinstance(handle, TakenTransfer) and handle.own is None:
            return "KVPLAN"
        name: str = self._kvplan.real.query_xfer_backend(_own(handle))
        return name

    def estimate_xfer_cost(self, req_handle: Any) -> tuple[int, int, str]:
        """Return microseconds, their error, and the method of the estimate; kvplan estimates nothing."""
        if isinstance(req_handle, TakenTransfer) and req_handle.own is None:
            return 0, 0, "UNKNOWN"
        cost: tuple[int, int, str] = self._kvplan.real.estimate_xfer_cost(_own(req_handle))
        return cost

    def send_notif(self, remote_agent_name: Any, notif_msg: Any, backend: str | None = None) -> None:
        """Send a notification to a peer."""
        self._kvplan.notify(_text(remote_agent_name), bytes_of(notif_msg), backend)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Return new notifications, by the names of peers."""
        return self._kvplan.notes(list(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Add new notifications to those that NIXL's agent keeps in ``notifs``, and return all of them."""
        state = self._kvplan
        if state.packed is None:
            found: dict[str, list[bytes]] = state.real.update_notifs(list(backends))
            return found
        kept: dict[str, list[bytes]] = state.real.notifs
        for name, notes in state.notes(list(backends)).items():
            kept.setdefault(name, []).extend(notes)
        return kept

    def check_remote_xfer_done(
        self, remote_agent_name: str, lookup_tag: bytes, backends: Sequence[str] = (), tag_is_prefix: bool = True
    ) -> bool:
        """Return whether a peer has sent a notification with a tag, and take the first such notification."""
        kept = self.update_notifs(backends).get(remote_agent_name, [])
        for k, note in enumerate(kept):
            if note.startswith(lookup_tag) if tag_is_prefix else lookup_tag in note:
                del kept[k]
                return True
        return False

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer; one in flight is cancelled, or its bytes are waited for."""
        handle.release()

    def release_dlist_handle(self, handle: Any) -> None:
        """Release a prepared descriptor list."""
        handle.release()


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _own(handle: Any) -> Any:
    return handle.own if isinstance(handle, TakenTransfer) else handle

"""The agent of NIXL as engines call it, with kvplan in front: transfers within a machine are moved by kvplan."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvplan.engines.nixl.descriptor_rows import KINDS, Rows, rows_of
from kvplan.engines.nixl.handles import Neighbour, PreparedList, TakenTransfer, Telemetry
from kvplan.engines.nixl.metadata import joined, split
from kvplan.engines.nixl.neighbours import Neighbourhood
from kvplan.engines.nixl.row_plans import RowProgram
from kvplan.engines.nixl.spans import Placed, Registered
from kvplan.errors import KVPlanError, TransferError
from kvplan.layout.strides import Int64Array

log = logging.getLogger("kvplan.engines.nixl")
LOCAL = ("NIXL_INIT_AGENT", "")  # names that stand for this process in prep_xfer_dlist
OPERATIONS = ("READ", "WRITE")


class Agent:
    """An agent with the interface of ``nixl._api.nixl_agent`` (NIXL 1.5.1), which moves bytes within a machine itself.

    It makes NIXL's agent and passes every call on to it. It takes over a transfer whose descriptors lie in memory that
    a peer of this machine offers. All other transfers, metadata and notifications are NIXL's. ``docs/engines/nixl.md``
    says which memory a peer can offer.

    Args:
        agent_name, nixl_conf, instantiate_all: as for ``nixl_agent``.
        agent: an existing agent of NIXL to put kvplan in front of; then the other arguments are not used.

    Raises:
        PathError: NIXL is not installed.

    >>> from nixl._api import nixl_agent_config  # doctest: +SKIP
    >>> agent = Agent("decode-0", nixl_agent_config(backends=["UCX"]))  # doctest: +SKIP
    """

    _kvplan: _State

    def __init__(
        self, agent_name: str = "", nixl_conf: Any = None, instantiate_all: bool = False, *, agent: Any = None
    ) -> None:
        if agent is None:
            from kvplan.engines.nixl.switch import agent_class

            agent = agent_class()(agent_name, nixl_conf, instantiate_all)
        object.__setattr__(self, "_kvplan", _State(agent, nixl_conf))

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
        own, card = split(metadata)
        name = state.real.add_remote_agent(own)
        state.met(_text(name), card)
        return name

    def remove_remote_agent(self, agent: Any) -> None:
        """Remove a peer from NIXL, and let go of its memory."""
        state = self._kvplan
        state.real.remove_remote_agent(agent)
        state.leave(_text(agent))

    # Transfers.

    def prep_xfer_dlist(
        self, agent_name: Any, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> PreparedList:
        """Prepare a descriptor list by NIXL, and look up where its rows lie in this process."""
        state, name = self._kvplan, _text(agent_name)
        rows = None
        if isinstance(xfer_list, np.ndarray) and mem_type in KINDS:
            rows = state.rows(lambda: Rows.of(xfer_list, mem_type))
        else:
            xfer_list = state.real.get_xfer_descs(xfer_list, mem_type)
            if xfer_list is not None:
                rows = state.rows(lambda: rows_of(xfer_list))
        own = state.real.prep_xfer_dlist(agent_name, xfer_list, mem_type, list(backends))
        made = PreparedList(own, "" if name in LOCAL else name, rows=rows)
        state.place(made)
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
        lists = (local_xfer_side, remote_xfer_side)

        def by_nixl(note: bytes) -> Any:
            local, remote = (one.own if isinstance(one, PreparedList) else one for one in lists)
            return state.real.make_prepped_xfer(
                operation, local, local_indices, remote, remote_indices, note, list(backends), skip_desc_merge
            )

        taken = state.take(operation, *lists, local_indices, remote_indices, notif_msg, by_nixl)
        return by_nixl(notif_msg) if taken is None else taken

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
        state, name = self._kvplan, _text(remote_agent)

        def by_nixl(note: bytes) -> Any:
            return state.real.initialize_xfer(
                operation, local_descs, remote_descs, remote_agent, note, list(backends)
            )

        taken = None
        if name in state.neighbours:
            sides = [PreparedList(None, peer) for peer in ("", name)]
            for side, descriptors in zip(sides, (local_descs, remote_descs), strict=True):
                side.rows = state.rows(lambda descriptors=descriptors: rows_of(descriptors))  # type: ignore[misc]
                state.place(side)
            counts = [0 if side.rows is None else len(side.rows) for side in sides]
            if counts[0] == counts[1]:
                every = np.arange(counts[0], dtype=np.int64)
                taken = state.take(operation, *sides, every, every, notif_msg, by_nixl)
        return by_nixl(notif_msg) if taken is None else taken

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        """Post a transfer; return ``"DONE"`` or ``"PROC"``."""
        if isinstance(handle, TakenTransfer):
            return handle.post(_bytes(notif_msg))
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

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer; one in flight is cancelled, or its bytes are waited for."""
        handle.release()

    def release_dlist_handle(self, handle: Any) -> None:
        """Release a prepared descriptor list."""
        handle.release()


class _State:
    """What an agent knows: NIXL's agent, the registered memory, and the peers of this machine.

    Args:
        real: NIXL's agent.
        config: its config, or None.

    Attributes:
        real: as given.
        telemetry: whether figures of transfers are asked for.
        neighbours: by name, peers whose memory is open here.
    """

    def __init__(self, real: Any, config: Any) -> None:
        self.real = real
        self.telemetry = config is None or bool(getattr(config, "capture_telemetry", True))
        self.neighbours: dict[str, Neighbour] = {}
        self._cards: dict[str, bytes | None] = {}
        self._registered = Registered()
        self._around = Neighbourhood(str(getattr(real, "name", "")))
        self._lock = threading.RLock()
        self._programs: dict[tuple[int, int], RowProgram] = {}

    # Memory and peers.

    def rows(self, read: Any) -> Rows | None:
        """Return the rows that ``read`` reads; None if kvplan cannot move such rows."""
        try:
            found: Rows = read()
        except KVPlanError as error:
            log.debug("left to NIXL: %s", error)
            return None
        return found

    def remember(self, descriptors: Any) -> None:
        """Remember registered memory."""
        rows = self.rows(lambda: rows_of(descriptors))
        if rows is not None:
            with self._lock:
                self._registered.add(rows)

    def forget(self, descriptors: Any) -> None:
        """Forget memory, and withdraw the offer of it."""
        rows = self.rows(lambda: rows_of(descriptors))
        if rows is not None:
            with self._lock:
                self._registered.remove(rows)
                self._around.withdraw()

    def card(self) -> bytes | None:
        """Return the card that offers the registered memory; None if there is nothing to offer."""
        with self._lock:
            try:
                return self._around.card(self._registered.union(), self._registered.version)
            except KVPlanError as error:
                log.warning("kvplan offers no memory to peers, NIXL moves all transfers: %s", error)
                return None

    def met(self, name: str, card: bytes | None) -> None:
        """Open the memory of a peer that was added, if its card is of this machine."""
        with self._lock:
            known = self.neighbours.get(name)
            if known is not None and card == self._cards.get(name) and not known.gone():
                return
            self.leave(name)
            if card is None:
                return
            try:
                neighbour = self._around.meet(name, card)
            except KVPlanError as error:
                log.info("transfers with %s go by NIXL: %s", name, error)
                return
            self.neighbours[name], self._cards[name] = neighbour, card
        log.info("kvplan takes over transfers with %s: %s; all others go by NIXL", name, neighbour.words)

    def leave(self, name: str) -> None:
        """Let go of a peer's memory."""
        with self._lock:
            neighbour = self.neighbours.pop(name, None)
            self._cards.pop(name, None)
            self._programs.clear()
        if neighbour is not None:
            neighbour.close()

    # Transfers.

    def place(self, made: PreparedList) -> None:
        """Look up where the rows of a list lie in this process."""
        with self._lock:
            made.version = self._registered.version
            if made.rows is None:
                return
            if not made.peer:
                made.placed = self._around.spans(self._registered.union(), made.version).place(made.rows)
            elif (neighbour := self.neighbours.get(made.peer)) is not None:
                made.neighbour, made.placed = neighbour, neighbour.spans.place(made.rows)

    def take(
        self, operation: str, local: Any, remote: Any, local_indices: Any, remote_indices: Any, note: Any, by_nixl: Any
    ) -> TakenTransfer | None:
        """Return a transfer that kvplan moves; None if NIXL must make it, or refuse it."""
        if not isinstance(local, PreparedList) or not isinstance(remote, PreparedList) or operation not in OPERATIONS:
            return None
        neighbour = remote.neighbour
        if neighbour is None or not self.knows(neighbour) or local.peer:
            return None
        if local.version != self._registered.version:
            self.place(local)
        here, there = local.placed, remote.placed
        if here is None or there is None:
            return None
        at, to = indices(local_indices, len(here.rows)), indices(remote_indices, len(there.rows))
        if at is None or to is None or at.size != to.size:
            return None
        size: int | Int64Array = here.rows.one_size
        if not size or size != there.rows.one_size:
            size = here.rows.sizes(at)
            if not np.array_equal(size, there.rows.sizes(to)):
                return None
        src, dst = (there, here) if operation == "READ" else (here, there)
        sides = here.rows.addresses(at), there.rows.addresses(to)
        plan = self._program(src, dst).plan(
            *(sides if operation == "WRITE" else sides[::-1]), size, min(here.rows.alignment, there.rows.alignment)
        )

        def pass_on(note: bytes) -> tuple[Any, str]:
            handle = by_nixl(note)
            return handle, self.real.transfer(handle)

        return TakenTransfer(self, neighbour, remote.peer, plan, at.size, _bytes(note), pass_on)

    def _program(self, src: Placed, dst: Placed) -> RowProgram:
        key = id(src.layout), id(dst.layout)
        known = self._programs.get(key)
        if known is None or known.src is not src.layout or known.dst is not dst.layout:
            known = self._programs[key] = RowProgram(src.layout, dst.layout)
        return known

    # What transfers need.

    def error(self, kind: str, why: str) -> Exception:
        """Return NIXL's exception of a kind, with NIXL's text in front; TransferError if this NIXL has none."""
        module = sys.modules.get(type(self.real).__module__)
        made = getattr(getattr(module, "nixlBind", module), f"nixl{kind}Error", TransferError)
        words = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind).upper()
        found: Exception = made(f"NIXL_ERR{words}: {why}")
        return found

    def notify(self, peer: str, note: bytes) -> None:
        """Send a notification by NIXL."""
        self.real.send_notif(peer, note)

    def knows(self, neighbour: Neighbour) -> bool:
        """Return whether a peer has been neither removed nor added again since."""
        return self.neighbours.get(neighbour.name) is neighbour

    def lost(self, neighbour: Neighbour, why: str) -> None:
        """Forget a peer that is gone, as NIXL does after it noticed."""
        if not self.knows(neighbour):
            return
        log.warning("peer %s is gone: %s", neighbour.name, why)
        self.leave(neighbour.name)
        try:
            self.real.remove_remote_agent(neighbour.name)
        except Exception:  # noqa: BLE001  # NIXL may have noticed before
            log.debug("NIXL had already forgotten %s", neighbour.name)


def indices(given: Any, count: int) -> Int64Array | None:
    """Return indices as an int64 array; None if there are none, or one is out of range, which NIXL then refuses.

    >>> indices([0, 2], 3), indices([3], 3), indices([], 3)
    (array([0, 2]), None, None)
    """
    array = np.asarray(given)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        return None
    made = np.ascontiguousarray(array, dtype=np.int64)
    if int(made.view(np.uint64).max()) >= count:  # a negative index is a large one
        return None
    return made


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _bytes(note: Any) -> bytes:
    return note.encode() if isinstance(note, str) else bytes(note)


def _own(handle: Any) -> Any:
    return handle.own if isinstance(handle, TakenTransfer) else handle


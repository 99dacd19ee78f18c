"""Transfers between processes, on one machine or two: kvplan makes the plans, and NIXL moves the bytes.

Source: NIXL 1.5.1, Python API of its agent. kvplan has no transport of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.stats import ExecutorStats
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_card import check_name, read, write
from kvplan.nixl.nixl_connection import Connection, End, Span, in_words, spans_of
from kvplan.nixl.nixl_peer import NixlPeer
from kvplan.nixl.nixl_wire import NixlRing
from kvplan.plan.nixl_lists import memory_of

log = logging.getLogger("kvplan.nixl")


class NixlAgent:
    """This process's end of NIXL: its registered layouts, and the peers that it has connected to.

    Args:
        name: name of this process; every peer has another name.
        layouts: layouts by the names that peers will see; their memory must stay allocated until :meth:`close`.
        backends: names of the NIXL backends (transports) that the agent may use.
        agent: an existing ``nixl_agent`` of the same name; by default a new agent.
        progress_thread: whether a new agent gets NIXL's own thread, which takes a whole core; without it, transfers of
            peers move on only while this process calls :meth:`notes`.

    Raises:
        PathError: NIXL is not installed, has none of these backends, or the memory is neither the CPU's nor CUDA's.
        KVPlanError: ``agent`` has another name.
        LayoutError: the memory of a layout is not this process's.
        TransferError: NIXL cannot register the memory.

    Two processes exchange the bytes of :meth:`card` over any channel. After :meth:`meet`, each process can read and
    write the other's layouts; the other process makes no call for it. Several threads may call the methods. A card
    gives access to this memory, so send it only to processes that may have it.
    """

    def __init__(
        self,
        name: str,
        layouts: Mapping[str, KVLayout],
        *,
        backends: Sequence[str] = ("UCX",),
        agent: Any = None,
        progress_thread: bool = True,
    ) -> None:
        check_name(name)
        self.name = name
        self.layouts = dict(layouts)
        self.peers: dict[str, NixlPeer] = {}
        for key, layout in self.layouts.items():
            if not isinstance(layout, KVLayout):
                raise LayoutError(f"layout {key!r} is a {type(layout).__name__}; give a KVLayout")
            if layout.addresses != "memory":
                raise LayoutError(f"layout {key!r} is not of this process's memory; it cannot be registered")
        spans = spans_of(self.layouts.values())
        registrations = _registrations(spans)
        self.nixl = agent if agent is not None else _new_agent(name, list(backends), progress_thread=progress_thread)
        if (known := getattr(self.nixl, "name", name)) != name:
            raise KVPlanError(f"agent is called {known!r} by NIXL and {name!r} here; give it the same name")
        self._end = End(name, spans, self.nixl)
        self._registered: list[Any] = []
        try:
            for memory, rows in registrations.items():
                self._registered.append(self.nixl.register_memory(rows, memory))
        except Exception as error:
            self._deregister()
            raise TransferError(f"NIXL cannot register the memory of {name!r}: {in_words(error)}") from error

    def card(self) -> bytes:
        """Return the data that a peer needs to :meth:`meet` this process: its layouts and NIXL's metadata."""
        return write(self.name, self.layouts, self.metadata())

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this process, which a card holds."""
        self._end.check_open()
        with self._end.lock:
            try:
                return bytes(self.nixl.get_agent_metadata())
            except Exception as error:
                raise TransferError(f"NIXL gives no metadata of {self.name!r}: {in_words(error)}") from error

    def meet(self, card: bytes) -> NixlPeer:
        """Connect to a peer by its card. A new card of a known peer replaces that peer, and its old transfers fail.

        Raises:
            LayoutError: the card cannot be read, or one of its layouts is invalid.
            KVPlanError: the card is this process's own.
            TransferError: NIXL does not accept the card's metadata.
        """
        self._end.check_open()
        name, layouts, metadata = read(card)
        return self.connect(name, layouts, metadata)

    def connect(self, name: str, layouts: Mapping[str, KVLayout], metadata: bytes) -> NixlPeer:
        """Connect to a peer as :meth:`meet` does, by the content of a card that was read already."""
        end = self._end
        end.check_open()
        if name == self.name:
            raise KVPlanError(f"the card is of {name!r}, which is this process; give a peer's, and each its own name")
        with end.lock:
            end.check_open()
            if name in self.peers:
                self.forget(self.peers[name])
            peer = NixlPeer(Connection(end, name, metadata), layouts)
            peer.connection.join()
            self.peers[name] = peer
        log.info("met %s", name, extra={"kvplan_peer": name, "kvplan_layouts": list(layouts)})
        return peer

    def forget(self, peer: NixlPeer) -> None:
        """Remove a peer; its transfers that have not ended fail. A second call for a peer does nothing.

        Raises:
            KVPlanError: ``peer`` is not a peer of this agent.
        """
        if not isinstance(peer, NixlPeer) or peer.connection.end is not self._end:
            raise KVPlanError(f"peer is {peer!r}; give what meet() of {self.name!r} returned")
        with self._end.lock:
            if peer.connection.forgotten:
                return  # NIXL knows peers by name: it would remove the next peer of this name
            peer.connection.forget()
            del self.peers[peer.name]
        log.info("forgot %s", peer.name, extra={"kvplan_peer": peer.name})

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that peers sent with transfers that have ended since the last call, as (peer, note)."""
        self._end.check_open()
        with self._end.lock:
            found = self.nixl.get_new_notifs()
        if not found:
            return []
        return [
            (name.decode() if isinstance(name, bytes) else str(name), bytes(note))
            for name, notes in found.items()
            for note in notes
        ]

    @property
    def lock(self) -> Any:
        """The lock that every call of NIXL takes."""
        return self._end.lock

    def ring(self, address: int, nbytes: int, device: str) -> NixlRing:
        """Register memory into which peers write packed transfers; see :class:`kvplan.nixl.nixl_wire.NixlRing`."""
        return NixlRing(self._end, address, nbytes, device)

    @property
    def end(self) -> End:
        """The state that this agent shares with its peers and wires."""
        return self._end

    def add(self, peer: str, metadata: bytes) -> None:
        """Add metadata that a peer sent, for example of its ring, to what NIXL knows of it.

        Raises:
            TransferError: NIXL does not accept it, for example since the peer was restarted; or it is of another agent.
        """
        with self._end.lock:
            self._end.check_open()
            Connection(self._end, peer, metadata).join()

    def replace(self, peer: str, metadata: bytes) -> None:
        """Add metadata that a peer sent after its restart, in place of what NIXL knew of it; see :meth:`add`."""
        with self._end.lock:
            self._end.check_open()
            connection = Connection(self._end, peer, metadata)
            connection.leave()
            connection.join()

    def renew(self, peer: str) -> None:
        """Renew the connection to a peer of this agent, unless a transfer uses it; for other peers, do nothing.

        Raises:
            TransferError: NIXL does not take the peer's metadata any more.
        """
        with self._end.lock:
            if (known := self.peers.get(peer)) is not None:
                known.connection.rejoin(known.connection.joined)

    def hold(self, peer: str, may_renew: Callable[[], bool]) -> None:
        """Let NIXL go on knowing a peer until :meth:`let_go`, also if it is forgotten.

        Args:
            peer: its name.
            may_renew: returns whether its connection may be renewed now, which ends what moves over it.
        """
        with self._end.lock:
            self._end.holds[peer] = may_renew

    def let_go(self, peer: str) -> None:
        """Undo :meth:`hold`: a peer that is no peer of this agent is removed from NIXL."""
        with self._end.lock:
            if self._end.holds.pop(peer, None) is not None and peer not in self.peers:
                Connection(self._end, peer, b"").leave()

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note to a peer that NIXL knows; raise TransferError if NIXL does not send it."""
        Connection(self._end, peer, b"").tell(note)

    def stats(self) -> ExecutorStats:
        """Return the sums of this agent's transfers so far; see :meth:`kvplan.Executor.stats`."""
        with self._end.lock:
            flying = sum(len(peer.connection.flying) for peer in self.peers.values())
        return replace(self._end.tally.stats(), in_flight=flying)

    def close(self) -> None:
        """Remove all peers and deregister the memory; transfers that have not ended fail."""
        end = self._end
        with end.lock:
            if end.closed:
                return
            for peer in tuple(self.peers.values()):
                self.forget(peer)
            end.closed = True
            end.release([])
            self._deregister()
            end.kept.clear()

    def _deregister(self) -> None:
        for registered in self._registered:
            try:
                self.nixl.deregister_memory(registered)
            except Exception as error:  # noqa: BLE001  # the rest must still be deregistered
                log.warning("NIXL keeps memory of %s registered: %s", self.name, in_words(error))
        self._registered.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _new_agent(name: str, backends: list[str], *, progress_thread: bool) -> Any:
    try:
        from nixl import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise PathError(f"transfers between processes need NIXL: pip install nixl ({error})") from error
    try:
        made = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=backends))
    except Exception as error:
        raise PathError(f"NIXL cannot make an agent here: {in_words(error)}") from error
    if not any(backend in made.backends for backend in backends):
        raise PathError(f"NIXL here has none of the backends {backends}; it has {made.get_plugin_list()}")
    return made


def _registrations(spans: frozenset[Span]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the rows to register with NIXL, by kind of memory, without spans that lie inside another span."""
    kept: dict[str, list[tuple[int, int, int]]] = {}
    ends: dict[str, int] = {}
    for address, nbytes, device in sorted(spans, key=lambda span: (span[2], span[0], -span[1])):
        if address + nbytes <= ends.get(device, 0):
            continue
        ends[device] = address + nbytes
        memory, number = memory_of(device, "a layout")
        kept.setdefault(memory, []).append((address, nbytes, number))
    return {memory: np.array(rows, dtype=np.int64) for memory, rows in kept.items()}

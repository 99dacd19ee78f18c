"""Plans between processes, on one machine or two: NIXL moves the bytes, kvplan tells it which.

Checked against NIXL 1.5.1, whose agent's Python API is all that is used: kvplan has no transport of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvplan.base.integers import integer
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.stats import ExecutorStats, Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl import card as nixl_card
from kvplan.nixl.peer import NixlTransfer
from kvplan.plan.nixl_lists import memory_of
from kvplan.plan.plan import Plan

Span = tuple[int, int, str]  # address, bytes, device

log = logging.getLogger("kvplan.nixl")


class NixlAgent:
    """One process's end: its layouts, registered with NIXL, and the peers it has met.

    Args:
        name: of this process, different from every peer's.
        layouts: by names that peers will find them under; their memory must stay until :meth:`close`.
        backends: NIXL's, the transports it may take.
        agent: a ``nixl_agent`` that is there already, of that name; by default one is made.

    Raises:
        PathError: NIXL is not installed, or has none of these backends; or memory of neither CPU nor CUDA.
        KVPlanError: ``agent`` has another name, under which peers would know it.
        LayoutError: a layout whose memory is not this process's.
        TransferError: NIXL refuses to register the memory.

    Two processes exchange what :meth:`card` gives, by any channel of theirs. From then on either can read from the
    other's layouts and write to them; the other does nothing for it. Its methods may be called by several threads.
    A card holds what it takes to reach this memory: give it to those who may.
    """

    def __init__(
        self,
        name: str,
        layouts: Mapping[str, KVLayout],
        *,
        backends: Sequence[str] = ("UCX",),
        agent: Any = None,
    ) -> None:
        nixl_card.check_name(name)
        self.name = name
        self.layouts = dict(layouts)
        self.tally = Tally()
        self.lock = threading.RLock()
        self.closed = False
        self.peers: dict[str, NixlPeer] = {}
        self.kept: list[tuple[Any, Plan]] = []  # handles that NIXL could not let go of, and whose memory they reach
        self.spans = _spans(self.layouts)
        registrations = _registrations(self.spans)
        self.nixl = agent if agent is not None else _new_agent(name, list(backends))
        if (known := getattr(self.nixl, "name", name)) != name:
            raise KVPlanError(f"agent is called {known!r} by NIXL and {name!r} here; give it the same name")
        self._registered: list[Any] = []
        try:
            for memory, rows in registrations.items():
                self._registered.append(self.nixl.register_memory(rows, memory))
        except Exception as error:
            self._deregister()
            raise TransferError(f"NIXL cannot register the memory of {name!r}: {_said(error)}") from error

    def card(self) -> bytes:
        """What a peer must know to :meth:`meet` this process: its layouts and NIXL's metadata."""
        self.check_open()
        with self.lock:
            metadata = self.nixl.get_agent_metadata()
        return nixl_card.write(self.name, self.layouts, metadata)

    def meet(self, card: bytes) -> NixlPeer:
        """Get to know a peer by its card; or one that came back, by its new card: the old one's transfers fail.

        Raises:
            LayoutError: what is no card, or holds a layout that cannot be.
            KVPlanError: the card is this process's own.
            TransferError: NIXL does not take its metadata.
        """
        self.check_open()
        name, layouts, metadata = nixl_card.read(card)
        if name == self.name:
            raise KVPlanError(f"the card is of {name!r}, which is this process; give a peer's, and each its own name")
        with self.lock:
            self.check_open()
            if name in self.peers:
                self.forget(self.peers[name])
            peer = NixlPeer(self, name, layouts, metadata)
            peer.join()
            self.peers[name] = peer
        log.info("met %s", name, extra={"kvplan_peer": name, "kvplan_layouts": list(layouts)})
        return peer

    def forget(self, peer: NixlPeer) -> None:
        """Let go of a peer; transfers with it that have not ended fail. One that was forgotten already stays so.

        Raises:
            KVPlanError: what is no peer of this agent's.
        """
        if not isinstance(peer, NixlPeer) or peer.agent is not self:
            raise KVPlanError(f"peer is {peer!r}; give what meet() of {self.name!r} returned")
        with self.lock:
            if self.peers.get(peer.name) is not peer:
                return  # NIXL knows peers by name: it would forget the one that came after this one
            for transfer in tuple(peer.flying):
                transfer.give_up(f"the peer {peer.name!r} was forgotten")
            peer.leave()
            del self.peers[peer.name]
        log.info("forgot %s", peer.name, extra={"kvplan_peer": peer.name})

    def notes(self) -> list[tuple[str, bytes]]:
        """What peers said with transfers that have ended since the last call: (peer, note)."""
        self.check_open()
        with self.lock:
            found = self.nixl.get_new_notifs()
        return [(_text(name), bytes(note)) for name, notes in found.items() for note in notes]

    def stats(self) -> ExecutorStats:
        """What transfers of this agent did so far; see :meth:`kvplan.Executor.stats`."""
        with self.lock:
            flying = sum(len(peer.flying) for peer in self.peers.values())
        return replace(self.tally.stats(), in_flight=flying)

    def close(self) -> None:
        """Forget all peers and take the memory back; transfers that have not ended fail."""
        with self.lock:
            if self.closed:
                return
            for peer in tuple(self.peers.values()):
                self.forget(peer)
            self.closed = True
            self.release([])
            self._deregister()
            self.kept.clear()

    def release(self, held: list[tuple[Any, Plan]]) -> None:
        """Give NIXL's handles back. One in use is told to end by that, and given back with the next ones."""
        kept, self.kept = self.kept, []
        for handle, plan in [*kept, *held]:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001  # it stays, and the plan's memory with it
                self.kept.append((handle, plan))
                log.debug("NIXL cannot release %r: %s", handle, error)

    def check_open(self) -> None:
        """Raises:
        TransferError: it is closed.
        """
        if self.closed:
            raise TransferError(f"the agent {self.name!r} is closed")

    def _deregister(self) -> None:
        for registered in self._registered:
            try:
                self.nixl.deregister_memory(registered)
            except Exception as error:  # noqa: BLE001  # nothing more can be done, and the rest must still be given back
                log.warning("NIXL keeps memory of %s registered: %s", self.name, _said(error))
        self._registered.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class NixlPeer:
    """A process that was met. Made by :meth:`NixlAgent.meet`.

    Attributes:
        name: its own.
        layouts: its layouts by name, to compile against: their addresses are the peer's.
    """

    def __init__(self, agent: NixlAgent, name: str, layouts: Mapping[str, KVLayout], metadata: bytes) -> None:
        self.agent = agent
        nixl_card.check_name(name)
        self.name = name
        self.layouts = dict(layouts)
        self.spans = _spans(self.layouts, here=False)
        self.joined = 0  # how often; a transfer that failed knows by it whether another one has joined again since
        self.flying: list[NixlTransfer] = []
        self._metadata = metadata

    def submit(
        self, plan: Plan, *, note: bytes = b"", attempts: int = 1, deadline: float | None = None
    ) -> NixlTransfer:
        """Begin a transfer and return at once.

        Args:
            plan: between layouts of this process, which were registered, and the peer's. It must not be needed in any
                order with others: NIXL keeps none. Whatever else uses the memory must be done with it.
            note: sent to the peer when the last byte has moved; it finds it in :meth:`NixlAgent.notes`.
            attempts: how often to try in all. Between two attempts the connection is made anew.
            deadline: seconds after which it is given up; there is no other end where a peer hangs.

        Raises:
            KVPlanError: what is no plan, no note, or no number of attempts or seconds.
            PathError: the plan is not between this process and this peer, or takes memory of two kinds on one side.
            LayoutError: a destination that is read-only.
            TransferError: the agent is closed, or the peer was forgotten.
        """
        self.agent.check_open()
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; submit takes what CopyProgram.plan or join made")
        if not isinstance(note, bytes):
            raise KVPlanError(f"note is a {type(note).__name__}; give bytes")
        right = "a transfer is tried at least once"
        attempts = integer("attempts", attempts, least=1, right=right, error=KVPlanError)
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, Real) or not deadline > 0):
            raise KVPlanError(f"deadline is {deadline!r}; give seconds, more than none, or None")
        reading = self._reads(plan)
        with self.agent.lock:
            if self.agent.peers.get(self.name) is not self:
                raise TransferError(f"the peer {self.name!r} was forgotten; meet it again, by a new card")
            transfer = NixlTransfer(self, plan, reading=reading, note=note, attempts=attempts, deadline=deadline)
            transfer.begin()
        return transfer

    def _reads(self, plan: Plan) -> bool:
        """Whether a plan reads from the peer; if not, it writes there.

        Raises:
            PathError: it is not between this process and this peer.
            LayoutError: its destination is read-only.
        """
        sides = []
        for k, side in enumerate(("src", "dst")):
            layouts = [pair[k] for pair in plan.layouts]
            whose = {layout.addresses for layout in layouts}
            spans = {_span(region) for layout in layouts for region in layout.regions}
            known = self.agent.spans if whose == {"memory"} else self.spans
            if whose not in ({"memory"}, {"dump"}) or not spans <= known:
                raise PathError(
                    f"{side} of {plan!r} is neither a layout that {self.agent.name!r} registered nor one of the card "
                    f"of {self.name!r}; compile with agent.layouts on one side and peer.layouts on the other"
                )
            sides.append(whose.pop())
        if sides[0] == sides[1]:
            where = "of this process" if sides[0] == "memory" else f"of {self.name!r}"
            raise PathError(f"both sides of {plan!r} are memory {where}; NIXL moves between two processes")
        for _, dst in plan.layouts:
            if not dst.writable:
                raise LayoutError(f"the destination {dst!r} is read-only")
        return sides[0] == "dump"

    def join(self) -> None:
        """Let NIXL know the peer.

        Raises:
            TransferError: it does not take its metadata.
        """
        try:
            self.agent.nixl.add_remote_agent(self._metadata)
        except Exception as error:
            raise TransferError(f"NIXL does not take the metadata of {self.name!r}: {_said(error)}") from error
        self.joined += 1

    def leave(self) -> None:
        """Let NIXL forget the peer, and with it a connection that broke."""
        try:
            self.agent.nixl.remove_remote_agent(self.name)
        except Exception as error:  # noqa: BLE001  # it had forgotten by itself
            log.debug("NIXL had forgotten %s: %s", self.name, _said(error))

    def rejoin(self, joined: int) -> None:
        """Make the connection anew, unless that has been done since it was joined for the ``joined``-th time.

        Nor while another transfer moves over it, which would fail by that.

        Raises:
            TransferError: NIXL does not take its metadata.
        """
        if self.joined == joined and not any(one.moves() for one in tuple(self.flying)):
            self.leave()
            self.join()

    def __repr__(self) -> str:
        return f"NixlPeer({self.name!r}, layouts {list(self.layouts)})"


def _new_agent(name: str, backends: list[str]) -> Any:
    try:
        from nixl import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise PathError(f"transfers between processes need NIXL: pip install 'kvplan[nixl]' ({error})") from error
    made = nixl_agent(name, nixl_agent_config(backends=backends))
    if not any(backend in made.backends for backend in backends):
        raise PathError(f"NIXL here has none of the backends {backends}; it has {made.get_plugin_list()}")
    return made


def _span(region: Any) -> Span:
    return region.address, region.nbytes, region.device


def _spans(layouts: Mapping[str, KVLayout], *, here: bool = True) -> frozenset[Span]:
    for name, layout in layouts.items():
        if not isinstance(layout, KVLayout):
            raise LayoutError(f"layout {name!r} is a {type(layout).__name__}; give a KVLayout")
        if here and layout.addresses != "memory":
            raise LayoutError(f"layout {name!r} is not of this process's memory; nothing of it can be registered")
    return frozenset(_span(region) for layout in layouts.values() for region in layout.regions)


def _registrations(spans: frozenset[Span]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """By kind of memory, what NIXL is to register: spans that lie in another one count for nothing."""
    kept: dict[str, list[tuple[int, int, int]]] = {}
    ends: dict[str, int] = {}
    for address, nbytes, device in sorted(spans, key=lambda span: (span[2], span[0], -span[1])):
        if address + nbytes <= ends.get(device, 0):
            continue
        ends[device] = address + nbytes
        memory, number = memory_of(device, "a layout")
        kept.setdefault(memory, []).append((address, nbytes, number))
    return {memory: np.array(rows, dtype=np.int64) for memory, rows in kept.items()}


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

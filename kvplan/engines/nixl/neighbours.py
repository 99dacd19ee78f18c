"""This process's end: the memory that it offers to peers of this machine, and the way to open theirs."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvplan.agents.agent import Agent as LocalAgent
from kvplan.agents.ways import LOCAL, ways_here
from kvplan.base.process import generation
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.engines.nixl.opened import OtherProcess, SameProcess
from kvplan.engines.nixl.spans import Span, Spans
from kvplan.engines.nixl.transfer_handles import Neighbour
from kvplan.errors import LayoutError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.components import Region
from kvplan.plan.row_plans import Memory, layout_of

SCHEMA = "kvplan.nixl-agent/1"
PACKED = "packed"  # key of a card: version of the packed transfers that its process takes
CLOSE_SECONDS = 10.0  # that memory which is deregistered waits for peers that still use it
Ranges = Mapping[tuple[str, int], Sequence[tuple[int, int]]]  # by kind and device: (address, bytes), disjoint

log = logging.getLogger("kvplan.engines.nixl")
_here: weakref.WeakValueDictionary[str, Neighbourhood] = weakref.WeakValueDictionary()  # by identity


class Neighbourhood:
    """This process's end of all transfers that kvplan moves for an agent.

    Args:
        name: name of the agent, as NIXL knows it.

    Attributes:
        identity: a random text, which names it among all.
        inbox: notifications of agents of this process, and of peers that have gone, as (name, notification).
        lock: lock for the attributes below.
        withdrawals: how often memory was withdrawn.
        flying: transfers of agents of this process with this memory.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = secrets.token_hex(16)
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.lock: AbstractContextManager[Any] = threading.Lock()
        self.withdrawals = 0
        self.flying: list[Transfer] = []
        self._generation = generation()
        self._version = self._offered = -1  # of the memory in _spans, and of the memory that _agent offers
        self._ranges: Ranges = {}
        self._spans = Spans([])
        self._agent: LocalAgent | None = None  # None if nothing can be offered
        self._offers: list[tuple[LocalAgent, Ranges]] = []  # all agents that offer memory
        self._visitor: LocalAgent | None = None  # opens the memory of peers, and offers none
        self._executors: dict[str, Executor] = {}
        _here[self.identity] = self

    # What this process has.

    def spans(self, ranges: Ranges, version: int) -> Spans:
        """Return this process's registered memory, which is described anew when its version changes."""
        if version != self._version:
            self._spans, self._ranges, self._version = Spans(_spans_of(ranges)), ranges, version
        return self._spans

    def card(self, ranges: Ranges, version: int, packed: int = 0) -> bytes:
        """Return the card for peers.

        Args:
            ranges: the memory that is registered.
            version: its version.
            packed: version of the packed transfers that this process takes; 0 for none.

        Raises:
            KVPlanError: the memory cannot be described.
        """
        self.spans(ranges, version)
        document: dict[str, object] = {"schema": SCHEMA, "identity": self.identity, "version": version}
        agent = self._offering(ranges, version)
        if agent is not None:
            document["agent"] = agent.card().decode()
        if packed:
            document[PACKED] = packed
        return json.dumps(document).encode()

    def withdraw(self, ranges: Ranges) -> Callable[[], None]:
        """Withdraw the offers of memory that is no longer registered; return what waits for peers that still move it.

        Args:
            ranges: the memory that is registered now.
        """
        gone = [agent for agent, offered in self._offers if not covers(ranges, offered)]
        self._offers = [(agent, offered) for agent, offered in self._offers if agent not in gone]
        flying: list[Transfer] = []
        if not covers(ranges, self._ranges):
            self._spans, self._ranges, self._version = Spans([]), {}, -1
            with self.lock:
                self.withdrawals += 1
                flying, self.flying = self.flying, []

        def wait() -> None:
            until = time.monotonic() + CLOSE_SECONDS
            for step in [agent.close for agent in gone] + [one.synchronize for one in flying]:
                try:
                    step(timeout=max(until - time.monotonic(), 0.0))
                except Exception as error:  # noqa: BLE001  # NIXL deregisters it now
                    log.warning("memory is deregistered while peers may still use it: %s", error)
            self.inbox.extend(note for agent in gone for note in agent._core.door.notes())

        return wait

    def _offering(self, ranges: Ranges, version: int) -> LocalAgent | None:
        """Return an agent that offers all of the memory that a transport takes; None if there is no such memory."""
        if version != self._offered:
            offered = _offerable(ranges)
            self._agent = next((agent for agent, known in self._offers if known == offered), None)
            if offered and self._agent is None:
                layouts = {
                    f"{kind} {number}": layout_of([Memory(*one, _device(kind, number)) for one in held])
                    for (kind, number), held in offered.items()
                }
                self._agent = LocalAgent(self.name, layouts, transports=tuple(LOCAL))
                self._offers.append((self._agent, offered))
            self._offered = version
        return self._agent

    # Peers.

    def meet(self, name: str, document: Mapping[str, Any]) -> Neighbour:
        """Open the memory of a peer.

        Args:
            name: the peer's name, as NIXL knows it.
            document: its card, as :func:`card_of` returned it.

        Raises:
            LayoutError: the card is wrong.
            PathError: the peer is of another machine, or no transport can open its memory.
            TransferError: the peer has died, or closes.
        """
        peer = _here.get(str(document.get("identity")))
        if peer is not None and peer._generation == generation():
            return SameProcess(name, peer._spans, peer, self.executor, self.name)
        told = document.get("agent")
        if not isinstance(told, str):
            raise LayoutError(f"the card of {name!r} offers nothing that another process can open")
        if self._visitor is None:
            self._visitor = LocalAgent(self.name, {}, transports=tuple(LOCAL))
        return OtherProcess(name, self._visitor, told.encode())

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notifications that came by kvplan, as (name, notification); each comes once."""
        found = [self.inbox.popleft() for _ in range(len(self.inbox))]
        visitor = [] if self._visitor is None else [self._visitor]
        agents = [agent for agent, _ in self._offers]
        return found + [note for agent in (*agents, *visitor) for note in agent.notes()]

    def executor(self, device: str) -> Executor:
        """Return the executor of a device, for transfers within this process."""
        if device not in self._executors:
            self._executors[device] = Executor(device)
        return self._executors[device]


def card_of(name: str, card: bytes) -> Mapping[str, Any]:
    """Read what :meth:`Neighbourhood.card` of a peer returned; raise LayoutError if that cannot be."""
    document = json_of(card)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise LayoutError(f"the card of {name!r} is {quoted(document)}; expected schema {SCHEMA!r}")
    return document


def _device(kind: str, number: int) -> str:
    return "cpu" if kind == "DRAM" else f"cuda:{number}"


def _spans_of(ranges: Ranges) -> list[Span]:
    """Return spans of the memory, with one layout for each device."""
    devices: dict[str, list[tuple[str, int, int]]] = {}
    for (kind, number), held in ranges.items():
        devices.setdefault(_device(kind, number), []).extend((kind, address, nbytes) for address, nbytes in held)
    spans = []
    for device, kept in devices.items():
        layout = layout_of([Memory(address, nbytes, device) for _, address, nbytes in kept])
        spans += [Span(kind, address, nbytes, address, layout) for kind, address, nbytes in kept]
    return spans


def _offerable(ranges: Ranges) -> Ranges:
    """Return the memory that a transport of this machine takes."""
    ways, reasons = ways_here(tuple(LOCAL))
    offered = {}
    for (kind, number), held in ranges.items():
        device, kept, why = _device(kind, number), [], ""
        for address, nbytes in held:
            refused = {name: way.refuse(Region(address, nbytes, device)) for name, way in ways.items()}
            if None in refused.values():
                kept.append((address, nbytes))
            else:
                why = "; ".join(f"{name}: {text}" for name, text in (reasons | refused).items())
        if why:
            left = len(held) - len(kept)
            log.info("%d of %d ranges of %s are not offered to peers: %s", left, len(held), device, why)
        if kept:
            offered[kind, number] = kept
    return offered


def covers(ranges: Ranges, others: Ranges) -> bool:
    """Return whether some ranges hold all others.

    >>> held = {("DRAM", 0): [(100, 50), (200, 50)]}
    >>> covers(held, {("DRAM", 0): [(210, 40)]}), covers(held, {("DRAM", 0): [(210, 41)]})
    (True, False)
    """
    return all(
        any(start <= address and address + nbytes <= start + size for start, size in ranges.get(key, ()))
        for key, held in others.items()
        for address, nbytes in held
    )

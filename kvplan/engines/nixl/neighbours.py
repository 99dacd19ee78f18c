"""This process's end: the memory that it offers to peers of this machine, and the way to open theirs."""

from __future__ import annotations

import json
import logging
import secrets
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

from kvplan.agents.agent import Agent as LocalAgent
from kvplan.agents.ways import LOCAL, ways_here
from kvplan.base.process import generation
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.engines.nixl.opened import OtherProcess, SameProcess
from kvplan.engines.nixl.row_plans import Memory, layout_of
from kvplan.engines.nixl.spans import Span, Spans
from kvplan.engines.nixl.transfer_handles import Neighbour
from kvplan.errors import KVPlanError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout

SCHEMA = "kvplan.nixl-agent/1"
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
        inbox: notifications of agents of this process, as (name, notification).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.identity = secrets.token_hex(16)
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._generation = generation()
        self._version = -1
        self._spans = Spans([])
        self._agent: LocalAgent | None = None  # of the newest version; None if nothing can be offered
        self._agents: list[LocalAgent] = []  # all that offer memory
        self._visitor: LocalAgent | None = None  # opens the memory of peers, and offers none
        self._executors: dict[str, Executor] = {}
        _here[self.identity] = self

    # What this process has.

    def spans(self, ranges: Ranges, version: int) -> Spans:
        """Return this process's registered memory, which is described anew when its version changes."""
        if version != self._version:
            self._spans, self._agent, self._version = Spans(_spans_of(ranges)), None, version
        return self._spans

    def card(self, ranges: Ranges, version: int) -> bytes:
        """Return the card for peers of this machine.

        Raises:
            KVPlanError: the memory cannot be described.
        """
        self.spans(ranges, version)
        document: dict[str, object] = {"schema": SCHEMA, "identity": self.identity, "version": version}
        agent = self._offering(ranges)
        if agent is not None:
            document["agent"] = agent.card().decode()
        return json.dumps(document).encode()

    def withdraw(self) -> None:
        """Withdraw every offer, because some of its memory is deregistered: wait for peers that still move it."""
        agents, self._agents, self._agent, self._version = self._agents, [], None, -1
        for agent in agents:
            try:
                agent.close(timeout=CLOSE_SECONDS)
            except KVPlanError as error:
                log.warning("memory is deregistered while peers may still use it: %s", error)

    def _offering(self, ranges: Ranges) -> LocalAgent | None:
        """Return an agent that offers all of the memory that a transport takes; None if there is no such memory."""
        if self._agent is None:
            layouts = _offerable(ranges)
            if not layouts:
                return None
            self._agent = LocalAgent(self.name, layouts, transports=tuple(LOCAL))
            self._agents.append(self._agent)
        return self._agent

    # Peers.

    def meet(self, name: str, card: bytes) -> Neighbour:
        """Open the memory of a peer.

        Args:
            name: the peer's name, as NIXL knows it.
            card: what the peer's :meth:`card` returned.

        Raises:
            LayoutError: the card cannot be read.
            PathError: the peer is of another machine, or no transport can open its memory.
            TransferError: the peer has died, or closes.
        """
        document = json_of(card)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise LayoutError(f"the card of {name!r} is {quoted(document)}; expected schema {SCHEMA!r}")
        peer = _here.get(str(document.get("identity")))
        if peer is not None and peer._generation == generation():
            return SameProcess(name, peer._spans, weakref.ref(peer), self.executor, self.name)
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
        return found + [note for agent in (*self._agents, *visitor) for note in agent.notes()]

    def executor(self, device: str) -> Executor:
        """Return the executor of a device, for transfers within this process."""
        if device not in self._executors:
            self._executors[device] = Executor(device)
        return self._executors[device]


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


def _offerable(ranges: Ranges) -> dict[str, KVLayout]:
    """Return layouts of the memory that a transport of this machine takes, named by kind and device."""
    ways, reasons = ways_here(tuple(LOCAL))
    layouts = {}
    for (kind, number), held in ranges.items():
        device, kept, why = _device(kind, number), [], ""
        for address, nbytes in held:
            refused = {name: way.refuse(Region(address, nbytes, device)) for name, way in ways.items()}
            if None in refused.values():
                kept.append(Memory(address, nbytes, device))
            else:
                why = "; ".join(f"{name}: {text}" for name, text in (reasons | refused).items())
        if why:
            left = len(held) - len(kept)
            log.info("%d of %d ranges of %s are not offered to peers: %s", left, len(held), device, why)
        if kept:
            layouts[f"{kind} {number}"] = layout_of(kept)
    return layouts

"""This process's end: the memory that it offers to peers of this machine, and the way to open theirs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplan.agents.agent import Agent as LocalAgent
from kvplan.agents.ways import LOCAL, ways_here
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.engines.nixl.opened import OtherProcess
from kvplan.engines.nixl.spans import Span, Spans
from kvplan.engines.nixl.transfer_handles import Neighbour
from kvplan.errors import LayoutError
from kvplan.layout.components import Region
from kvplan.plan.row_plans import Memory, layout_of

SCHEMA = "kvplan.nixl-agent/1"
PACKED = "packed"  # key of a card: version of the packed transfers that its process takes
CLOSE_SECONDS = 10.0  # that memory which is deregistered waits for peers that still use it
Ranges = Mapping[tuple[str, int], Sequence[tuple[int, int]]]  # by kind and device: (address, bytes), disjoint

log = logging.getLogger("kvplan.engines.nixl")


class Neighbourhood:
    """This process's end of all transfers that kvplan moves for an agent.

    Args:
        name: name of the agent, as NIXL knows it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._version = self._offered = -1  # of the memory in _spans, and of the memory that _agent offers
        self._ranges: Ranges = {}
        self._spans = Spans([])
        self._agent: LocalAgent | None = None  # None if nothing can be offered
        self._offers: list[tuple[LocalAgent, Ranges]] = []  # all agents that offer memory
        self._visitor: LocalAgent | None = None  # opens the memory of peers, and offers none

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
        document: dict[str, object] = {"schema": SCHEMA, "version": version}
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
        if not covers(ranges, self._ranges):
            self._spans, self._ranges, self._version = Spans([]), {}, -1

        def wait() -> None:
            until = time.monotonic() + CLOSE_SECONDS
            for agent in gone:
                try:
                    agent.close(timeout=max(until - time.monotonic(), 0.0))
                except Exception as error:  # noqa: BLE001  # NIXL deregisters it now
                    log.warning("memory is deregistered while peers may still use it: %s", error)

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
        told = document.get("agent")
        if not isinstance(told, str):
            raise LayoutError(f"the card of {name!r} offers nothing that another process can open")
        if self._visitor is None:
            self._visitor = LocalAgent(self.name, {}, transports=tuple(LOCAL))
        return OtherProcess(name, self._visitor, told.encode())


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

"""The card of an agent: its process, its layouts, and what each transport offers, as text for another process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from zlib import crc32

from kvplan.agents.identity import Host
from kvplan.agents.way import Table
from kvplan.base.limits import Budget
from kvplan.base.quoting import listed
from kvplan.errors import LayoutError
from kvplan.layout.dump import document_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_card import read_layout, read_table

SCHEMA = "kvplan.agent/1"
_KEYS = ("schema", "name", "host", "pid", "started", "uid", "agent", "key", "socket", "layouts", "offered", "refused",
         "sum")  # fmt: skip
_RIGHT = "give what Agent.card() made"


class Offered(NamedTuple):
    """The offer of one transport.

    Attributes:
        layouts: names of the layouts that it offers.
        part: the transport's own part of the card; only the transport reads it.
    """

    layouts: tuple[str, ...]
    part: Any


class AgentCard(NamedTuple):
    """A card.

    Attributes:
        name: name of the agent.
        host: where its process runs.
        pid, started: the process, and when it started, in clock ticks since boot.
        uid: number of its user.
        agent: identity of the agent, 16 random bytes.
        key: 32 random bytes, which a visitor must prove to hold, and the owner, too.
        socket: name of its abstract socket, without the leading null byte; "" if it takes no visitors.
        layouts: its layouts, whose addresses are those of its process.
        offered: what each transport offers, in the owner's order.
        refused: why a transport does not offer some layouts.
    """

    name: str
    host: Host
    pid: int
    started: int
    uid: int
    agent: bytes
    key: bytes
    socket: str
    layouts: dict[str, KVLayout]
    offered: dict[str, Offered]
    refused: dict[str, str]


def write_card(card: AgentCard) -> bytes:
    """Return a card as bytes."""
    document: Table = {
        "schema": SCHEMA,
        "name": card.name,
        "host": card.host._asdict(),
        "pid": card.pid,
        "started": card.started,
        "uid": card.uid,
        "agent": card.agent.hex(),
        "key": card.key.hex(),
        "socket": card.socket,
        "layouts": {name: document_of(layout.built) for name, layout in card.layouts.items()},
        "offered": {name: {"layouts": list(one.layouts), "part": one.part} for name, one in card.offered.items()},
        "refused": card.refused,
    }
    return json.dumps(document | {"sum": _sum(document)}).encode()


def read_card(card: object) -> AgentCard:
    """Read a card.

    Raises:
        LayoutError: it is no card of this kvplan, or was changed on its way.
    """
    document = read_table(card, SCHEMA, _KEYS, _RIGHT)
    if document.pop("sum") != _sum(document):
        raise LayoutError(f"the card was changed on its way; {_RIGHT}")
    budget = Budget()
    return AgentCard(
        document["name"],
        Host(**document["host"]),
        document["pid"],
        document["started"],
        document["uid"],
        bytes.fromhex(document["agent"]),
        bytes.fromhex(document["key"]),
        document["socket"],
        {name: read_layout(name, layout, budget) for name, layout in document["layouts"].items()},
        {name: Offered(tuple(one["layouts"]), one["part"]) for name, one in document["offered"].items()},
        document["refused"],
    )


def _sum(document: Table) -> int:
    return crc32(json.dumps(document, sort_keys=True).encode())


def why_not(transport: str, card: AgentCard) -> str:
    """Return why a card does not offer a transport for all its layouts."""
    if transport in card.refused:
        return f"{card.name!r} does not offer it: {card.refused[transport]}"
    if transport not in card.offered:
        return f"{card.name!r} does not offer it; its transports are {listed(card.offered) or 'none'}"
    lacked = [name for name in card.layouts if name not in card.offered[transport].layouts]
    return f"{card.name!r} does not offer layouts {listed(lacked)}"

"""The card of an agent: its process, its layouts, and what each transport offers, as text for another process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvplan.agents.identity import Host
from kvplan.agents.way import Table
from kvplan.base.integers import integer
from kvplan.base.limits import Budget
from kvplan.base.quoting import listed, quoted
from kvplan.errors import LayoutError
from kvplan.layout.dump import document_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_card import check_name, read_layout, read_table

SCHEMA = "kvplan.agent/1"
REASON = 1000  # characters of a reason why a transport offers nothing
TRANSPORTS = 8  # most transports of a card
LAYOUTS = 256  # most layouts of a card
_KEYS = ("schema", "name", "host", "pid", "started", "uid", "agent", "key", "socket", "layouts", "offered", "refused")
_RIGHT = "give what Agent.card() made"
_HEX = re.compile(r"[0-9a-f]+")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_BOOT = re.compile(r"[0-9a-f-]{1,64}")


class Offered(NamedTuple):
    """The offer of one transport.

    Attributes:
        layouts: names of the layouts that it offers.
        part: the transport's own part of the card; another process wrote it, and only the transport can check it.
    """

    layouts: tuple[str, ...]
    part: Any


class AgentCard(NamedTuple):
    """A card. All of it but the parts of transports has been checked.

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
        "refused": {name: reason[:REASON] for name, reason in card.refused.items()},
    }
    return json.dumps(document).encode()


def read_card(card: object) -> AgentCard:
    """Read a card, and check all of it but the parts of transports.

    Raises:
        LayoutError: the card cannot be read, something in it is wrong, or one of its layouts is invalid.
    """
    document = read_table(card, SCHEMA, _KEYS, _RIGHT)
    name = check_name(document["name"])
    host = _table(document["host"], "host")
    if set(host) != set(Host._fields) or not isinstance(host["boot"], str) or not _BOOT.fullmatch(host["boot"]):
        raise LayoutError(f"the card's host is {quoted(host)}; {_RIGHT}")
    where = Host(host["boot"], *(_number(host, key, f"the card's host.{key}") for key in ("net", "pids")))
    pid = _number(document, "pid", "the card's pid", least=1, most=2**31 - 1)
    started = _number(document, "started", "the card's started")
    uid = _number(document, "uid", "the card's uid", most=2**32 - 2)
    agent, key = _bytes(document, "agent", 16), _bytes(document, "key", 32)
    socket = document["socket"]
    if not isinstance(socket, str) or not re.fullmatch(r"(kvplan-[0-9a-f]{32})?", socket):
        raise LayoutError(f"the card's socket is {quoted(socket)}; {_RIGHT}")
    offered = _offered(document["offered"])
    refused = _reasons(document["refused"])
    layouts = read_layouts(document["layouts"])
    for transport, one in offered.items():
        if unknown := [other for other in one.layouts if other not in layouts]:
            raise LayoutError(
                f"the card's {transport} offers layout {quoted(unknown[0])}, which the card does not hold"
            )
    return AgentCard(name, where, pid, started, uid, agent, key, socket, layouts, offered, refused)


def _offered(value: Any) -> dict[str, Offered]:
    table = _table(value, "offered")
    if len(table) > TRANSPORTS:
        raise LayoutError(f"the card's offered names {len(table)} transports; there are at most {TRANSPORTS}")
    found = {}
    for name, one in table.items():
        if not _WORD.fullmatch(name):
            raise LayoutError(f"the card's offered names {quoted(name)}; it is the name of a transport, such as 'shm'")
        entry = _table(one, f"offered.{name}")
        names = entry.get("layouts")
        if set(entry) != {"layouts", "part"} or not isinstance(names, list):
            raise LayoutError(f"the card's offered.{name} is {quoted(entry)}; it has 'layouts', a list, and 'part'")
        if not names or not all(isinstance(other, str) for other in names) or len(set(names)) < len(names):
            raise LayoutError(f"the card's offered.{name}.layouts are {quoted(names)}; give names, each once")
        found[name] = Offered(tuple(names), entry["part"])
    return found


def _reasons(value: Any) -> dict[str, str]:
    table = _table(value, "refused")
    for name, reason in table.items():
        if not _WORD.fullmatch(name) or len(table) > TRANSPORTS:
            raise LayoutError(f"the card's refused are {quoted(table)}; {_RIGHT}")
        if not isinstance(reason, str) or len(reason) > REASON:
            raise LayoutError(
                f"the card's refused.{name} is {quoted(reason)}; give a text of at most {REASON} characters"
            )
    return {name: "".join(mark if mark.isprintable() else " " for mark in reason) for name, reason in table.items()}


def read_layouts(value: Any) -> dict[str, KVLayout]:
    """Return the layouts of a card; all of them share one budget of work.

    Raises:
        LayoutError: a layout is not a dump, or is invalid.
    """
    table = _table(value, "layouts")
    if len(table) > LAYOUTS:
        raise LayoutError(f"the card has {len(table)} layouts; there are at most {LAYOUTS}")
    budget = Budget()
    for name in table:
        check_name(name, "a layout")
    return {name: read_layout(name, document, budget) for name, document in table.items()}


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LayoutError(f"the card's {where} is {quoted(value)}; it is a table")
    return value


def _number(table: Mapping[str, Any], key: str, where: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    return integer(where, table[key], least=least, most=most)


def _bytes(table: Mapping[str, Any], key: str, count: int) -> bytes:
    value = table[key]
    if not isinstance(value, str) or len(value) != 2 * count or not _HEX.fullmatch(value):
        raise LayoutError(f"the card's {key} is {quoted(value)}; it is {count} bytes in hexadecimal digits")
    return bytes.fromhex(value)


def why_not(transport: str, card: AgentCard) -> str:
    """Return why a card does not offer a transport for all its layouts."""
    if transport in card.refused:
        return f"{card.name!r} does not offer it: {card.refused[transport]}"
    if transport not in card.offered:
        return f"{card.name!r} does not offer it; its transports are {listed(card.offered) or 'none'}"
    lacked = [name for name in card.layouts if name not in card.offered[transport].layouts]
    return f"{card.name!r} does not offer layouts {listed(lacked)}"

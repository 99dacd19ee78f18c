"""The card of an agent: its process, its layouts, and what each transport offers, as text for another process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from kvplan.agents.identity import Host
from kvplan.agents.transport import Table
from kvplan.base.files import LIMITS, Budget, json_of
from kvplan.base.values import listed, quoted
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.spec import built_from_dump, document_of

SCHEMA = "kvplan.agent/3"
_RIGHT = "give what Agent.card() made"
_LAYOUT = "give what KVLayout.save writes"


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
        pid: number of its process, in the namespace of its host.
        agent: identity of the agent, 16 random bytes.
        key: 32 random bytes, which a visitor must prove to hold, and the owner, too.
        socket: name of its socket.
        folder: device and inode of the folder where the socket lies; None for an abstract socket.
        layouts: its layouts, whose addresses are those of its process.
        offer: number of what the local transports offer; another one later has another number.
        offered: what each transport offers, in the owner's order.
        refused: why a transport does not offer some layouts.
    """

    name: str
    host: Host
    pid: int
    agent: bytes
    key: bytes
    socket: str
    folder: tuple[int, int] | None
    layouts: dict[str, KVLayout]
    offer: int
    offered: dict[str, Offered]
    refused: dict[str, str]


_KEYS = (*AgentCard._fields, "schema", "sum")


def write_card(card: AgentCard) -> bytes:
    """Return a card as bytes."""
    document: Table = {
        "schema": SCHEMA,
        "name": card.name,
        "host": card.host._asdict(),
        "pid": card.pid,
        "agent": card.agent.hex(),
        "key": card.key.hex(),
        "socket": card.socket,
        "folder": card.folder,
        "layouts": {name: document_of(layout.built) for name, layout in card.layouts.items()},
        "offer": card.offer,
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
        bytes.fromhex(document["agent"]),
        bytes.fromhex(document["key"]),
        document["socket"],
        None if document["folder"] is None else (document["folder"][0], document["folder"][1]),
        {name: read_layout(name, layout, budget) for name, layout in document["layouts"].items()},
        document["offer"],
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


def read_table(card: object, schema: str, keys: Sequence[str], right: str) -> dict[str, Any]:
    """Read the table of a card.

    Args:
        card: text of a process, as bytes or str.
        schema: the schema that the card must have.
        keys: the keys that the table must have.
        right: words of the message that tell what would be right.

    Raises:
        LayoutError: it is no table, lacks a key, or has another schema.

    >>> read_table(b'{"schema": "a/1", "name": "decode"}', "a/1", ("schema", "name"), "give a card")["name"]
    'decode'
    >>> read_table(b'{"schema": "a/2"}', "a/1", ("schema", "name"), "give a card")
    Traceback (most recent call last):
        ...
    kvplan.errors.LayoutError: the card has schema 'a/2'; this kvplan reads 'a/1'
    """
    if not isinstance(card, bytes | bytearray | str):
        raise LayoutError(f"card is a {type(card).__name__}; {right}")
    try:
        document = json_of(card if isinstance(card, str) else bytes(card))
    except LayoutError as error:
        raise LayoutError(f"the card cannot be read: {error}; {right}") from None
    if not isinstance(document, dict):
        raise LayoutError(f"the card is {quoted(document)}; {right}")
    if "schema" in document and document["schema"] != schema:
        raise LayoutError(f"the card has schema {quoted(document['schema'])}; this kvplan reads {schema!r}")
    if lacked := [key for key in keys if key not in document]:
        raise LayoutError(f"the card lacks {lacked[0]!r}; {right}")
    return document


def check_name(name: object, what: str = "an agent, or of its card,") -> str:
    """Return a name; raise LayoutError if it is not a printable text of limited length.

    >>> check_name("decode-0")
    'decode-0'
    """
    if not isinstance(name, str) or not 1 <= len(name) <= LIMITS.name_length or not name.isprintable():
        raise LayoutError(
            f"the name of {what} is {quoted(name)}; give a printable text of 1 to {LIMITS.name_length} characters"
        )
    return name


def read_layout(name: str, document: Any, budget: Budget) -> KVLayout:
    """Return a layout of a card; raise LayoutError if it is not a dump, or is invalid."""
    if isinstance(document, dict) and "schema" not in document:
        raise LayoutError(f"layout {quoted(name)} of the card has no schema, as if it were a spec; {_LAYOUT}")
    if not isinstance(document, dict):  # otherwise a text would be read as the path of a file here
        raise LayoutError(f"layout {quoted(name)} of the card is {quoted(document)}; {_LAYOUT}")
    try:
        built = built_from_dump(document, budget)
    except LayoutError as error:
        raise LayoutError(f"layout {quoted(name)} of the card: {error}") from None
    layout = KVLayout(built)
    if layout.addresses != "dump":
        raise LayoutError(f"layout {quoted(name)} of the card is a spec: its addresses hold no memory")
    return layout

"""The card of an agent: its process, its layouts, and what each transport offers; and the choice among these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from kvplan.agents.local_memory import NIXL, Table, Transport
from kvplan.agents.sockets import VARIABLE, Host, folder_number, shared_folder, this_process
from kvplan.base.files import LIMITS, Budget, json_of
from kvplan.base.values import listed, quoted
from kvplan.errors import LayoutError, PathError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.spec import built_from_dump, document_of

SCHEMA = "kvplan.agent/4"
_SHARE = f"set {VARIABLE} to a folder that both containers share"
_RIGHT = "give what Agent.card() made"


class Offered(NamedTuple):
    """The offer of one transport.

    Attributes:
        layouts: names of the layouts that it offers.
        part: the transport's own part of the card; only the transport reads it.
    """

    layouts: Sequence[str]
    part: Any


class AgentCard(NamedTuple):
    """A card.

    Attributes:
        name: name of the agent.
        host: where its process runs.
        pid: number of its process, in the namespace of its host.
        agent: identity of the agent, 16 random bytes as hex digits.
        key: 32 random bytes as hex digits, which a visitor must show.
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
    agent: str
    key: str
    socket: str
    folder: tuple[int, int] | None
    layouts: dict[str, KVLayout]
    offer: int
    offered: dict[str, Offered]
    refused: dict[str, str]

    def why_not(self, transport: str) -> str:
        """Return why it does not offer a transport for all its layouts."""
        if transport in self.refused:
            return f"{self.name!r} does not offer it: {self.refused[transport]}"
        if transport not in self.offered:
            return f"{self.name!r} does not offer it; its transports are {listed(self.offered) or 'none'}"
        lacked = [name for name in self.layouts if name not in self.offered[transport].layouts]
        return f"{self.name!r} does not offer layouts {listed(lacked)}"

    @property
    def address(self) -> str | bytes:
        """Where the agent listens, as this process connects to it."""
        folder = None if self.folder is None else shared_folder()
        return b"\0" + self.socket.encode() if folder is None else str(folder / self.socket)

    def unreachable(self) -> str | None:
        """Return why no socket leads from this process to the agent, with what helps; None if one does."""
        here, folder = this_process().host, shared_folder()
        if self.host.boot != here.boot:
            return f"{self.name!r} runs on another machine"
        if self.folder is None:
            return None if self.host.net == here.net else f"{self.name!r} runs in another container; {_SHARE}, in both"
        if folder is None:
            return f"{self.name!r} listens in a folder, and {VARIABLE} is not set here; {_SHARE}"
        if folder_number(folder) != self.folder:
            return f"{VARIABLE} is {str(folder)!r}, which is not the folder where {self.name!r} listens; {_SHARE}"
        return None


def write_card(card: AgentCard) -> bytes:
    """Return a card as bytes."""
    document = {"schema": SCHEMA} | card._asdict() | {
        "host": card.host._asdict(),
        "layouts": {name: document_of(layout.built) for name, layout in card.layouts.items()},
        "offered": {name: offered._asdict() for name, offered in card.offered.items()},
    }  # fmt: skip
    return json.dumps(document | {"sum": _sum(document)}).encode()


def read_card(card: object) -> AgentCard:
    """Read a card.

    Raises:
        LayoutError: it is no card of this kvplan, or was changed on its way.

    >>> read_card(b'{"schema": "a/2"}')
    Traceback (most recent call last):
        ...
    kvplan.errors.LayoutError: the card has schema 'a/2'; this kvplan reads 'kvplan.agent/4'
    """
    if not isinstance(card, bytes | bytearray | str):
        raise LayoutError(f"card is a {type(card).__name__}; {_RIGHT}")
    try:
        document = json_of(card if isinstance(card, str) else bytes(card))
    except LayoutError as error:
        raise LayoutError(f"the card cannot be read: {error}; {_RIGHT}") from None
    if not isinstance(document, dict):
        raise LayoutError(f"the card is {quoted(document)}; {_RIGHT}")
    if (schema := document.pop("schema", None)) != SCHEMA:
        raise LayoutError(f"the card has schema {quoted(schema)}; this kvplan reads {SCHEMA!r}")
    if document.pop("sum", None) != _sum({"schema": SCHEMA, **document}):
        raise LayoutError(f"the card was changed on its way; {_RIGHT}")
    budget, folder = Budget(), document["folder"]
    return AgentCard(**document)._replace(
        host=Host(**document["host"]),
        folder=folder and tuple(folder),
        layouts={name: KVLayout(built_from_dump(layout, budget)) for name, layout in document["layouts"].items()},
        offered={name: Offered(**offered) for name, offered in document["offered"].items()},
    )


def _sum(document: Table) -> int:
    return crc32(json.dumps(document, sort_keys=True).encode())


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


class Choice(NamedTuple):
    """The transports for a card.

    Attributes:
        names: the transport of each layout.
        wanted: for each local transport, the number of descriptors that it needs.
        data: for each local transport, what it has read of the card.
        here: whether a socket leads to the owner.
    """

    names: dict[str, str]
    wanted: dict[str, int]
    data: dict[str, Any]
    here: bool


def choose(
    card: AgentCard, transports: Sequence[str], usable: Mapping[str, Transport], refused: Mapping[str, str]
) -> Choice:  # fmt: skip
    """Choose a transport for each layout of a card; check the parts, and open nothing.

    Args:
        card: the card of a peer.
        transports: names of transports, the best first.
        usable: the local transports that this process can use.
        refused: why it cannot use the others.

    Raises:
        PathError: no transport serves a layout.
    """
    far, reasons = card.unreachable(), dict(refused)
    choice = Choice({}, {}, {}, far is None)
    for transport in transports:
        offered = card.offered[transport].layouts if transport in card.offered else ()
        names = [name for name in offered if name not in choice.names]
        if transport in reasons or not names:
            continue
        if transport != NIXL:
            if far is not None:
                reasons[transport] = far
                continue
            try:
                wanted, data = usable[transport].check(card.offered[transport].part, card)
            except PathError as error:
                reasons[transport] = str(error)
                continue
            choice.wanted[transport], choice.data[transport] = wanted, data
        choice.names.update(dict.fromkeys(names, transport))
    if lacked := [name for name in card.layouts if name not in choice.names]:
        told = "; ".join(f"{each}: {reasons.get(each) or card.why_not(each)}" for each in transports)
        raise PathError(f"no transport serves layout {quoted(lacked[0])} of {card.name!r}: {told}")
    return choice

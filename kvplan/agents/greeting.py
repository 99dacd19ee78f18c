"""The greeting: each side proves that it holds the card's key, then the owner hands over tables and descriptors.

Anybody on the machine can see the name of an abstract socket and connect to it. So the name is no secret, and the key
is never sent. Each side proves it by a keyed hash of both sides' random numbers. Packets, in order:

* visitor: ``{"nonce", "name", "agent", "started"}``;
* owner: ``{"nonce", "proof"}``;
* visitor: ``{"proof", "hello": {transport: table}}``;
* owner: pieces of ``{transport: table}``, then the descriptors, then :data:`DONE`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvplan.agents.agent_card import AgentCard
from kvplan.agents.channel import PACKET
from kvplan.agents.identity import Life
from kvplan.agents.way import Served, Table
from kvplan.errors import TransferError

ANSWER_SECONDS = 5.0  # an owner drops a visitor that does not answer in this time
BATCH = 64  # most descriptors of one packet; Linux takes 253

REFUSED, PIECE, FILES, DONE = b"R", b"T", b"F", b"D"  # the first byte of the owner's last packets
_NONCE = 16


class Hello(NamedTuple):
    """The first packet of a visitor.

    Attributes:
        nonce: its random number.
        name: name of its agent.
        agent: identity of its agent.
        started: when its process started, in clock ticks since boot.
    """

    nonce: bytes
    name: str
    agent: bytes
    started: int


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return number and user of the process that connected, or that listens, at the other end of a socket."""
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def proof(key: bytes, side: str, owner: bytes, hello: Hello, nonce: bytes) -> bytes:
    """Return the proof of one side that it holds the key, for this greeting only."""
    said = b"".join([side.encode(), owner, hello.agent, hello.nonce, nonce, hello.name.encode()])
    return hmac.digest(key, said, "sha256")


def packet_of(table: Mapping[str, Any]) -> bytes:
    """Return a packet of a table."""
    return json.dumps(table).encode()


def read_hello(packet: bytes) -> Hello:
    """Read the first packet of a visitor."""
    table = json.loads(packet)
    return Hello(bytes.fromhex(table["nonce"]), table["name"], bytes.fromhex(table["agent"]), table["started"])


def read_answer(packet: bytes) -> tuple[bytes, dict[str, Any]]:
    """Read the second packet of a visitor: its proof, and a table for each transport."""
    table = json.loads(packet)
    return bytes.fromhex(table["proof"]), table["hello"]


def welcome(served: Mapping[str, Served]) -> list[tuple[bytes, tuple[int, ...]]]:
    """Return the owner's last packets, each with its descriptors."""
    text = packet_of({name: one.table for name, one in served.items()})
    step = PACKET - 1
    packets: list[tuple[bytes, tuple[int, ...]]] = [(PIECE + text[k : k + step], ()) for k in range(0, len(text), step)]
    for one in served.values():
        files = tuple(one.descriptors)
        packets += [(FILES, files[k : k + BATCH]) for k in range(0, len(files), BATCH)]
    return [*packets, (DONE, ())]


class Met(NamedTuple):
    """The end of a greeting, in the visitor.

    Attributes:
        sock: the connected socket.
        life: the owner's process.
        tables: the owner's table for each transport.
        descriptors: the owner's descriptors for each transport; the caller closes them.
    """

    sock: socket.socket
    life: Life
    tables: dict[str, Table]
    descriptors: dict[str, list[int]]


def greet(card: AgentCard, hello: Hello, hellos: Mapping[str, Table], wanted: Mapping[str, int], until: float) -> Met:
    """Connect to the owner of a card, and greet it.

    Args:
        card: the card.
        hello: the first packet.
        hellos: table for each transport that the visitor takes.
        wanted: number of descriptors that each transport needs.
        until: when to give up, as ``time.monotonic`` counts.

    Raises:
        TransferError: the owner is gone, is another process than the card says, does not answer in time, or refuses.
    """
    descriptors: dict[str, list[int]] = {}
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        undo.callback(close_files, descriptors)
        try:
            life = _connected(sock, card, until)
            undo.callback(life.close)
            nonce = _challenged(sock, card, hello, until)
            sock.send(packet_of({"proof": proof(card.key, "visitor", card.agent, hello, nonce).hex(), "hello": hellos}))
            tables = _welcomed(sock, card, wanted, descriptors, until)
        except TimeoutError:
            raise TransferError(f"{card.name!r} did not answer in time; is its process stopped or very busy?") from None
        except OSError as error:
            raise TransferError(f"the greeting with {card.name!r} broke off: {error.strerror or error}") from error
        undo.pop_all()
    return Met(sock, life, tables, descriptors)


def close_files(descriptors: dict[str, list[int]]) -> None:
    """Close descriptors that were received."""
    for files in descriptors.values():
        while files:
            os.close(files.pop())


def new_nonce() -> bytes:
    """Return a random number for one greeting."""
    return secrets.token_bytes(_NONCE)


def _connected(sock: socket.socket, card: AgentCard, until: float) -> Life:
    _limit(sock, until)
    try:
        sock.connect(b"\0" + card.socket.encode())
    except ConnectionRefusedError:
        raise TransferError(
            f"nobody answers the card of {card.name!r}: its process {card.pid} has ended or closed its agent; a "
            "process that was started again has another card"
        ) from None
    pid, uid = peer_of(sock)
    if (pid, uid) != (card.pid, card.uid):
        raise TransferError(
            f"process {pid} of user {uid} answers the card of {card.name!r}, which says process {card.pid} of user "
            f"{card.uid}"
        )
    try:
        return Life(card.pid, card.started)
    except ProcessLookupError as error:
        raise TransferError(
            f"the process {card.pid} of {card.name!r} is not the one that made the card: {error}"
        ) from error


def _challenged(sock: socket.socket, card: AgentCard, hello: Hello, until: float) -> bytes:
    said = hello._asdict() | {"nonce": hello.nonce.hex(), "agent": hello.agent.hex()}
    with contextlib.suppress(BrokenPipeError):  # it refused this user at once; its reason can still be read
        sock.send(packet_of(said))
    table = json.loads(_unrefused(_packet(sock, until), card))
    nonce = bytes.fromhex(table["nonce"])
    if not hmac.compare_digest(bytes.fromhex(table["proof"]), proof(card.key, "owner", card.agent, hello, nonce)):
        raise TransferError(f"the process that answers for {card.name!r} does not hold the card's key")
    return nonce


def _welcomed(
    sock: socket.socket, card: AgentCard, wanted: Mapping[str, int], descriptors: dict[str, list[int]], until: float
) -> dict[str, Table]:
    text, files = b"", descriptors.setdefault("", [])
    while True:
        _limit(sock, until)
        packet, received, _, _ = socket.recv_fds(sock, PACKET + 1, BATCH, socket.MSG_CMSG_CLOEXEC)
        files.extend(received)
        _unrefused(packet, card)
        if packet == DONE:
            break
        if packet[:1] == PIECE:
            text += packet[1:]
    if len(files) != sum(wanted.values()):  # those beyond the limit of this process are not received
        raise TransferError(
            f"{len(files)} descriptors came from {card.name!r}, and not {sum(wanted.values())}; is this process at its "
            "limit (ulimit -n)?"
        )
    for transport, number in wanted.items():  # the owner sends them in this order
        descriptors[transport] = [files.pop(0) for _ in range(number)]
    tables: dict[str, Table] = json.loads(text)
    return tables


def _packet(sock: socket.socket, until: float) -> bytes:
    _limit(sock, until)
    try:
        return sock.recv(PACKET + 1)
    except ConnectionResetError:  # it left a packet unread; its own are still here
        return sock.recv(PACKET + 1)


def _limit(sock: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _unrefused(packet: bytes, card: AgentCard) -> bytes:
    if not packet:
        raise TransferError(f"{card.name!r} closed the connection in the greeting; is the card still the newest?")
    if packet[:1] == REFUSED:
        reason = packet[1:500].decode("utf-8", "replace")
        raise TransferError(f"{card.name!r} refused: {''.join(mark for mark in reason if mark.isprintable())}")
    return packet

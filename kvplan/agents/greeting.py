"""The greeting: each side proves that it holds the card's key, then the owner hands over descriptors.

Anybody on the machine may see the name of a socket and connect to it. So the name is no secret, and the key is never
sent. Each side proves it by a keyed hash of both sides' random numbers. Packets, in order:

* visitor: its hello, ``{"name", "nonce"}``;
* owner: :data:`NONCE`, a random number, and its proof;
* visitor: its proof, and ``{"offer", "transports"}``: which offer it has the card of, and how it takes it;
* owner: the descriptor of the board, those of each transport, and :data:`DONE`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvplan.agents.agent_card import AgentCard
from kvplan.agents.identity import Life, peer_of
from kvplan.agents.sockets import address
from kvplan.agents.transport import close_all
from kvplan.errors import PathError, TransferError

ANSWER_SECONDS = 5.0  # an owner drops a visitor that does not answer in this time
PACKET = 1 << 16  # most bytes of a packet
BATCH = 250  # most descriptors of one packet; Linux takes 253
RETRY_SECONDS = 2e-3  # between two tries to connect to an owner at whose door too many wait

REFUSED, NONCE, FILES, DONE = b"R", b"N", b"F", b"D"  # the first byte of the owner's packets
_NONCE_NBYTES = 16
PROOF_NBYTES = 32


def hello_of(name: str) -> bytes:
    """Return the first packet of a visitor whose agent has a name."""
    return json.dumps({"name": name, "nonce": secrets.token_hex(_NONCE_NBYTES)}).encode()


def challenge(key: bytes, hello: bytes) -> tuple[bytes, bytes]:
    """Return the owner's answer to a hello, and the proof that the visitor must give."""
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    return NONCE + nonce + _proof(key, b"owner", hello, nonce), _proof(key, b"visitor", hello, nonce)


def _proof(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Return the proof of one side that it holds the key, for this greeting only."""
    return hmac.digest(key, side + nonce + hello, "sha256")


def welcome(sock: socket.socket, files: Sequence[int]) -> None:
    """Send the owner's last packets, with its descriptors."""
    for k in range(0, len(files), BATCH):
        socket.send_fds(sock, [FILES], list(files[k : k + BATCH]), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    sock.send(DONE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Met(NamedTuple):
    """The end of a greeting, in the visitor.

    Attributes:
        sock: the connected socket.
        life: the owner's process.
        uid: number of its user, as this process counts users.
        descriptors: the owner's, in order: the board's, then those of each transport; the caller closes them.
    """

    sock: socket.socket
    life: Life
    uid: int
    descriptors: list[int]


def greet(card: AgentCard, name: str, wanted: Mapping[str, int], users: Collection[int], until: float) -> Met:
    """Connect to the owner of a card, and greet it.

    Args:
        card: the card.
        name: name of the visitor's agent.
        wanted: for each transport that the visitor takes, the number of descriptors that it needs.
        users: users whose cards are accepted.
        until: when to give up, as ``time.monotonic`` counts.

    Raises:
        PathError: the owner is of another user.
        TransferError: the owner is gone, does not answer in time, or refuses.
    """
    descriptors: list[int] = []
    wish = json.dumps({"offer": card.offer, "transports": list(wanted)}).encode()
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        undo.callback(close_all, descriptors)
        try:
            _connect(sock, card, until)
            _, uid = peer_of(sock)
            if uid not in users:
                raise PathError(f"{card.name!r} runs as user {uid}; to accept its card, give users=[{uid}]")
            life = Life(sock)
            undo.callback(life.close)
            sock.send(_challenged(sock, card, hello_of(name), until) + wish)
            _welcomed(sock, card, 1 + sum(wanted.values()), descriptors, until)
        except TimeoutError:
            raise TransferError(f"{card.name!r} did not answer in time; is its process stopped or very busy?") from None
        except OSError as error:
            raise TransferError(f"the greeting with {card.name!r} broke off: {error.strerror or error}") from error
        undo.pop_all()
    return Met(sock, life, uid, descriptors)


def _connect(sock: socket.socket, card: AgentCard, until: float) -> None:
    while True:
        _limit(sock, until)
        try:
            return sock.connect(address(card))
        except BlockingIOError:  # others wait there, too
            time.sleep(RETRY_SECONDS)
        except (ConnectionRefusedError, FileNotFoundError):
            raise TransferError(
                f"nobody answers the card of {card.name!r}: its process {card.pid} has ended or closed its agent; a "
                "process that was started again has another card"
            ) from None
        except PermissionError:
            raise TransferError(
                f"{card.name!r} does not allow user {os.geteuid()}; it would by users=[{os.geteuid()}]"
            ) from None


def _challenged(sock: socket.socket, card: AgentCard, hello: bytes, until: float) -> bytes:
    """Say hello, and return the proof that the owner awaits; raise TransferError if it does not give its own."""
    with contextlib.suppress(BrokenPipeError):  # it refused this user at once; its reason can still be read
        sock.send(hello)
    packet = _unrefused(_packet(sock, until), card)
    nonce, shown = packet[1 : 1 + _NONCE_NBYTES], packet[1 + _NONCE_NBYTES :]
    if not hmac.compare_digest(shown, _proof(card.key, b"owner", hello, nonce)):
        raise TransferError(f"the process that answers for {card.name!r} does not hold the card's key")
    return _proof(card.key, b"visitor", hello, nonce)


def _welcomed(sock: socket.socket, card: AgentCard, wanted: int, descriptors: list[int], until: float) -> None:
    packet = b""
    while packet[:1] != DONE:
        _limit(sock, until)
        packet, received, _, _ = socket.recv_fds(sock, PACKET, BATCH, socket.MSG_CMSG_CLOEXEC)
        descriptors.extend(received)
        _unrefused(packet, card)
    if len(descriptors) != wanted:  # those beyond the limit of this process are not received
        raise TransferError(
            f"{len(descriptors)} descriptors came from {card.name!r}, and not {wanted}; is this process at its limit "
            "(ulimit -n)?"
        )


def _packet(sock: socket.socket, until: float) -> bytes:
    _limit(sock, until)
    try:
        return sock.recv(PACKET)
    except ConnectionResetError:  # it left a packet unread; its own are still here
        return sock.recv(PACKET)


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

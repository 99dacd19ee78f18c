"""kvplan's card within NIXL's metadata: as the connection of one more backend, which no NIXL has.

Every NIXL skips connections of backends that it does not have, so a peer without kvplan reads what it expects.

Source: NIXL 1.5.1, ``nixlAgent::loadRemoteMD`` and ``nixlSerDes``: a field is its tag, eight bytes for its length,
little-endian, the content, and ``|``. In front stand the agent's name and the number of connections; each connection
is the name of a backend and its data.
"""

from __future__ import annotations

import logging

FRONT, BACKEND = b"nixlSerDes|", b"KVPLAN"
log = logging.getLogger("kvplan.engines.nixl")


def joined(metadata: bytes, card: bytes) -> bytes:
    """Return NIXL's metadata with a card as its first connection; as it is if it has another form, or no connection.

    >>> joined(b"of another form", b"a card")
    b'of another form'
    """
    try:
        _, at = _field(metadata, len(FRONT), b"Agent")
        count, end = _field(metadata, at, b"Conns")
    except ValueError:
        log.warning("the metadata of this NIXL has an unknown form, in which no card can travel: NIXL moves all")
        return metadata
    number = int.from_bytes(count, "little")
    if not number:  # a peer would miss a backend in common
        return metadata
    more = _written(b"Conns", (number + 1).to_bytes(8, "little")) + _written(b"t", BACKEND) + _written(b"c", card)
    return metadata[:at] + more + metadata[end:]


def card_in(metadata: bytes) -> bytes | None:
    """Return the card within NIXL's metadata; None if there is none."""
    try:
        _, at = _field(metadata, len(FRONT), b"Agent")
        _, at = _field(metadata, at, b"Conns")
        backend, at = _field(metadata, at, b"t")
        return _field(metadata, at, b"c")[0] if backend == BACKEND else None
    except ValueError:
        return None


def _field(metadata: bytes, at: int, tag: bytes) -> tuple[bytes, int]:
    """Return the content of a field and its end; raise ValueError if there is no such field."""
    start = at + len(tag) + 8
    end = start + int.from_bytes(metadata[start - 8 : start], "little")
    if not metadata.startswith(FRONT) or metadata[at : start - 8] != tag or metadata[end : end + 1] != b"|":
        raise ValueError(tag)
    return metadata[start:end], end + 1


def _written(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content + b"|"

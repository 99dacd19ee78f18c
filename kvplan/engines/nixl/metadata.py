"""kvplan's card within NIXL's metadata: as the connection of one more backend, which no NIXL has.

Every NIXL skips connections of backends that it does not have, so a peer without kvplan reads what it expects.

Source: NIXL 1.5.1, ``nixlAgent::loadRemoteMD`` and ``nixlSerDes``: a field is its tag, eight bytes for its length,
little-endian, the content, and ``|``. In front stand the agent's name and the number of connections; each connection
is the name of a backend and its data.
"""

from __future__ import annotations

FRONT, BACKEND = b"nixlSerDes|", b"KVPLAN"


def joined(metadata: bytes, card: bytes) -> bytes | None:
    """Add a card to NIXL's metadata; None if it has another form, or no connection.

    >>> joined(b"of another form", b"a card") is None
    True
    """
    try:
        at, connections = _connections(metadata)
    except ValueError:
        return None
    if not connections:  # a peer would miss a backend in common
        return None
    _, end = _field(metadata, at, b"Conns")
    count = _written(b"Conns", (len(connections) + 1).to_bytes(8, "little"))
    return metadata[:at] + count + _written(b"t", BACKEND) + _written(b"c", card) + metadata[end:]


def card_in(metadata: bytes) -> bytes | None:
    """Return the card within NIXL's metadata; None if there is none."""
    try:
        return dict(_connections(metadata)[1]).get(BACKEND)
    except ValueError:
        return None


def _connections(metadata: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Return the place of the connections, and their backends and data; raise ValueError if it has another form."""
    if not metadata.startswith(FRONT):
        raise ValueError(metadata[:16])
    _, at = _field(metadata, len(FRONT), b"Agent")
    count, end = _field(metadata, at, b"Conns")
    found = []
    for _ in range(int.from_bytes(count, "little")):
        backend, end = _field(metadata, end, b"t")
        data, end = _field(metadata, end, b"c")
        found.append((backend, data))
    return at, found


def _field(metadata: bytes, at: int, tag: bytes) -> tuple[bytes, int]:
    """Return the content of a field and its end; raise ValueError if there is no such field."""
    start = at + len(tag) + 8
    end = start + int.from_bytes(metadata[start - 8 : start], "little")
    if metadata[at : start - 8] != tag or metadata[end : end + 1] != b"|":
        raise ValueError(tag)
    return metadata[start:end], end + 1


def _written(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content + b"|"

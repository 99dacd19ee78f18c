"""The metadata of an agent: NIXL's own, and kvplan's card behind it.

NIXL 1.5.1 reads metadata from its front and ignores bytes behind its end. So a peer without kvplan reads what it
expects, and a peer with kvplan finds the card from the end.
"""

from __future__ import annotations

from kvplan.base.limits import LIMITS

MAGIC = b"\x00kvplan.nixl/1\x00\xf6"  # 16 bytes that end the metadata
LENGTH = 8  # bytes of the card's length, little-endian, in front of it


def joined(metadata: bytes, card: bytes) -> bytes:
    """Append a card to NIXL's metadata.

    >>> split(joined(b"of NIXL", b"a card"))
    (b'of NIXL', b'a card')
    """
    return metadata + card + len(card).to_bytes(LENGTH, "little") + MAGIC


def split(metadata: bytes) -> tuple[bytes, bytes | None]:
    """Return NIXL's metadata and the card behind it; None if there is no card, or none that can be whole.

    >>> split(b"of NIXL")
    (b'of NIXL', None)
    """
    if not metadata.endswith(MAGIC):
        return metadata, None
    end = len(metadata) - len(MAGIC) - LENGTH
    size = int.from_bytes(metadata[max(end, 0) : end + LENGTH], "little")
    if end < 0 or size > end or size > LIMITS.json_nbytes:
        return metadata, None
    return metadata[: end - size], metadata[end - size : end]

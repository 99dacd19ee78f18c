"""Cards that lie: known lies, and random ones from a seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# Values that a field of a card may be given, whatever its own type.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 4096, 2**31, 2**47, 2**63, 2**64, 2**200, -(2**63), 0.5, 1e308, "", "x", "0" * 64,
    "f" * 32, "kv", "shm", "../../etc/passwd", "\0", "\ud800", "x" * 5000, [], [[]], {}, {"x": 1}, [0] * 50, ["kv"] * 3,
)  # fmt: skip


def places(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values of a document."""
    found = [at] if at else []
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        found += places(value, (*at, key))
    return found


def at(document: Any, place: tuple[Any, ...]) -> Any:
    """The value at a place."""
    for key in place:
        document = document[key]
    return document


def lie(card: bytes, rng: random.Random) -> bytes:
    """A card with one to three changes that a hostile or a broken process could make."""
    kind = rng.random()
    if kind < 0.1:  # bytes
        raw = bytearray(card)
        for _ in range(rng.randint(1, 8)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)
    document = json.loads(card)
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(places(document))
        parent, key, value = at(document, place[:-1]), place[-1], at(document, place)
        what = rng.random()
        if what < 0.35:
            parent[key] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.65 and isinstance(value, int):
            parent[key] = value + rng.choice((-1, 1, 4096, -4096, 1 << 20, -(1 << 20), value, 1 << 40))
        elif what < 0.75:
            del parent[key]
        elif what < 0.85 and isinstance(parent, list):
            parent.append(copy.deepcopy(value))
        elif isinstance(value, str) and value:
            where = rng.randrange(len(value))
            parent[key] = value[:where] + rng.choice("0f9 z\0é") + value[where + 1 :]
        else:
            other = rng.choice(places(document))
            parent[key] = copy.deepcopy(at(document, other))
    return json.dumps(document).encode()

"""Broken files, made of whole ones: in their structure, and byte by byte."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

WORDS = (
    "", "k", "v", "kv", "k_scale", "layer", "block", "token", "head", "dim", "dim.0", "cpu", "cuda:0", "meta", "uint8",
    "bfloat16", "bf16 + uint8", "block dim", "block token head dim", "layer: kv block token head dim", "block: dim",
    "block dim + block token dim", "\ud800", "\x00", "a b", "kvplan.layout/1", "kvplan.layout/2",
    "full_attention", "sliding_attention", "linear_attention", "jamba", "/etc/passwd", "x" * 5000,
)  # fmt: skip
NUMBERS = (
    0, 1, 2, 3, 4, 7, 8, 16, 64, 255, 4096, 65536, 65537, 10**6, 2**20, 2**28, 5 * 10**8, 2**31 - 1, 2**31, 2**40,
    2**62, 2**63 - 1, 2**63, 2**64, 10**400, -1, -8, -(2**63), 0.5, 1e308, float("inf"), float("nan"),
)  # fmt: skip


def broken(document: Any, random: Random) -> Any:
    """A copy with one to four places changed."""
    made = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(made))
        if not places:
            return junk(random)
        held, key = random.choice(places)
        how = random.random()
        value = held[key]
        if how < 0.1:
            del held[key]
        elif how < 0.2 and isinstance(value, list):
            _change_list(value, random)
        elif how < 0.3 and isinstance(held, dict):
            held[random.choice(WORDS)] = value
        elif how < 0.4:
            other, name = random.choice(places)
            held[key] = copy.deepcopy(other[name])
        elif how < 0.65 and isinstance(value, int) and not isinstance(value, bool):
            held[key] = value + random.choice((-8, -1, 1, 8, value, 7 * value)) if value < 2**64 else 1
        else:
            held[key] = junk(random)
    return made


def _change_list(value: list[Any], random: Random) -> None:
    how = random.random()
    if how < 0.3:
        random.shuffle(value)
    elif how < 0.5:
        value *= random.choice((0, 2, 3, 300))
    elif how < 0.7:
        value.append(copy.deepcopy(random.choice(value)) if value else junk(random))
    else:  # factors that do not nest
        value[:] = [[2, random.randrange(1, 2 ** random.choice((8, 20, 40)))] for _ in range(random.randrange(24))]


def junk(random: Random) -> Any:
    """A value of any kind."""
    how = random.random()
    if how < 0.35:
        return random.choice(NUMBERS)
    if how < 0.7:
        return random.choice(WORDS)
    if how < 0.8:
        return random.choice((None, True, False))
    if how < 0.9:
        deep: Any = random.choice(([], {}, [[]], {"layouts": []}))
        for _ in range(random.choice((1, 3, 20, 300))):
            deep = random.choice(({"layouts": [deep]}, {"a": deep}, [deep]))
        return deep
    return [junk(random) for _ in range(random.choice((0, 1, 2, 9)))]


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def torn(raw: bytes, random: Random) -> bytes:
    """Bytes with one to four changes."""
    made = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 4))):
        at, how = random.randrange(len(made) + 1), random.random()
        if how < 0.3 and at < len(made):
            made[at] ^= 1 << random.randrange(8)
        elif how < 0.45:
            del made[at : at + random.choice((1, 2, 9, 100))]
        elif how < 0.5:
            del made[at:]
        elif how < 0.7:
            made[at:at] = made[at : at + random.choice((1, 9, 100))] * random.choice((1, 2, 50))
        elif how < 0.9:
            made[at:at] = random.choice((b"9" * 40, b"[" * 4000, b'{"a":' * 2000, b"\xff", b"\x00", b"-", b'"',
                                         b"e9", b"a." * 3000, b"0x" + b"f" * 9000, b"9" * 5000, b"NaN",
                                         b"\\ud800"))  # fmt: skip
        else:
            made[at : at + 8] = random.randbytes(8)
    return bytes(made)


def text_of(document: Any) -> bytes:
    """JSON, with whatever Python's writes."""
    try:
        return json.dumps(document).encode()
    except (RecursionError, ValueError):
        return b"[" * 100


def toml_of(spec: Any) -> bytes:
    """A spec as TOML, each value as JSON has it, which mostly is TOML, too."""
    if not isinstance(spec, dict):
        return text_of(spec)
    lines = []
    for key, value in spec.items():
        if key == "sizes" and isinstance(value, dict):
            inside = ", ".join(f"{json.dumps(name)} = {json.dumps(size)}" for name, size in value.items())
            lines.append(f"{key} = {{{inside}}}")
        else:
            lines.append(f"{json.dumps(key)} = {json.dumps(value)}")
    return "\n".join(lines).encode(errors="replace")

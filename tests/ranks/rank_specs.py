"""Ranks that are not here: layouts from specs, dealt by heads and layers."""

from __future__ import annotations

from kvplan import KVLayout
from tests.oracle import byte_moves

SPLIT = "layer: kv block token head dim"


HND, NHD = "block layer kv head token dim", "block layer kv token head dim"


def rank(notation: str, *, heads: range, layers: range = range(1), tokens: int = 16, blocks: int = 8, kv: bool = True):
    """A rank that is not here: a spec."""
    axes = {"layer": len(layers), "block": blocks, "kv": 2, "token": tokens, "head": len(heads), "dim": 128}
    sizes = {axis: size for axis, size in axes.items() if axis in notation}
    assert kv == ("kv" in notation)
    return KVLayout.from_spec({
        "notation": notation, "sizes": sizes, "dtype": "bf16", "layer_start": layers.start, "head_start": heads.start,
    })  # fmt: skip


def tp(notation: str, ranks: int, heads: int, **more):
    each = max(heads // ranks, 1)
    return [rank(notation, heads=range(k * heads // ranks, k * heads // ranks + each), **more) for k in range(ranks)]


def written(plans) -> dict[int, int]:
    """Byte moves of all plans together; fails where a byte has two writers."""
    moves: dict[int, int] = {}
    for plan in plans:
        for at, value in byte_moves(plan.descriptors()).items():
            assert at not in moves, f"byte {at:#x} has two writers"
            moves[at] = value
    return moves

"""Ranks that are not alike: parts of every kind, heads that overlap, own notations, blocks and ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvplan import KVLayout, Shard
from kvplan.layout.strides import extent, offset

HEADED = (
    "block token head dim", "block head token dim", "token.0 block token.1 head dim", "block head.0 token head.1 dim",
    "block: token head dim", "(block token) head dim", "head block token dim", "block token.0 head token.1 dim",
    "block dim token head",
)  # fmt: skip
FLAT = (
    "block token dim",
    "token.0 block token.1 dim",
    "block: token dim",
    "(block token) dim",
    "block token.0 1 token.1 dim",
)
CONTENT = {
    "k": 2,
    "v": 2,
    "kv": 4,
    "scale": 1,
    "latent": 3,
    "index": 2,
    "state": 5,
}  # bytes a (token, head), or a block

Byte = tuple[int, str, int | None, int, int]  # layer, part, head, token of the transfer, byte of the content


def cache(chance: random.Random, part: str, layer: int, heads: range, tokens: int, blocks: int) -> KVLayout:
    """One part of one layer, in some notation, with padding or without, its blocks in any order."""
    notation = "block dim" if part == "state" else chance.choice(FLAT if part in {"latent", "index"} else HEADED)
    sizes = {"block": blocks, "token": tokens, "head": len(heads), "dim": CONTENT[part], "1": 1}
    sizes["(block token)"] = blocks * tokens
    for axis in ("token", "head"):
        outer = chance.choice([n for n in range(1, sizes[axis] + 1) if sizes[axis] % n == 0])
        sizes |= {f"{axis}.0": outer, f"{axis}.1": sizes[axis] // outer}
    dims = notation.rpartition(":")[2].replace("(block token)", "(block_token)").split()
    shape = [sizes[dim.replace("_", " ")] for dim in dims]

    padded = [shape[0], *(count + chance.choice((0, 0, 1)) for count in shape[1:])]

    def tensor() -> np.ndarray:
        return np.zeros(padded, np.int8)[tuple(map(slice, shape))]

    tensors = tensor()
    if ":" in notation:
        tensors = [tensor() for _ in range(blocks)]
        chance.shuffle(tensors)
    known = {"token": tokens} if "(" in notation else {}
    name = "kv" if part == "latent" else part
    return KVLayout.from_tensors(notation, tensors, sizes=known, layer_start=layer, head_start=heads.start, part=name)


def side(chance: random.Random, parts: dict[int, list[str]], heads: int, tokens: int, *, alike: bool) -> list[Shard]:
    """Ranks that together hold all parts: stages of any layers, ranges of heads that may overlap, dealt tokens."""
    stages = [[layer for layer in parts if layer % 2 == k] or list(parts) for k in range(chance.choice((1, 2)))]
    if len(stages) == 1:
        stages = [list(parts)]
    cuts = sorted(chance.sample(range(1, heads), chance.randint(0, min(heads - 1, 3))))
    ranges = [range(a, b) for a, b in zip([0, *cuts], [*cuts, heads], strict=True)]
    ranges += [range(chance.randrange(held.stop), held.stop) for held in ranges if chance.random() < 0.3]
    states = any("state" in held for held in parts.values())
    cp_size = 1 if states else chance.choice((1, 1, 1, 2, 3))
    interleave = chance.choice([n for n in range(1, tokens + 1) if tokens % n == 0])
    ranks = []
    for stage in stages:
        for cp_rank in range(cp_size):
            for held in ranges:
                each, blocks = tokens if alike else tokens * chance.choice((1, 2)), chance.randint(3, 5)
                names = {"kv": ("kv",) if chance.random() < 0.3 else ("k", "v")}
                layouts = [
                    cache(chance, name, layer, held, each, blocks)
                    for layer in stage
                    for part in parts[layer]
                    for name in names.get(part, (part,))
                ]
                ranks.append(Shard(KVLayout.merge(layouts), cp_rank, cp_size, interleave))
    return ranks


@dataclass(frozen=True)
class Mixed:
    """Ranks of both sides, and one transfer: ids of every rank, skips in tokens of the sequence, tokens."""

    sides: tuple[list[Shard], list[Shard]]
    ids: tuple[list[list[int]], list[list[int]]]
    skips: tuple[int, int]
    tokens: int


def mixed(seed: int) -> Mixed:
    """Any such ranks."""
    chance = random.Random(seed)
    heads = chance.choice((1, 2, 3, 4, 6))
    some = [chance.choice(("kv", "kv", "latent")), *(p for p in ("scale", "index", "state") if chance.random() < 0.3)]
    states = "state" in some
    parts = {
        layer: [part for part in some if chance.random() < 0.85 or (states and part == some[0])] or some[:1]
        for layer in range(chance.randint(1, 3))
    }
    alike = states or chance.random() < 0.75
    tokens = [chance.choice((1, 2, 4, 6, 8)) for _ in range(2)]
    if states:
        tokens[1] = tokens[0]
    sides = tuple(side(chance, parts, heads, count, alike=alike) for count in tokens)
    spans = [sorted({rank.span_tokens for rank in ranks}) for ranks in sides]
    unit = np.gcd.reduce([span for held in spans for span in held])
    skips = tuple(int(chance.randrange(0, held[0], unit)) if alike and not states else 0 for held in spans)
    room = min(
        rank.layout.num_blocks * rank.span_tokens - skip
        for ranks, skip in zip(sides, skips, strict=True)
        for rank in ranks
    )
    if alike:
        covers = sorted(
            {count * held[0] - skip for held, skip in zip(spans, skips, strict=True) for count in range(1, 20)}
        )
        count = chance.choice([0, *(covered for covered in covers if 0 < covered <= room)])
    else:
        count = room // lcm(*spans[0], *spans[1]) * lcm(*spans[0], *spans[1])
    skips = skips if count else (0, 0)
    ids = tuple(
        [
            chance.sample(range(rank.layout.num_blocks), -(-(count + skip * bool(count)) // rank.span_tokens))
            for rank in ranks
        ]
        for ranks, skip in zip(sides, skips, strict=True)
    )
    return Mixed(sides, ids, skips, count)


def held_bytes(rank: Shard, ids: list[int], skip: int, tokens: int) -> dict[int, tuple[Byte, int]]:
    """Of every byte that a rank holds of a transfer: what it is, and in which block."""
    held = {}
    for component in rank.layout.components:
        form = component.form
        for token in range(tokens):
            block, at = divmod(token + skip, rank.span_tokens)
            turn, within = divmod(at, rank.interleave)
            if at if form.opaque else turn % rank.cp_size != rank.cp_rank:
                continue
            slot = 0 if form.opaque else turn // rank.cp_size * rank.interleave + within
            start = component.address + form.block_offset(ids[block]) + offset(form.token, slot)
            for head in form.heads if form.headed else (None,):
                row = start + (offset(form.head, head - form.head_start) if head is not None else 0)
                for byte in range(extent(form.dim)):
                    part, place = component.part, byte
                    if part == "kv" and form.headed:
                        part, place = ("k", byte) if byte < CONTENT["k"] else ("v", byte - CONTENT["k"])
                    held[row + offset(form.dim, byte)] = (component.layer, part, head, token, place), ids[block]
    return held

"""The one oracle: copying by logical coordinates, one element at a time, with plain numpy indexing.

It reads notations by itself and never asks kvplan where a byte lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np


@dataclass
class Cache:
    """A paged cache in numpy: how it is written down, and its memory.

    `sizes` has the extent of every axis and of every factor ("token.0"); absent axes have extent 1. Where blocks are
    opaque, "subblock" stands for "token": to copying by coordinates an opaque sub-block is a token with a long row.
    `roots` are the flat byte buffers that everything lives in, guard bytes and padding included.
    """

    notation: str
    sizes: dict[str, int]
    tensors: Any
    roots: list[np.ndarray]
    head_start: int = 0
    layer_start: int = 0
    itemsize: int = 1
    told: dict[str, int] = field(default_factory=dict)

    @property
    def block_tokens(self) -> int:
        return self.sizes.get("token", self.sizes.get("subblock", 1))

    @property
    def heads(self) -> range:
        return range(self.head_start, self.head_start + self.sizes.get("head", 1))

    def row(
        self, layer: int, kv: int, block: int, token: int, head: int
    ) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """(tensor, index) of every element of one (token, head)."""
        nesting, dims = split_notation(self.notation)
        where = {"layer": layer, "kv": kv, "block": block, "token": token, "head": head - self.head_start}
        where["subblock"] = token
        tensor = self.tensors
        for axis in nesting:
            tensor = tensor[where[axis]]
        for dim in range(self.sizes.get("dim", 1)):
            where["dim"] = dim
            yield tensor, tuple(self._position(atoms, where) for atoms in dims)

    def _position(self, atoms: Sequence[str], where: dict[str, int]) -> int:
        position = 0
        for atom in atoms:
            position = position * self.sizes[atom] + self._digit(atom, where)
        return position

    def _digit(self, atom: str, where: dict[str, int]) -> int:
        axis, dot, factor = atom.partition(".")
        if not dot:
            return where[axis]
        inner, k = 1, int(factor) + 1
        while f"{axis}.{k}" in self.sizes:
            inner *= self.sizes[f"{axis}.{k}"]
            k += 1
        return where[axis] // inner % self.sizes[atom]


def split_notation(text: str) -> tuple[list[str], list[list[str]]]:
    left, colon, right = text.rpartition(":")
    dims = re.findall(r"\([^)]*\)|\S+", right)
    return left.split() if colon else [], [[] if dim == "1" else dim.strip("()").split() for dim in dims]


def copy(src: Cache, dst: Cache, src_ids, dst_ids, src_skip: int, dst_skip: int, unit_tokens: int, units: int) -> None:
    """Copy `units * unit_tokens` tokens, and all heads that both caches hold, in every layer and part."""
    heads = range(max(src.heads.start, dst.heads.start), min(src.heads.stop, dst.heads.stop))
    layers, parts = src.sizes.get("layer", 1), src.sizes.get("kv", 1)
    moves = []
    for t, layer, kv, head in product(range(units * unit_tokens), range(layers), range(parts), heads):
        a, b = t + src_skip * unit_tokens, t + dst_skip * unit_tokens
        here = src.row(layer, kv, src_ids[a // src.block_tokens], a % src.block_tokens, head)
        there = dst.row(layer, kv, dst_ids[b // dst.block_tokens], b % dst.block_tokens, head)
        moves += [(to, at, tensor[index]) for (tensor, index), (to, at) in zip(here, there, strict=True)]
    for tensor, index, value in moves:
        tensor[index] = value


def byte_moves(descriptors) -> dict[int, int]:
    """Destination byte -> source byte; fails where a destination byte is written twice."""
    moves: dict[int, int] = {}
    for src, dst, size in zip(*(np.asarray(column).tolist() for column in descriptors), strict=True):
        for k in range(size):
            assert dst + k not in moves, f"byte {dst + k:#x} is written twice"
            moves[dst + k] = src + k
    return moves


def strided_moves(rows) -> dict[int, int]:
    flat = [
        (src + k * src_pitch, dst + k * dst_pitch, width)
        for src, dst, width, height, src_pitch, dst_pitch in rows.tolist()
        for k in range(height)
    ]
    return byte_moves(np.array(flat, dtype=np.int64).reshape(-1, 3).T)


def factored_moves(plan) -> dict[int, int]:
    """Byte moves of the factored form, straight from the run tables."""
    flat = []
    for group, units in plan.parts:
        for row in group.table.tolist():
            src, dst, nbytes, outer, outer_src, outer_dst, inner, inner_src, inner_dst = row
            for i, j, (a, b) in product(range(outer), range(inner), units.T.tolist()):
                flat.append((a + src + i * outer_src + j * inner_src, b + dst + i * outer_dst + j * inner_dst, nbytes))
    return byte_moves(np.array(flat, dtype=np.int64).reshape(-1, 3).T)

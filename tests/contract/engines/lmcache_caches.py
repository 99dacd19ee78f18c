"""Paged caches and memory objects of LMCache, as their tensors index them."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the engine's tensors are torch's")

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 8, 4, 2, 8
FLASH = "NL_X_TWO_NB_BS_NH_HS"


class MemoryFormat(Enum):
    """Some of LMCache's."""

    KV_2LTD = auto()
    KV_MLA_FMT = auto()


class Memory:
    """A memory object by the members that LMCache's own has: tensors cut from a buffer."""

    def __init__(self, buffer, begin, shapes, fmt=MemoryFormat.KV_2LTD, dtype=torch.float16, allocated=0):
        self.tensors = []
        for shape in shapes:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            self.tensors.append(buffer[begin : begin + nbytes].view(dtype).view(shape))
            begin += nbytes
        self.metadata = SimpleNamespace(fmt=fmt, shapes=list(shapes), phy_size=allocated)

    @property
    def tensor(self):
        assert len(self.tensors) == 1
        return self.tensors[0]

    def get_tensor(self, group):
        return self.tensors[group]


def objects_of(count, tokens, *, planes=2, layers=LAYERS, width=HEADS * DIM, gap=0, front=0, fmt=MemoryFormat.KV_2LTD):
    """Objects that follow one another in one buffer, ``gap`` bytes apart."""
    shape = (planes, layers, tokens, width)
    nbytes = torch.Size(shape).numel() * 2
    buffer = torch.zeros(front + count * (nbytes + gap), dtype=torch.uint8)
    return [Memory(buffer, front + k * (nbytes + gap), [shape], fmt, allocated=nbytes + gap) for k in range(count)]


def noise(shape, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=made).view(torch.float16)


def flash(layers=LAYERS, heads=HEADS):
    """FlashAttention's cache: K and V planes of blocks a layer."""
    return [noise((2, BLOCKS, TOKENS, heads, DIM), seed) for seed in range(layers)]


def row(cache, layer, kv, slot):
    return cache[layer][kv, slot // TOKENS, slot % TOKENS].view(torch.int16)


def in_object(memory, layer, kv, token, group=0):
    return memory.get_tensor(group)[kv, layer, token].view(-1, DIM).view(torch.int16)


def hold(cache, objects, starts, ends, mapping):
    for memory, start, end in zip(objects, starts, ends, strict=True):
        for token in range(end - start):
            for layer in range(len(cache)):
                for kv in range(2):
                    assert torch.equal(
                        in_object(memory, layer, kv, token), row(cache, layer, kv, int(mapping[start + token]))
                    )

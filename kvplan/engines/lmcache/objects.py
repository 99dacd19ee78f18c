"""Layouts of the buffers that hold LMCache's memory objects, and plans between these buffers and a cache.

Source: LMCache 0.5.6, ``v1/memory_management.py`` (``MemoryObj``, ``MemoryObjMetadata``) and ``v1/memory_allocators``.
An object's tensor is a view of its allocator's buffer, and objects of one size follow one another in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from kvplan.backends import lmcache as backend
from kvplan.base.values import integer, integers
from kvplan.engines.shared import blocks_of, slot_array
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import split_blocks
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile
from kvplan.plan.plan import Plan

MOST_PAIRS = 256  # most programs that are kept; a buffer with objects of one size needs one or two


class Chunk(NamedTuple):
    """The tokens to move of one memory object and one kernel group.

    Attributes:
        tensor: ``(2, layers, tokens, width)``, or one plane of it, ``(layers, tokens, width)``.
        period: bytes from the start of an object to the start of the next object in its allocator's buffer.
        slots: slots of the cache, one per token.
        skip: number of the object's first tokens that are not moved.
    """

    tensor: Any
    period: int
    slots: Int64Array
    skip: int


def chunks_of(
    objects: Sequence[Any], starts: Sequence[int], ends: Sequence[int], slot_mapping: Any, offset: int, cached: int
) -> list[list[Chunk]]:
    """Return the tokens to move of each object and kernel group; the chunk of an object is empty if all are cached.

    Args:
        objects: memory objects.
        starts, ends: first token of each object within the sequence, and the first token after the object.
        slot_mapping: slot of every token of the sequence, from token ``offset`` on.
        offset: the token at which ``slot_mapping`` begins.
        cached: number of tokens at the front of the sequence that are not moved.
    """
    if slot_mapping is None:
        raise KVPlanError("slot_mapping is missing; give the slot of every token of the sequence")
    if not len(objects) == len(starts) == len(ends):
        raise BlockIndexError(f"{len(objects)} memory objects, {len(starts)} starts and {len(ends)} ends; give one of "
                              "each per chunk")  # fmt: skip
    offset = integer("offset", offset, error=BlockIndexError)
    cached = integer("vllm_cached_tokens", cached, error=BlockIndexError)
    starts, ends = (
        integers(name, given, error=BlockIndexError) for name, given in (("starts", starts), ("ends", ends))
    )
    if hasattr(slot_mapping, "detach"):
        slot_mapping = slot_mapping.detach().cpu()
    chunks = []
    for memory, start, end in zip(objects, starts, ends, strict=True):
        if not 0 <= start - offset <= end - offset <= len(slot_mapping):
            raise BlockIndexError(
                f"tokens {start} to {end} are not in slot_mapping: it has {len(slot_mapping)} tokens from {offset} on"
            )
        skip = min(end - start, max(0, cached - start))
        first, last = start - offset + skip, end - offset
        slots = slot_array(slot_mapping[first:last], f"slot_mapping[{first}:{last}]")
        tensors = _tensors(memory)
        chunks.append([Chunk(tensor, _period(memory, tensor, len(tensors)), slots, skip) for tensor in tensors])
    return chunks


class ObjectPrograms:
    """The programs between caches and the buffers of memory objects, compiled at the first use of a buffer.

    Args:
        caches: layouts of the engine's cache, one per kernel group.
    """

    def __init__(self, caches: tuple[KVLayout, ...]) -> None:
        self.caches = caches
        self._pairs: dict[tuple[Any, ...], tuple[CopyProgram, CopyProgram]] = {}

    def plans(self, chunks: Sequence[Sequence[Chunk]], *, store: bool) -> list[Plan]:
        """Return one plan for each chunk and kernel group, unless the chunk is empty.

        Args:
            chunks: result of :func:`chunks_of`.
            store: True to copy from the cache into the objects, False to copy from the objects into the cache.
        """
        plans = []
        for groups in chunks:
            if len(groups) != len(self.caches):
                raise LayoutError(
                    f"a memory object holds {len(groups)} kernel groups, and there are {len(self.caches)} layouts of "
                    "caches; give one per group"
                )
            plans += [self._plan(k, chunk, store=store) for k, chunk in enumerate(groups) if chunk.slots.size]
        return plans

    def _plan(self, group: int, chunk: Chunk, *, store: bool) -> Plan:
        """Plan one chunk, in the largest units that its slots allow."""
        cache, tokens = self.caches[group], chunk.tensor.shape[-2]
        if cache.opaque:
            raise LayoutError(
                f"{cache} has opaque blocks, in which a token has no place of its own: plan whole "
                "blocks instead, with backends.lmcache.describe(objects, opaque_tokens=...)"
            )
        if chunk.skip + chunk.slots.size > tokens:
            raise BlockIndexError(f"a memory object of {tokens} tokens cannot hold {chunk.skip + chunk.slots.size}")
        step = gcd(cache.block_tokens, tokens, chunk.skip, chunk.slots.size)
        blocks = blocks_of(chunk.slots, step)
        if blocks is None:
            step, blocks = 1, chunk.slots
        (to_pool, to_cache), number = self._programs(group, chunk, step)
        first = (number * tokens + chunk.skip) // step
        of_pool = np.arange(first, first + blocks.size, dtype=np.int64)
        return to_pool.plan(blocks, of_pool) if store else to_cache.plan(of_pool, blocks)

    def _programs(self, group: int, chunk: Chunk, step: int) -> tuple[tuple[CopyProgram, CopyProgram], int]:
        """Return the programs to and from an object's buffer, in units of ``step`` tokens, and the object's number.

        A program that is kept keeps the buffer alive. So those of a buffer with a single object are not kept.
        """
        tensor, storage, cache = chunk.tensor, chunk.tensor.untyped_storage(), self.caches[group]
        number, front = divmod(tensor.data_ptr() - storage.data_ptr(), chunk.period)
        where = storage.data_ptr(), storage.nbytes(), front, chunk.period
        key = group, step, *where, tuple(tensor.shape), tensor.stride()
        if key in self._pairs:
            return self._pairs[key], number
        count = (storage.nbytes() - front - tensor.nbytes) // chunk.period + 1
        period, split = chunk.period // tensor.itemsize, "k" in cache.parts
        shape, strides = (count, *tensor.shape), (period, *tensor.stride())
        pool = backend.describe(
            tensor.as_strided(shape, strides, tensor.storage_offset() - number * period),
            object_format="KV_2LTD" if tensor.ndim == 4 else "KV_MLA_FMT",
            heads=len(cache.heads) if split else None,
            head_start=cache.heads[0] if split else 0,
            layers=cache.layers,
            part="kv" if split else cache.parts[0],
        )
        views = []
        for side in (cache, pool):
            view = split_blocks(side.built, step)
            if view is None:
                raise LayoutError(f"blocks of {side!r} cannot be cut into stretches of {step} tokens, and these slots "
                                  "are not whole blocks")  # fmt: skip
            views.append(KVLayout(view, tensors=side.tensors))
        pair = compile(*views), compile(*reversed(views))
        if count > 1:
            if len(self._pairs) >= MOST_PAIRS:
                self._pairs.clear()
            self._pairs[key] = pair
        return pair, number


def _tensors(memory: Any) -> list[Any]:
    """Return an object's tensor for each kernel group; if it has a single plane (latents), without the first dim."""
    groups = len(getattr(getattr(memory, "metadata", None), "shapes", None) or [None])
    if not hasattr(memory, "get_tensor"):
        raise LayoutError(f"memory object is a {type(memory).__name__}; give a MemoryObj of LMCache")
    tensors = [memory.tensor] if groups == 1 else [memory.get_tensor(group) for group in range(groups)]
    for tensor in tensors:
        if not hasattr(tensor, "untyped_storage"):
            raise LayoutError(f"a {type(memory).__name__} has no tensor: it was freed, or does not hold a cache")
        if tensor.ndim not in {3, 4}:
            raise LayoutError(f"a memory object has the shape {tuple(tensor.shape)}; give (2, layers, tokens, width), "
                              "or one plane of that")  # fmt: skip
    return [tensor[0] if tensor.ndim == 4 and tensor.shape[0] == 1 else tensor for tensor in tensors]


def _period(memory: Any, tensor: Any, groups: int) -> int:
    """Return the bytes that the allocator reserved for an object; if unknown, the bytes of the tensor or its buffer."""
    allocated, nbytes = int(getattr(memory.metadata, "phy_size", 0) or 0), int(tensor.nbytes)
    if allocated >= nbytes and allocated % tensor.itemsize == 0:
        return allocated
    return nbytes if groups == 1 else int(tensor.untyped_storage().nbytes())

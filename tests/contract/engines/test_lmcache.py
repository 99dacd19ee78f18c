"""LMCache's GPU connector through kvplan: bytes against the tensors' own indexing, token by token."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.backends import lmcache as backend
from kvplan.engines import lmcache as engine
from tests.contract.engines.lmcache_caches import (
    BLOCKS,
    DIM,
    FLASH,
    HEADS,
    LAYERS,
    TOKENS,
    Memory,
    MemoryFormat,
    flash,
    hold,
    in_object,
    noise,
    objects_of,
    row,
)

torch = pytest.importorskip("torch", reason="the engine's tensors are torch's")


def connector_of(cache, executor, **more):
    return engine.Connector(backend.describe(cache, engine_format=FLASH), executor, **more)


@given(st.data())
def test_any_slots_and_back(executor, data):
    """Chunks of any length, at any slots: whole blocks, parts of them, single tokens; and back into other slots."""
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    blockwise = data.draw(st.booleans())
    count = sum(lengths)
    if blockwise:
        blocks = data.draw(st.permutations(range(BLOCKS)))
        slots = [block * TOKENS + k for block in blocks for k in range(TOKENS)][:count]
    else:
        slots = data.draw(st.permutations(range(BLOCKS * TOKENS)))[:count]
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    cache = flash()
    whole = [layer.clone() for layer in cache]
    objects = [objects_of(1, length)[0] for length in lengths]
    connector = connector_of(cache, executor)
    connector.batched_from_gpu(objects, starts, ends, slot_mapping=slots)
    hold(cache, objects, starts, ends, slots)
    there = data.draw(st.permutations(range(BLOCKS * TOKENS)))[:count]
    for layer in cache:
        layer.zero_()
    connector.batched_to_gpu(objects, starts, ends, slot_mapping=torch.tensor(there))
    hold(cache, objects, starts, ends, there)
    for layer in cache:
        left = [slot for slot in range(BLOCKS * TOKENS) if slot not in there]
        assert not layer.flatten(1, 2)[:, left].any()
    hold(whole, objects, starts, ends, slots)


def test_tokens_that_are_there_already_are_not_written(executor):
    """vLLM has the first 6 of 8 tokens: 2 slots of the second block are written, of the first chunk none."""
    cache, objects = [torch.zeros_like(layer) for layer in flash()], objects_of(2, 4)
    for memory in objects:
        memory.tensor.fill_(1.0)
    connector = connector_of(cache, executor)
    loaded = connector.load(objects, [0, 4], [4, 8], slot_mapping=[-1, -1, -1, -1, 8, 9, 10, 11], vllm_cached_tokens=6)
    assert loaded.result().nbytes == 2 * 2 * 3 * 2 * 8 * 2
    for layer in cache:
        assert layer[:, 2, 2:].min() == 1
        assert layer.sum() == 2 * 2 * HEADS * DIM
    nothing = connector.load(objects, [0, 4], [4, 8], slot_mapping=[-1] * 8, vllm_cached_tokens=100)
    assert nothing.result().nbytes == 0


@pytest.mark.parametrize(
    ("end", "cached", "mapping", "units"),
    [
        (8, 4, [-1, -1, -1, -1, 20, 21, 22, 23], 1),  # the object's second half is a block
        (6, 2, [-1, -1, 8, 9, 10, 11], 2),  # a whole block of the cache, from the middle of one of the object
        (8, 3, [-1, -1, -1, 7, 12, 13, 14, 15], 5),  # tokens
    ],
)
def test_the_tokens_after_those(end, cached, mapping, units, executor):
    cache, objects = [torch.zeros_like(layer) for layer in flash()], objects_of(2, 8)
    objects[1].tensor.copy_(noise(objects[1].tensor.shape))
    loaded = connector_of(cache, executor).load(
        [objects[1]], [0], [end], slot_mapping=mapping, vllm_cached_tokens=cached
    )
    loaded.synchronize()
    assert loaded.plan.units == units
    for token in range(cached, end):
        for layer in range(LAYERS):
            for kv in range(2):
                assert torch.equal(in_object(objects[1], layer, kv, token), row(cache, layer, kv, mapping[token]))
    left = [slot for slot in range(BLOCKS * TOKENS) if slot not in mapping]
    assert not any(layer.flatten(1, 2)[:, left].any() for layer in cache)


def test_latents(executor):
    """SGLang's flat slots, in pages that are not told: single tokens; and an object that says another format."""
    cache = [noise((32, 1, 24), seed) for seed in range(LAYERS)]
    layout = backend.describe(cache, engine_format="NL_X_NBBS_ONE_HS", block_tokens=1)
    (memory,) = objects_of(1, 5, planes=1, width=24)
    connector = engine.Connector(layout, executor)
    connector.from_gpu(memory, 0, 5, slot_mapping=torch.tensor([9, 3, 31, 4, 5]))
    for layer in range(LAYERS):
        assert torch.equal(
            memory.tensor[0, layer].view(torch.int16), cache[layer][[9, 3, 31, 4, 5], 0].view(torch.int16)
        )
    assert memory.metadata.fmt is MemoryFormat.KV_MLA_FMT
    assert connector.get_shape(5) == (1, LAYERS, 5, 24)


def test_kernel_groups(executor):
    """A hybrid model's object holds its groups one after the other: layers 0 and 2 of 2 heads, layer 1 of 1 head."""
    full, window = flash(2), flash(1, heads=1)
    caches = [backend.describe(full, engine_format=FLASH, layers=(0, 2)),
              backend.describe(window, engine_format=FLASH, layers=(1,))]  # fmt: skip
    shapes = [(2, 2, 8, HEADS * DIM), (2, 1, 8, DIM)]
    total = sum(torch.Size(shape).numel() * 2 for shape in shapes)
    buffer = torch.zeros(3 * total, dtype=torch.uint8)
    objects = [Memory(buffer, k * total, shapes, allocated=total) for k in (0, 2)]
    mapping = [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 28, 29, 30, 31]
    connector = engine.Connector(caches, executor)
    connector.batched_from_gpu(objects, [0, 8], [8, 16], slot_mapping=mapping)
    for memory, start in zip(objects, (0, 8), strict=True):
        for token in range(8):
            slot = mapping[start + token]
            assert torch.equal(in_object(memory, 1, 1, token), row(full, 1, 1, slot))
            assert torch.equal(in_object(memory, 0, 0, token, group=1), row(window, 0, 0, slot))
    assert not buffer[total : 2 * total].any()
    with pytest.raises(kvplan.LayoutError, match="holds 1 kernel groups, and there are 2 layouts"):
        connector.from_gpu(objects_of(1, 8)[0], 0, 8, slot_mapping=mapping)


def test_a_buffer_that_is_one_object_s_goes_with_it(executor):
    connector = connector_of(flash(), executor)
    objects = objects_of(1, 8)
    buffer = weakref.ref(objects[0].tensor.untyped_storage())
    connector.from_gpu(objects[0], 0, 8, slot_mapping=list(range(8)))
    connector.to_gpu(objects[0], 0, 8, slot_mapping=list(range(8)))
    assert objects[0].tensor.any()
    del objects[0]
    connector.from_gpu(objects_of(2, 8)[0], 0, 8, slot_mapping=list(range(8)))  # the executor has let go of the last
    gc.collect()
    assert buffer() is None


def test_objects_of_one_buffer_that_begin_elsewhere_in_their_period(executor):
    """An allocator's buffer may hold objects of two kernels in turn: of one shape, and of one period."""
    cache, shape = flash(), (2, LAYERS, 8, HEADS * DIM)
    nbytes = torch.Size(shape).numel() * 2
    buffer = torch.zeros(4 * nbytes, dtype=torch.uint8)
    objects = [Memory(buffer, k * nbytes, [shape], allocated=2 * nbytes) for k in (2, 1, 0, 3)]
    mapping = [4 * block + k for block in (5, 1, 2, 7, 0, 3, 6, 4) for k in range(4)]
    connector = connector_of(cache, executor)
    connector.batched_from_gpu(objects, [0, 8, 16, 24], [8, 16, 24, 32], slot_mapping=mapping)
    hold(cache, objects, [0, 8, 16, 24], [8, 16, 24, 32], mapping)


def test_blocks_that_cannot_be_cut(executor):
    """An indexer's rows hold all values of a block, then all scales: part of a block has no place of its own."""
    rows = [torch.zeros(BLOCKS, TOKENS, 132, dtype=torch.uint8)]
    layout = backend.describe(rows, engine_format="NL_X_NB_BSV_BSS", part="index")
    shape = (1, 1, TOKENS, 132)
    buffer = torch.zeros(2 * TOKENS * 132, dtype=torch.uint8)
    memory = Memory(buffer, 0, [shape], MemoryFormat.KV_MLA_FMT, torch.uint8)
    with pytest.raises(kvplan.LayoutError, match="opaque blocks, in which a token has no place of its own"):
        engine.Connector(layout, executor).from_gpu(memory, 0, 2, slot_mapping=[0, 1])


def test_caches_that_are_handed_over(executor):
    """The layout is made from kvcaches, once for the same tensors; what else is asked, LMCache's connector answers."""
    asked, pointers = [], []

    def describe(kvcaches):
        asked.append(kvcaches)
        return backend.describe(list(kvcaches.values()), engine_format=FLASH)

    own = SimpleNamespace(get_shape=lambda tokens: ("own", tokens), load_stream="stream",
                          initialize_kvcaches_ptr=lambda **given: pointers.append(given))  # fmt: skip
    connector = engine.Connector(describe, executor, own)
    cache, (memory,) = flash(), objects_of(1, 4)
    named = dict(zip("abc", cache, strict=True))
    with pytest.raises(kvplan.KVPlanError, match="not known yet"):
        connector.from_gpu(memory, 0, 4, slot_mapping=range(4))
    connector.initialize_kvcaches_ptr(kvcaches=named)
    connector.from_gpu(memory, 0, 4, slot_mapping=range(4), kvcaches=dict(named))
    hold(cache, [memory], [0], [4], range(4))
    assert len(asked) == 1
    other = flash()
    connector.from_gpu(memory, 0, 4, slot_mapping=range(4, 8), kvcaches=dict(zip("abc", other, strict=True)))
    assert len(asked) == 2
    assert connector.get_shape(4) == ("own", 4)
    assert connector.load_stream == "stream"
    assert pointers == [{"kvcaches": named}]
    with pytest.raises(AttributeError, match="has no 'load_stream'"):
        _ = connector_of(cache, executor).load_stream
    with pytest.raises(kvplan.LayoutError, match=r"caches is \[1\]; give the KVLayout"):
        engine.Connector([1], executor)

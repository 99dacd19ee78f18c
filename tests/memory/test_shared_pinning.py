"""What a process pins of a pool that it shares: its own part, in pieces that end with rows, and all or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.cuda import use
from kvplan.layout import address_ranges as stretches
from tests.simulated.drawn import executor as gpu_executor
from tests.simulated.drawn import owned
from tests.simulated.entries import Entries, SimpleEntry
from tests.simulated_driver import simulated

PAGE = 4096
BLOCKS, DIM = 4, 1024  # of bytes: a (layer, part) of a block is a page a head


@pytest.fixture
def entries(monkeypatch):
    """A driver that registers, and a torch that believes in it; two pages between stretches part them."""
    made = Entries()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(stretches, "APART", 2 * PAGE)
    with use(made):
        yield made


def rank(layers, heads=range(2)):
    tensors = [torch.zeros(BLOCKS, 2, 4, len(heads), DIM, dtype=torch.uint8) for _ in layers]
    return KVLayout.from_tensors("layer: block kv token head dim", tensors, layers=layers, head_start=heads.start)


def registered(entries, start):
    """Pages from ``start`` of what was registered: first, and first after."""
    pairs = [arguments[:2] for arguments in entries.named("cuMemHostRegister_v2")]
    assert all((first - start) % PAGE == nbytes % PAGE == 0 for first, nbytes in pairs)
    return [((first - start) // PAGE, (first + nbytes - start) // PAGE) for first, nbytes in pairs]


# A (layer, part) of a block is 2 heads of 4 tokens: 2 pages. Blocks are 4 of them.
CASES = {
    "layers side by side": ("layer block kv token head dim", (2, 3), range(2), [(32, 64)]),
    "the same, twice": ("kv layer block token head dim", (2, 3), range(2), [(16, 32), (48, 64)]),
    "apart": ("layer block kv token head dim", (0, 3), range(2), [(0, 16), (48, 64)]),
    "in every block": ("block layer kv token head dim", (1, 2), range(2), [(4, 12), (20, 28), (36, 44), (52, 60)]),
    "heads outside": ("head layer block kv token dim", (0, 1), range(1, 2), [(32, 48)]),
    "heads in every page": ("layer block kv token head dim", (0, 1, 2, 3), range(1, 2), [(0, 64)]),
    "a tensor a layer": ("layer: block kv token head dim", (1, 2), range(2), [(16, 48)]),
    # Blocks that are looked up count as one stretch, from the first byte to the last.
    "a tensor a block": ("block: layer kv token head dim", (1, 2), range(2), [(4, 60)]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_process_pins_the_layers_and_heads_of_like(name, entries, case):
    notation, layers, heads, pages = CASES[case]
    pool = kvplan.allocate(notation, like=rank(layers, heads), layers=range(4), heads=range(2), shared=name)
    start, end = pool.regions[0].address, pool.regions[-1].end
    assert registered(entries, start) == pages
    edges = {start + edge * PAGE for pair in pages for edge in pair} - {start, end}
    assert {seam for seam in pool.seams if seam in edges} == edges
    covered = {page for pair in pages for page in range(*pair)}
    spans = [((r.address - start) // PAGE, (r.end - start) // PAGE, r.pinned) for r in pool.regions]
    assert all(pinned == (set(range(first, last)) <= covered) for first, last, pinned in spans)
    firsts = [arguments[0] for arguments in entries.named("cuMemHostRegister_v2")]
    tensors = pool.tensors
    del pool
    assert not entries.named("cuMemHostUnregister")
    del tensors
    assert [arguments[0] for arguments in entries.named("cuMemHostUnregister")] == firsts


def test_where_pinning_fails_half_way_the_pool_is_pageable_and_right(name, entries, monkeypatch, executor):
    whole = SimpleEntry.__call__

    def second_fails(entry, *arguments):
        code = whole(entry, *arguments)
        return 2 if entry._name == "cuMemHostRegister_v2" and len(entries.named(entry._name)) == 2 else code

    monkeypatch.setattr(SimpleEntry, "__call__", second_fails)
    like = rank((2, 3))
    with pytest.warns(UserWarning, match="the pool is pageable: cuMemHostRegister returned") as caught:
        pool = kvplan.allocate("kv layer block token head dim", like=like, layers=range(4), shared=name)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    first, second = (arguments[0] for arguments in entries.named("cuMemHostRegister_v2"))
    assert first != second
    assert entries.named("cuMemHostUnregister") == [(first,)]
    assert (pool.seams, pool.regions[0].pinned) == ((), False)
    for k, tensor in enumerate(like.tensors):
        tensor[...] = torch.arange(tensor.numel()).reshape(tensor.shape) % 251 + k
    executor.submit(kvplan.compile(like, pool.slice(layers=(2, 3))).plan([3, 0], [1, 2])).synchronize()
    for k, tensor in enumerate(like.tensors):
        assert torch.equal(pool.tensors[:, 2 + k, [1, 2]], tensor[[3, 0]].transpose(0, 1))
    assert not pool.tensors[:, :2].any()


@pytest.mark.parametrize("path", ["kernel", "staged", "copy_engine"])
@pytest.mark.parametrize("notation", ["kv layer block token head dim", "block layer kv token head dim"])
def test_a_gpu_reaches_the_part_that_was_pinned_and_no_other(name, monkeypatch, path, notation):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(stretches, "APART", 2 * PAGE)
    cache = [np.zeros((BLOCKS, 2, 4, 2, DIM), np.uint8) for _ in range(2)]
    with simulated() as driver:
        there = [owned(driver, each) for each in cache]
        gpu, others = (KVLayout.from_tensors("layer: block kv token head dim", there, layers=layers)
                       for layers in ((1, 2), (2, 3)))  # fmt: skip
        pool = kvplan.allocate(notation, like=rank((1, 2)), layers=range(4), shared=name)
        pool.tensors[...] = torch.arange(pool.tensors.numel()).reshape(pool.tensors.shape) % 241
        with gpu_executor(path) as executor:
            executor.submit(kvplan.compile(pool.slice(layers=(1, 2)), gpu).plan([3, 0], [1, 2])).synchronize()
            if path != "copy_engine":
                with pytest.raises(kvplan.HostMemoryError, match="is not pinned"):
                    executor.submit(kvplan.compile(pool.slice(layers=(2, 3)), others).plan([3], [1]))
        order = [notation.split().index(axis) for axis in ("layer", "block", "kv", "token", "head", "dim")]
        wanted = pool.tensors.permute(order).numpy().copy()
        del pool
    for layer in range(2):
        np.testing.assert_array_equal(cache[layer][[1, 2]], wanted[layer + 1, [3, 0]])
        assert not cache[layer][[0, 3]].any()

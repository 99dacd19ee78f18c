"""Layouts: addresses, slices, merges, specs, pools; literal numbers."""

from __future__ import annotations

import json
import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given

import kvplan
from kvplan import KVLayout
from kvplan.layout.spec import document_of
from tests.profiles import examples
from tests.simulated.objects import Tensor
from tests.strategies import cases, layout_of


@examples(250)
@given(case=cases())
def test_every_address_is_that_of_the_element(case):
    cache = case.src.build(0)
    layout = layout_of(cache)
    parts = ("k", "v") if "kv" in cache.sizes else ("kv",)
    assert layout.parts == parts
    assert layout.heads == cache.heads
    assert layout.num_blocks == cache.sizes["block"]
    axes = (range(cache.sizes.get("layer", 1)), range(len(parts)), range(layout.num_blocks),
            range(cache.block_tokens), cache.heads)  # fmt: skip
    for layer, kv, block, token, head in product(*axes):
        tensor, index = next(cache.row(layer, kv, block, token, head))
        element = tensor[tuple(slice(at, at + 1) for at in index)]
        number = layer + cache.layer_start
        address = layout.address(layer=number, part=parts[kv], block=block, token=token, head=head)
        assert address == element.ctypes.data
    assert layout.nbytes == sum(1 for _ in product(*axes)) * cache.sizes["dim"] * cache.itemsize


def test_torch_and_numpy_views_of_one_memory_are_equal():
    tensor = torch.arange(2 * 4 * 8 * 2 * 16, dtype=torch.int16).reshape(2, 4, 8, 2, 16)
    one = KVLayout.from_tensors("kv block token head dim", tensor)
    assert one == KVLayout.from_tensors("kv block token head dim", tensor.numpy())
    assert one == KVLayout.from_tensors("kv block head token dim", tensor.transpose(2, 3))
    assert one == KVLayout.from_tensors("kv: block token head dim", list(tensor))
    assert one == KVLayout.from_tensors("kv (block token) head dim", tensor.reshape(2, 32, 2, 16), sizes={"token": 8})
    assert one == KVLayout.from_tensors("kv block token (head dim)", tensor.flatten(3), sizes={"head": 2})
    assert one == KVLayout.from_tensors("kv block token head dim", tensor.view(torch.uint8))
    assert hash(one) == hash(KVLayout.from_tensors("kv: block token head dim", list(tensor)))
    assert one != KVLayout.from_tensors("kv block token head dim", tensor, head_start=2)
    assert one != KVLayout.from_tensors("kv block token head dim", tensor.clone())
    assert one != "kv block token head dim"


def test_printing_gives_the_notation_and_the_sizes():
    tensor = torch.zeros(80, 2, 4, 16, 2, 8, dtype=torch.bfloat16)
    layout = KVLayout.from_tensors("layer kv block token head dim", tensor, head_start=4)
    text = "layer kv block token head dim | layer=80 kv=2 block=4 token=16 head=2 dim=8 | bfloat16 on cpu"
    assert str(layout) == f"{text} | heads 4-5"
    assert repr(layout) == f"KVLayout({str(layout)!r})"
    part = layout.slice(layers=range(40, 80), heads=range(5, 6), parts=("v",))
    assert str(part).endswith("| layers 40-79 | heads 5 | parts v")
    assert part.sizes["layer"] == 40


def test_slices_of_a_split_head_axis():
    memory = np.zeros((3, 4, 5, 2, 8), np.uint8)  # block head.0 token head.1 dim: 8 heads
    layout = KVLayout.from_tensors("block head.0 token head.1 dim", memory)
    for heads in (range(2, 4), range(5, 6), range(2, 6), range(8)):
        part = layout.slice(heads=heads)
        assert part.heads == heads
        for head in heads:
            assert part.address(layer=0, part="kv", head=head) == layout.address(layer=0, part="kv", head=head)


@pytest.mark.parametrize(
    ("notation", "kwargs", "shape"),
    [
        ("block layer kv token head dim", {"num_blocks": 2, "block_tokens": 64}, (2, 3, 2, 64, 4, 8)),
        ("kv (block token) layer head dim", {}, (2, 128, 3, 4, 8)),
        ("block head.0 layer kv token head.1 dim", {"sizes": {"head.0": 2}}, (8, 2, 3, 2, 16, 2, 8)),
        ("layer block head token (kv dim)", {}, (3, 8, 4, 16, 16)),
    ],
)
def test_pools_hold_what_another_layout_holds(notation, kwargs, shape):
    tensors = [torch.zeros((2, 8, 16, 4, 8), dtype=torch.bfloat16) for _ in range(3)]
    like = KVLayout.from_tensors("layer: kv block token head dim", tensors, layer_start=5, head_start=4)
    pool = kvplan.allocate(notation, like=like, **kwargs)
    assert (tuple(pool.tensors.shape), pool.tensors.dtype) == (shape, torch.bfloat16)
    assert (pool.layers, pool.parts, pool.heads) == (like.layers, like.parts, like.heads)
    assert kvplan.compile(like, pool).unit_tokens == 16


def test_pin_without_a_gpu_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for tensor, why in ((torch.zeros(4, 8, 6), "torch reaches no GPU"), (np.zeros((4, 8, 6)), "numpy allocates")):
        like = KVLayout.from_tensors("block token dim", tensor)
        caplog.clear()
        assert not kvplan.allocate("block token dim", like=like).regions[0].pinned
        assert not caplog.messages
        assert not kvplan.allocate("block token dim", like=like, pin=True).regions[0].pinned
        assert why in caplog.text


class Pinned(Tensor):
    """Bytes of a buffer that says it is a page-locked allocation of its own."""

    def is_pinned(self) -> bool:
        return True


def test_no_descriptor_spans_two_registrations_however_they_come_together():
    memory, target = np.zeros((4, 64), np.int8), np.zeros((4, 64), np.int8)
    halves = [Pinned(part, "cpu") for part in (memory[:2], memory[2:])]
    dst = KVLayout.from_tensors("layer block dim", target.reshape(2, 2, 64))
    together = KVLayout.from_tensors("layer: block dim", halves)
    apart = [KVLayout.from_tensors("block dim", half, layer_start=k) for k, half in enumerate(halves)]
    merged = KVLayout.merge(apart)
    assert merged == together
    assert together.seams == (memory[2:].ctypes.data,)
    for layout in (together, merged):
        assert kvplan.compile(layout, dst).plan([0, 1], [0, 1]).descriptors().size.tolist() == [128, 128]
    plans = [kvplan.compile(one, dst.slice(layers=(k,))).plan([0, 1], [0, 1]) for k, one in enumerate(apart)]
    assert kvplan.join(plans).descriptors().size.tolist() == [128, 128]


def test_heads_of_layers_that_differ_are_listed_and_sliced():
    def of(layers, heads, dim):
        tensors = [np.zeros((4, 2, 2, len(heads), dim)) for _ in layers]
        return KVLayout.from_tensors("layer: block kv token head dim", tensors, layers=layers, head_start=heads.start)

    def cache(sliding, full):
        return KVLayout.merge([of(range(3), sliding, 8), of(range(3, 5), full, 16)])

    rank, pool = cache(range(7, 8), range(1, 2)), cache(range(8), range(2))
    assert (rank.heads, pool.heads) == ((1, 7), range(8))
    assert str(rank).endswith("layers 0-2: k v dim=8 heads 7 | layers 3-4: k v dim=16 heads 1 | float64 on cpu")
    part = pool.slice(heads=rank.heads)
    assert [part.slice(layers=[layer]).heads for layer in (0, 4)] == [(1, 7), range(1, 2)]
    for layer, head in ((0, 1), (0, 7), (4, 1)):
        assert part.address(layer=layer, part="v", head=head) == pool.address(layer=layer, part="v", head=head)
    with pytest.raises(kvplan.LayoutError, match="head 2 of layer 0 'k'; heads are 1 to 7"):
        part.address(layer=0, part="k", head=2)
    assert pool.slice(heads=pool.heads) == pool
    assert kvplan.compile(rank, pool).unit_nbytes == rank.block_nbytes
    assert kvplan.verify(rank, pool).ok


def test_merged_layouts_join_regions_and_tell_sizes_of_their_own():
    memory = np.zeros((8, 16), np.uint8)
    at, halves = memory.ctypes.data, [memory[:, :8], memory[:, 8:]]
    halves[1].flags.writeable = False
    parts = [
        KVLayout.from_tensors("block dim", half, part=f"p{k}", seams=[at + 16 * seam])
        for (k, half), seam in zip(enumerate(halves), (3, 1), strict=True)
    ]
    both = KVLayout.merge(parts)
    assert (len(both.regions), both.seams, both.writable, both.opaque) == (1, (at + 16, at + 48), False, True)
    kv = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((8, 2, 4, 3, 16), np.float16)] * 1)
    scale = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 1, 6), np.uint8), part="scale", layers=[5])
    state = KVLayout.from_tensors("block dim", np.zeros((8, 100), np.int8), part="state", layers=[7])
    merged = KVLayout.merge([kv, scale, state])
    assert (merged.parts, merged.layers, merged.block_tokens) == (("k", "v", "scale", "state"), (0, 5, 7), 4)
    assert merged.notation == "layer: block kv token head dim + block token head dim + block dim"
    assert merged.sizes == {"layer": 3, "kv": 2, "block": 8, "token": 4}  # the others differ
    kinds = "layer 0: k v head=3 dim=16 float16 | layer 5: scale head=1 dim=6 uint8 | layer 7: state dim=100"
    assert f"| {kinds}" in str(merged)
    own = merged.slice(parts=["scale"])
    assert own.sizes == {"layer": 1, "block": 8, "kv": 1, "token": 4, "head": 1, "dim": 6}
    assert merged.slice(layers=(7,)).block_tokens == 1
    assert merged.slice(layers=[0, 7], heads=range(1, 3)).block_nbytes == 2 * 4 * 2 * 16 * 2 + 100
    for layout in (merged, own, merged.slice(parts=["k"]), merged.slice(layers=[7]), merged.slice(layers=[5, 7])):
        assert KVLayout.from_spec(json.loads(json.dumps(document_of(layout.built)))) == layout


@pytest.mark.slow
@pytest.mark.parametrize("count", [18, 24, 40])
def test_strides_of_like_size_end_in_an_error_within_the_budget(count):
    dice = random.Random(1)
    spec = {
        "notation": " ".join([*(f"block.{k}" for k in range(count)), "dim"]),
        "sizes": {"dim": 1} | {f"block.{k}": 2 for k in range(count)},
        "strides": [*(dice.randrange(2**40, 2**41) for _ in range(count)), 1],
        "dtype": "uint8",
    }
    with pytest.raises(kvplan.LayoutError, match=r"axes interleave .* after 2,097,152 steps; give strides that nest"):
        KVLayout.from_spec(spec)

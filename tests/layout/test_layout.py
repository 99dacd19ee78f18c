"""Layouts: addresses, slices, merges, specs, pools; literal numbers."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given

import kvplan
from kvplan import KVLayout
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


def test_slices_keep_addresses_and_global_numbers():
    layout = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((4, 2, 8, 6, 2)) for _ in range(3)],
                                   layer_start=10, head_start=6)  # fmt: skip
    part = layout.slice(layers=(12,), heads=range(8, 11), parts=("v",))
    assert (part.layers, part.heads, part.parts) == ((12,), range(8, 11), ("v",))
    assert part.block_nbytes == 8 * 3 * 2 * 8
    for block, token, head in product(range(4), range(8), range(8, 11)):
        where = {"layer": 12, "part": "v", "block": block, "token": token, "head": head}
        assert part.address(**where) == layout.address(**where)


def test_slices_of_a_split_head_axis():
    memory = np.zeros((3, 4, 5, 2, 8), np.uint8)  # block head.0 token head.1 dim: 8 heads
    layout = KVLayout.from_tensors("block head.0 token head.1 dim", memory)
    for heads in (range(2, 4), range(5, 6), range(2, 6), range(8)):
        part = layout.slice(heads=heads)
        assert part.heads == heads
        for head in heads:
            assert part.address(layer=0, part="kv", head=head) == layout.address(layer=0, part="kv", head=head)
    with pytest.raises(kvplan.LayoutError, match="cross a boundary"):
        layout.slice(heads=range(1, 3))


def test_merged_parts_and_layers():
    ckv = KVLayout.from_tensors("layer: block token dim", [np.zeros((4, 64, 512), np.uint8)] * 1, part="ckv")
    kpe = KVLayout.from_tensors("layer: block token dim", [np.zeros((4, 64, 64), np.uint8)] * 1, part="kpe")
    state = KVLayout.from_tensors("block dim", np.zeros((4, 1000), np.uint8), layer_start=1, part="state")
    merged = KVLayout.merge([ckv, kpe, state])
    assert merged.parts == ("ckv", "kpe", "state")
    assert merged.layers == (0, 1)
    assert merged.block_tokens == 64
    assert merged.block_nbytes == 64 * 576 + 1000
    assert merged.notation == "layer: block token dim + block dim"
    assert merged.slice(layers=(1,)).block_tokens == 1
    assert len(merged.regions) == 3


def test_blocks_in_allocations_of_their_own():
    blocks = [np.zeros((2, 2, 4, 1, 8), np.uint8) for _ in range(5)]
    layout = KVLayout.from_tensors("block: layer kv token head dim", blocks)
    assert len(layout.regions) == 5
    assert layout.num_blocks == 5
    assert layout.address(layer=1, part="v", block=3, token=2) == blocks[3][1, 1, 2].ctypes.data


SPEC = {
    "notation": "layer: block token dim",
    "dtype": "uint8",
    "sizes": {"layer": 61, "block": 1000, "token": 64, "dim": 584},
    "strides": [37440, 584, 1],
    "device": "cuda:0",
}


def test_specs_from_a_mapping_toml_and_json(tmp_path):
    toml = 'notation = "layer: block token dim"\ndtype = "uint8"\nstrides = [37440, 584, 1]\ndevice = "cuda:0"\n'
    toml += "[sizes]\nlayer = 61\nblock = 1000\ntoken = 64\ndim = 584\n"
    (tmp_path / "a.toml").write_text(toml)
    (tmp_path / "a.json").write_text(json.dumps(SPEC))
    one = KVLayout.from_spec(SPEC)
    assert one == KVLayout.from_spec(tmp_path / "a.toml") == KVLayout.from_spec(str(tmp_path / "a.json"))
    assert one.block_nbytes == 61 * 37_376
    assert one.address(layer=0, part="kv", block=1) - one.address(layer=0, part="kv", block=0) == 37_440
    assert one.virtual
    assert one.device == "cuda:0"


@pytest.mark.parametrize(
    ("notation", "kwargs", "shape"),
    [
        ("block layer kv token head dim", {}, (8, 3, 2, 16, 4, 8)),
        ("block layer kv token head dim", {"num_blocks": 2, "block_tokens": 64}, (2, 3, 2, 64, 4, 8)),
        ("kv (block token) layer head dim", {}, (2, 128, 3, 4, 8)),
        ("block head.0 layer kv token head.1 dim", {"sizes": {"head.0": 2}}, (8, 2, 3, 2, 16, 2, 8)),
        ("layer block head token (kv dim)", {}, (3, 8, 4, 16, 16)),
    ],
)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_pools_hold_what_another_layout_holds(notation, kwargs, shape, framework):
    zeros = torch.zeros if framework == "torch" else np.zeros
    dtype = torch.bfloat16 if framework == "torch" else np.float16
    tensors = [zeros((2, 8, 16, 4, 8), dtype=dtype) for _ in range(3)]
    like = KVLayout.from_tensors("layer: kv block token head dim", tensors, layer_start=5, head_start=4)
    pool = kvplan.allocate(notation, like=like, **kwargs)
    assert tuple(pool.tensors.shape) == shape
    assert type(pool.tensors).__module__.startswith(framework)
    assert pool.tensors.dtype == dtype
    assert (pool.layers, pool.parts, pool.heads) == (like.layers, like.parts, like.heads)
    assert pool.block_nbytes // pool.block_tokens == like.block_nbytes // like.block_tokens
    assert kvplan.compile(like, pool).unit_tokens == 16


def test_pools_of_nested_tensors():
    like = KVLayout.from_tensors("block layer token dim", np.zeros((4, 3, 8, 6), np.int8), part="ckv")
    pool = kvplan.allocate("block layer: token dim", like=like, num_blocks=2)
    assert [len(pool.tensors), len(pool.tensors[0]), pool.tensors[1][2].shape] == [2, 3, (8, 6)]
    assert pool.parts == ("ckv",)


def test_a_pool_of_bfloat16_from_a_spec_is_numpy_of_the_same_width():
    like = KVLayout.from_spec({"notation": "block kv token head dim", "dtype": "bf16",
                               "sizes": {"block": 4, "token": 16, "head": 2, "dim": 8}})  # fmt: skip
    pool = kvplan.allocate("block kv token head dim", like=like)
    assert pool.tensors.dtype == np.uint16
    assert pool.block_nbytes == like.block_nbytes


def test_pin_without_a_gpu_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for tensor, why in ((torch.zeros(4, 8, 6), "torch reaches no GPU"), (np.zeros((4, 8, 6)), "numpy allocates")):
        like = KVLayout.from_tensors("block token dim", tensor)
        caplog.clear()
        assert not kvplan.allocate("block token dim", like=like).regions[0].pinned
        assert not caplog.messages
        assert not kvplan.allocate("block token dim", like=like, pin=True).regions[0].pinned
        assert why in caplog.text


def test_parts_without_heads_are_kept_whole_by_a_slice_of_heads():
    kv = KVLayout.from_tensors("block token head dim", np.zeros((4, 8, 6, 2), np.int8))
    index = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 132), np.int8), part="index")
    part = KVLayout.merge([kv, index]).slice(heads=range(2, 4))
    assert part.block_nbytes == 8 * (2 * 2 + 132)
    assert part.slice(parts="index").block_nbytes == 8 * 132


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

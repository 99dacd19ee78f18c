"""Programs: units, groups, loops, alignment; literal numbers, and what explain and diagram say of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.program.explain import LEAST_WIDTH
from tests.compiled_cases import compiled
from tests.strategies import cases


def spec(notation: str, device: str = "cpu", dtype: str = "bf16", part: str = "kv", **sizes: int) -> KVLayout:
    content = {"notation": notation, "dtype": dtype, "device": device, "sizes": sizes, "part": part}
    return KVLayout.from_spec(content)


def split_kv(device="cuda:0", **sizes) -> KVLayout:
    return spec("layer: kv block token head dim", device, **({"layer": 80, "head": 2, "dim": 128} | sizes))


def page_first(**sizes) -> KVLayout:
    return spec("block layer kv token head dim", **({"layer": 80, "head": 2, "dim": 128} | sizes))


@pytest.mark.parametrize(
    ("src_tokens", "dst_tokens", "unit"),
    [(16, 16, 16), (16, 64, 16), (64, 16, 16), (16, 24, 8), (24, 16, 8), (16, 15, 1), (1, 256, 1), (48, 64, 16)],
)
def test_the_unit_is_the_greatest_common_divisor_of_the_block_sizes(src_tokens, dst_tokens, unit):
    program = kvplan.compile(split_kv(block=4, token=src_tokens), page_first(block=4, token=dst_tokens))
    assert program.unit_tokens == unit
    assert program.unit_nbytes == 80 * 2 * unit * 2 * 128 * 2
    assert (program.program.src_units, program.program.dst_units) == (src_tokens // unit, dst_tokens // unit)


def test_a_token_axis_split_unevenly_makes_the_unit_smaller():
    src = KVLayout.from_tensors("block token.0 dim token.1", np.zeros((4, 2, 8, 6), np.int8))  # 12 tokens, 2 x 6
    dst = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 8), np.int8))
    program = kvplan.compile(src, dst)  # units of 4 tokens would straddle the 6
    assert program.unit_tokens == 2
    assert (program.program.src_units, program.program.dst_units) == (6, 4)


def test_fused_and_split_content_match_by_their_halves():
    fused = spec("layer: block token head dim", layer=2, block=4, token=16, head=2, dim=256)
    split = spec("layer: kv block token head dim", layer=2, block=4, token=16, head=2, dim=128)
    there, back = kvplan.compile(fused, split), kvplan.compile(split, fused)
    assert (there.runs, there.run_nbytes) == (2 * 2 * 16 * 2, (256, 256))
    assert (back.runs, back.unit_nbytes) == (there.runs, there.unit_nbytes)
    named = spec("layer: block token head (kv dim)", layer=2, block=4, token=16, head=2, dim=128)
    assert kvplan.compile(fused, named).runs == 2  # the same bytes, so one run a layer
    assert kvplan.compile(fused, fused).runs == 2


def test_a_layer_may_hold_fused_content_beside_k_and_v():
    def cache():
        return KVLayout.merge([KVLayout.from_tensors("block dim", np.zeros((3, 8 * n), np.uint8), part=part)
                               for n, part in ((2, "kv"), (1, "k"), (1, "v"))])  # fmt: skip

    one, other = cache(), cache()
    program = kvplan.compile(one, other)
    moved = zip(*(column.tolist() for column in program.plan([0], [1]).descriptors()), strict=True)
    assert sorted(moved) == sorted(
        (one.address(layer=0, part=part, block=0), other.address(layer=0, part=part, block=1), nbytes)
        for part, nbytes in (("kv", 16), ("k", 8), ("v", 8))
    )


def test_one_head_of_any_number_is_content_without_heads():
    memory, other = np.zeros((4, 2, 1, 8), np.int8), np.zeros((4, 2, 8), np.int8)
    third = KVLayout.from_tensors("block token head dim", memory, head_start=3)
    plain = KVLayout.from_tensors("block token dim", other)
    for sides, arrays in (((third, plain), (memory, other)), ((plain, third), (other, memory))):
        moved = kvplan.compile(*sides).plan([1], [2]).descriptors()
        assert [column.tolist() for column in moved] == [[arrays[0][1].ctypes.data], [arrays[1][2].ctypes.data], [16]]


def test_parts_of_different_block_strides_are_groups():
    def cache(num_blocks):
        kv = KVLayout.from_tensors(
            "layer: block kv token head dim", [np.zeros((num_blocks, 2, 16, 2, 64), np.int8)] * 1
        )
        scale = KVLayout.from_tensors("layer: block kv token head", [np.zeros((num_blocks, 2, 16, 2), np.float32)] * 1,
                                      part="scale")  # fmt: skip
        return KVLayout.merge([kv, scale])

    program = kvplan.compile(cache(4), cache(6))
    assert len(program.program.groups) == 2
    assert (program.runs, program.run_nbytes) == (2, (256, 4096))
    assert "group 1 of 2" in program.explain()


def test_blocks_that_are_looked_up():
    blocks = [np.zeros((2, 4, 8), np.int8) for _ in range(5)]
    program = kvplan.compile(
        KVLayout.from_tensors("block: layer token dim", blocks),
        KVLayout.from_tensors("block layer token dim", np.zeros((5, 2, 4, 8), np.int8)),
    )
    assert (program.runs, program.run_nbytes) == (1, (64, 64))
    d = program.plan([4, 0], [1, 3]).descriptors()
    assert sorted(d.src.tolist()) == sorted(blocks[k].ctypes.data for k in (4, 0))
    assert "looked up in a table of 5" in program.explain()


def test_compile_is_cached_on_the_pair_and_holds_no_memory_alive():
    import gc
    import weakref

    memory = np.zeros((4, 8), np.int8)
    src, dst = KVLayout.from_tensors("block dim", memory), KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8))
    program = kvplan.compile(src, dst)
    assert kvplan.compile(src, dst) is program
    assert kvplan.compile(dst, src) is not program
    alive = weakref.ref(memory)
    del memory, src, dst, program
    gc.collect()
    assert alive() is None


@given(case=cases(), width=st.integers(LEAST_WIDTH, 130))
def test_explain_in_a_width_loses_nothing(case, width):
    program = compiled(case)[2]
    made, whole = program.explain(width), program.explain()
    assert max(map(len, made.splitlines())) <= width
    assert "".join(made.split()) == "".join(whole.split())


def test_extents_of_a_side_whose_groups_share_their_blocks():
    layers = [np.zeros((4, 8, 64), np.int8), np.zeros((4, 16, 64), np.int8)[:, :8]]  # of different block strides
    src = KVLayout.merge([KVLayout.from_tensors("block token dim", t, layer_start=k) for k, t in enumerate(layers)])
    dst = KVLayout.from_tensors("block layer token dim", np.zeros((4, 2, 8, 64), np.int8))
    program = kvplan.compile(src, dst).program
    assert len(program.groups) == 2
    assert program.extents("dst") == (1, 1024, 1024)
    assert program.extents("src") == (2, 512, 512)

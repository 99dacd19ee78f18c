"""Element types: bytes of one number format are not read as another one, unless the caller says so."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import IncompatibleLayoutsError, KVLayout
from kvplan.layout.tensors import ITEMSIZE, agree, kind_of
from tests.profiles import examples

NAMES = [*sorted(ITEMSIZE), "float8_e4m3fnuz", "complex64", "5 bytes", "[('k', '<f2')]", ""]
dtypes = st.sampled_from(NAMES)


PLACES = {"kv": 1 << 20, "scale": 1 << 21, "index": 1 << 22}


def layout(dtype: str | None, notation: str = "block token dim", part: str = "kv") -> KVLayout:
    told = {} if dtype is None else {"dtype": dtype}
    nbytes = ITEMSIZE.get(dtype or "bf16", 1)
    sizes = {"block": 4, "token": 8, "dim": 64 // nbytes}
    return KVLayout.from_spec({"notation": notation, "sizes": sizes, "part": part, "address": PLACES[part], **told})


@given(one=dtypes, other=dtypes)
@examples(200)
def test_types_agree_both_ways_or_not_at_all(one, other):
    assert agree(one, other) == agree(other, one)
    assert agree(one, one)
    assert agree(one, "uint8")
    assert agree(one, other) or "" not in (kind_of(one), kind_of(other))


@given(one=st.sampled_from(sorted(ITEMSIZE)), other=st.sampled_from(sorted(ITEMSIZE)))
@examples(200)
def test_a_pair_compiles_exactly_if_its_types_agree(one, other):
    src, dst = layout(one), layout(other, "token block dim")
    if agree(one, other):
        assert not kvplan.compile(src, dst).reinterprets
        assert not kvplan.compile(src, dst, reinterpret=True).reinterprets
        return
    with pytest.raises(IncompatibleLayoutsError, match=f"is {one} in the source and {other} in the destination"):
        kvplan.compile(src, dst)
    program = kvplan.compile(src, dst, reinterpret=True)
    assert program.reinterprets
    with pytest.raises(IncompatibleLayoutsError, match="reinterpret=True"):
        kvplan.compile(src, dst)  # what was compiled before does not let it pass
    assert kvplan.compile(src, dst, reinterpret=True) is program


def test_a_spec_that_does_not_say_its_type_goes_with_everything():
    unstated = layout(None)
    assert unstated.dtype == "bfloat16"
    for dtype in ("bf16", "fp16", "e4m3", "uint8"):
        assert kvplan.compile(unstated, layout(dtype)).unit_nbytes == 64 * 8


def test_tensors_know_their_type():
    half, single = (
        KVLayout.from_tensors("block token dim", np.zeros((4, 8, 32 // size), f"f{size}")) for size in (2, 4)
    )
    with pytest.raises(IncompatibleLayoutsError, match="layer 0 'kv' is float16 in the source and float32"):
        kvplan.compile(half, single)
    with pytest.raises(IncompatibleLayoutsError, match="float16"):
        kvplan.verify(half, single)
    assert kvplan.verify(half, single, reinterpret=True).ok


def test_each_part_has_its_own_type():
    def merged(scale):
        return KVLayout.merge([layout("e4m3"), layout(scale, part="scale")])

    one, other = merged("fp32"), merged("fp16")
    assert one.dtype == "e4m3 + fp32"
    assert kvplan.compile(one.slice(parts=("kv",)), other.slice(parts=("kv",))).runs
    with pytest.raises(IncompatibleLayoutsError, match="layer 0 'scale' is fp32 in the source and fp16"):
        kvplan.compile(one, other)


def test_a_dump_keeps_them(tmp_path):
    merged = KVLayout.merge([layout("e4m3"), layout("fp32", part="scale"), layout(None, part="index")])
    merged.save(tmp_path / "cache.json")
    read = KVLayout.from_spec(tmp_path / "cache.json")
    assert [c.dtype for c in read.components] == [c.dtype for c in merged.components] == ["e4m3", "fp32", ""]
    assert read.slice(parts=("scale",)).components[0].dtype == "fp32"
    layout(None).save(tmp_path / "unstated.json")
    assert KVLayout.from_spec(tmp_path / "unstated.json").components[0].dtype == ""


def test_ranks_are_checked_too():
    with pytest.raises(IncompatibleLayoutsError, match="bf16 in the source and fp16"):
        kvplan.reshard(layout("bf16"), layout("fp16"))
    made = kvplan.reshard(layout("bf16"), layout("fp16"), reinterpret=True)
    assert made.plan([0], [1])[0, 0].nbytes == 64 * 8
    assert pickle.loads(pickle.dumps(made[0, 0])).plan([0], [1]).nbytes == 64 * 8
    with pytest.raises(IncompatibleLayoutsError, match="bf16 in the source and fp16"):
        kvplan.reshard(made[0, 0].src.layout, made[0, 0].dst.layout)

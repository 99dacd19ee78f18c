"""Every kind of bad input gets its error, says what is wrong, and moves nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import kvplan
from kvplan import (
    BlockIndexError,
    IncompatibleLayoutsError,
    KVLayout,
    KVPlanError,
    LayoutError,
    NotationError,
    OverlapError,
    PathError,
    TransferError,
)
from tests.execute.small_caches import cache, paged


def test_errors_have_the_contract_s_bases():
    for error in (NotationError, LayoutError, IncompatibleLayoutsError, BlockIndexError, OverlapError,
                  kvplan.HostMemoryError, PathError, TransferError):  # fmt: skip
        assert issubclass(error, KVPlanError)
        assert issubclass(error, ValueError)
    assert issubclass(BlockIndexError, IndexError)
    assert issubclass(TransferError, RuntimeError)


@pytest.mark.parametrize(
    ("notation", "column", "problem"),
    [
        ("", 1, "no dims"),
        ("layer:", 7, "no dims"),
        (": block dim", 1, "nothing left"),
        ("layer: kv: block dim", 10, "second ':'"),
        ("block heads dim", 7, "unknown axis 'heads'"),
        ("block token block dim", 13, "block is named twice"),
        ("layer: layer block dim", 8, "layer is named twice"),
        ("token: block dim", 1, "cannot stand left"),
        ("layer.0: block layer.1 dim", 1, "cannot stand left"),
        ("(block token dim", 1, "never closed"),
        ("block token) dim", 12, "without its '('"),
        ("((block) token) dim", 2, "inside a '('"),
        ("block () dim", 7, "empty '()'"),
        ("block 2 dim", 7, "only number is 1"),
        ("block (1 token) dim", 8, "only number is 1"),
        ("block token.0 dim", 7, "token.1 is missing"),
        ("block token.0 token.2 dim", 7, "token.1 is missing"),
        ("block token token.1 dim", 13, "both whole and split"),
        ("block token. dim", 7, "number of the factor"),
        ("block token.x dim", 7, "number of the factor"),
        ("block token.01 token.1 dim", 7, "number of the factor"),
        ("block kv.0 kv.1 dim", 7, "cannot be split"),
        ("block, token dim", 6, "unexpected character ','"),
        ("block token-head dim", 12, "unexpected character '-'"),
        ("block | k: dim | v: dim", 7, "only kvplan.allocate makes a page of several parts"),
    ],
)
def test_malformed_notation_points_at_the_column(notation, column, problem):
    with pytest.raises(NotationError) as caught:
        KVLayout.from_tensors(notation, cache(4, 4))
    assert problem in str(caught.value)
    assert caught.value.column == column
    assert str(caught.value).splitlines()[-1] == " " * (3 + column) + "^"


def test_a_notation_is_a_string():
    with pytest.raises(NotationError, match="not int"):
        KVLayout.from_tensors(7, cache(4))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: paged(notation="block token dim"), "has 3 dims; the tensor's shape (8, 4, 2, 8) has 4"),
        (lambda: KVLayout.from_tensors("layer: block dim", cache(4, 4)), "asks for a sequence"),
        (
            lambda: KVLayout.from_tensors("layer: block dim", {"a": cache(4, 4)}),
            "got dict; give list(tensors.values())",
        ),
        (lambda: KVLayout.from_tensors("block dim", [cache(4, 4)]), "the axis of a list stands left of a ':'"),
        (lambda: KVLayout.from_tensors("layer: block dim", []), "no tensors along 'layer'"),
        (lambda: KVLayout.from_tensors("layer kv: block dim", [[cache(4, 4)] * 2, [cache(4, 4)]]), "ragged"),
        (lambda: KVLayout.from_tensors("kv: block dim", [cache(4, 4)] * 3), "3 tensors along 'kv'"),
        (lambda: KVLayout.from_tensors("layer: block dim", [cache(4, 4), cache(5, 4)]), "tensor 1 has shape (5, 4)"),
        (lambda: KVLayout.from_tensors("layer: block dim", [cache(4, 4), cache(4, 8)[:, :4]]), "tensor 1 has strides"),
        (lambda: KVLayout.from_tensors("layer: block dim", [cache(4, 4), np.zeros((4, 4), np.int8)]), "has dtype"),
        (lambda: KVLayout.from_tensors("block kv dim", cache(4, 3, 8)), "kv=2; it is dim 1 of the shape (4, 3, 8)"),
        (lambda: KVLayout.from_tensors("block 1 dim", cache(4, 3, 8)), "cannot be 1"),
        (lambda: KVLayout.from_tensors("(block token) dim", cache(64, 8)), "give sizes={...} for 'block' or 'token'"),
        (lambda: KVLayout.from_tensors("(block token) dim", cache(64, 8), sizes={"token": 24}), "cannot be"),
        (lambda: paged(sizes={"token": 5}), "dim of extent 4 in 'block token head dim' cannot be token=5"),
        (
            lambda: KVLayout.from_tensors("block token.0 dim token.1", cache(4, 2, 8, 3), sizes={"token": 5}),
            "sizes say token=5, the shape (4, 2, 8, 3) says 6",
        ),
        (lambda: paged(sizes={"layer": 5}), "'layer', which"),
        (lambda: paged(sizes={"token": 0}), "an integer of at least 1"),
        (lambda: paged(num_blocks=0), "holds nothing"),
        (lambda: paged(dim=0), "dim 3"),
        (lambda: KVLayout.from_tensors("block token dim", np.flip(cache(4, 4, 8), 1)), "run backwards"),
        (lambda: KVLayout.from_tensors("block token dim", torch.zeros(1, 4, 8).expand(4, 4, 8)), "overlaps itself"),
        (lambda: KVLayout.from_tensors("layer: block dim", [torch.zeros(4, 8)] * 2), "overlap: they share bytes"),
        (lambda: KVLayout.from_tensors("block: token dim", [cache(4, 8)] * 2), "overlap: they share bytes"),
        (lambda: KVLayout.from_tensors("block dim", torch.zeros(4, 8, device="meta")), "has no memory"),
        (lambda: paged(layer_start=-1), "layer_start is -1"),
        (lambda: paged(head_start=-1), "head_start is -1"),
        (lambda: paged(part=""), "part is ''"),
        (lambda: paged(part=3), "part is 3"),
        (lambda: paged(layers=(1, 2)), "layers are (1, 2)"),
        (lambda: paged(seams=(5,)), "seam 0x5 lies in no allocation"),
        (lambda: paged(seams=("x",)), "seams[0] is 'x'; a seam is an address"),
        (lambda: paged().slice(layers=[3]), "layers [3] are not held"),
        (lambda: paged().slice(parts=("k",)), "parts ['k'] are not held"),
        (lambda: paged().slice(heads=range(1, 3)), "heads 1 to 2 are not all held"),
        (lambda: paged().slice(heads=[0]), "give a range"),
        (lambda: paged().slice(heads=range(0)), "give a range"),
        (lambda: paged().slice(parts=()), "holds nothing"),
        (lambda: paged().address(layer=0, part="kv", token=4), "token slots are 0 to 3"),
        (lambda: paged().address(layer=0, part="kv", head=2), "heads are 0 to 1"),
        (lambda: paged().address(layer=1, part="kv"), "no layer 1"),
        (lambda: KVLayout.merge([]), "merge of no layouts"),
        (lambda: KVLayout.merge([paged(), paged()]), "layouts 0 and 1 both hold layer 0 'kv'"),
        (lambda: KVLayout.merge([paged(), paged(num_blocks=9, part="x")]), "layout 1 has 9 blocks"),
        (lambda: KVLayout.merge([paged(), paged(token=5, part="x")]), "block_tokens differ"),
        (lambda: KVLayout.merge([a := paged(), KVLayout.from_tensors("block dim", cache(8, 4), part="x"), a]), "both"),
    ],
)  # fmt: skip
def test_tensors_that_make_no_layout(make, says):
    with pytest.raises(LayoutError) as caught:
        make()
    assert says in str(caught.value)


def test_a_stride_that_leaves_the_allocation():
    stretched = np.lib.stride_tricks.as_strided(cache(4, 8), shape=(5, 8), strides=(8, 1))
    with pytest.raises(LayoutError, match="outside its allocation"):
        KVLayout.from_tensors("block dim", stretched)


def test_components_that_overlap_across_layouts():
    memory = cache(8, 16)
    one = KVLayout.from_tensors("block dim", memory[:, :10], part="a")
    two = KVLayout.from_tensors("block dim", memory[:, 9:], part="b")
    with pytest.raises(LayoutError, match="overlap"):
        KVLayout.merge([one, two])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "needs 'notation'"),
        ({"notation": "block dim"}, "needs 'sizes'"),
        ({"notation": "block dim", "sizes": {"block": 2}}, "needs sizes['dim']"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": "x"}}, "sizes['dim'] is 'x'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2, "head": 2}}, "'head', which"),
        ({"notation": "block kv dim", "sizes": {"block": 2, "dim": 2, "kv": 3}}, "kv=3"),
        ({"notation": "block token.0 dim token.1", "sizes": {"block": 2, "dim": 2, "token": 6, "token.0": 4}}, "split"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "dtype": "f13"}, "dtype 'f13' is unknown"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "strides": [4]}, "give 2 integers"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "colour": 1}, "unknown key 'colour'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "address": -1}, "'address' is -1"),
        ({"notation": "block dim", "sizes": {"block": 2**40, "dim": 2**40}}, "int64"),
        (
            {"notation": "layer: block dim", "sizes": {"layer": 2**45, "block": 1, "dim": 2}},
            "over 16,384 (layer, part)s",
        ),
        ({"notation": "block: dim", "sizes": {"block": 2**18, "dim": 2}}, "over 131,072 separate tensors"),
        ({"notation": "layer: block dim", "sizes": {"layer": 2**14, "block": 2**30, "dim": 2**20}}, "int64"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "device": "cdua"}, "device is 'cdua'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "device": 5}, "device is 5"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "part": "a b"}, "part is 'a b'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 4}, "strides": [3, 1]}, "overlaps itself"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "layers": 5}, "'layers' is 5"),
        (
            {"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "layers": ["a"]},
            "layers[0] is 'a'; layers are numbered from 0",
        ),
        (
            {"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "layers": [[1]]},
            "layers[0] is [1]; layers are numbered from 0",
        ),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "seams": None}, "'seams' is None"),
        ({"layouts": [5]}, "layouts[0] is 5"),
        ({"layouts": [{}], "extra": 3}, "'extra' beside 'layouts'"),
        ({"layouts": []}, "a list of at least one"),
        ({"layouts": "x"}, "a list of at least one"),
    ],
)
def test_specs_that_make_no_layout(spec, says):
    with pytest.raises(LayoutError) as caught:
        KVLayout.from_spec(spec)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "notation = ", "is not TOML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", json.dumps([1]), "holds a list"),
        ("missing.toml", None, "cannot read the spec"),
    ],
)
def test_spec_files_that_cannot_be_read(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(LayoutError, match=says):
        KVLayout.from_spec(tmp_path / name)


@pytest.mark.parametrize(
    ("src", "dst", "says"),
    [
        (paged, lambda: paged(layer_start=1), "the destination lacks layer 0, which the source holds"),
        (lambda: paged(part="a"), lambda: paged(part="b"), "give the part one name on both sides"),
        (paged, lambda: paged(dim=16), "holds 8 bytes per (token, head) in the source and 16"),
        (
            lambda: KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 2, 8), np.float16)),
            lambda: KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 2, 8), np.float32)),
            "the dtypes are float16 and float32, and a copy converts no numbers",
        ),
        (paged, lambda: paged(head_start=2), "the source holds heads 0 to 1, the destination 2 to 3"),
        (paged, lambda: KVLayout.from_tensors("block token dim", cache(8, 4, 8)), "no head axis"),
        (lambda: paged(head=1, token=1), lambda: paged(head=1), None),
        (lambda: KVLayout.from_tensors("block dim", cache(8, 8)), lambda: paged(head=1), "no common unit"),
        (lambda: KVLayout.from_tensors("block dim", cache(8, 64)), lambda: paged(head=1), "no common unit"),
        (
            lambda: KVLayout.from_tensors("block token dim", cache(8, 4, 16)),
            lambda: KVLayout.from_tensors("block kv token head dim", cache(8, 2, 4, 1, 8)),
            "only one of them has a head axis",
        ),
        (
            lambda: KVLayout.from_tensors("block token head dim", cache(8, 4, 2, 8)),
            lambda: KVLayout.from_tensors("block kv token head dim", cache(8, 2, 4, 2, 8)),
            "'kv' of 8 bytes per (token, head) is not 'k' of 8 and 'v' of 8",
        ),
        (
            lambda: KVLayout.merge([paged(), KVLayout.from_tensors("block dim", cache(8, 4), part="state")]),
            lambda: KVLayout.merge([paged(token=8), KVLayout.from_tensors("block dim", cache(8, 4), part="state")]),
            "moves whole blocks",
        ),
    ],
)
def test_layouts_that_do_not_meet(src, dst, says):
    if says is None:
        assert kvplan.compile(src(), dst()).unit_tokens == 1
        return
    with pytest.raises(IncompatibleLayoutsError) as caught:
        kvplan.compile(src(), dst())
    assert says in str(caught.value)


def test_compile_takes_layouts():
    with pytest.raises(TypeError, match="two KVLayouts"):
        kvplan.compile(paged(), cache(4))

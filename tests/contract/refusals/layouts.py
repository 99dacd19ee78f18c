"""Refusals of notation, of tensors that make no layout, and of slices, merges, addresses and places."""

from __future__ import annotations

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

import kvplan
from kvplan import BlockIndexError, KVLayout, LayoutError, NotationError
from tests.contract.refusals.table import REFUSED, paged, tensors, zeros


class NoMemory:
    """A tensor as torch and others make where nothing is allocated."""

    shape, device, dtype = (4, 8), "cpu", "uint8"

    def data_ptr(self):
        return 0

    def stride(self):
        return (8, 1)

    def element_size(self):
        return 1


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.zeros(4, 8, dtype=torch.uint8)


def freed():
    tensor = torch.zeros(4, 8, dtype=torch.uint8)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED["notation", lambda text: KVLayout.from_tensors(text, zeros(4, 4)), NotationError] = [
    ("", "column 1 ... no dims"),
    ("layer:", "column 7 ... no dims"),
    (": block dim", "column 1 ... nothing left"),
    ("layer: kv: block dim", "column 10 ... ':' ... second"),
    ("block heads dim", "column 7 ... 'heads' ... unknown axis"),
    ("block token block dim", "column 13 ... block ... named twice"),
    ("layer: layer block dim", "column 8 ... layer ... named twice"),
    ("token: block dim", "column 1 ... cannot stand ... left"),
    ("layer.0: block layer.1 dim", "column 1 ... cannot stand ... left"),
    ("(block token dim", "column 1 ... never closed"),
    ("block token) dim", "column 12 ... '(' ... without its"),
    ("((block) token) dim", "column 2 ... '(' ... inside"),
    ("block () dim", "column 7 ... '()' ... empty"),
    ("block 2 dim", "column 7 ... is 1 ... only number"),
    ("block (1 token) dim", "column 8 ... is 1 ... only number"),
    ("block token.0 dim", "column 7 ... token.1 ... missing"),
    ("block token.0 token.2 dim", "column 7 ... token.1 ... missing"),
    ("block token token.1 dim", "column 13 ... both whole ... split"),
    ("block token. dim", "column 7 ... number ... factor"),
    ("block token.x dim", "column 7 ... number ... factor"),
    ("block token.01 token.1 dim", "column 7 ... number ... factor"),
    ("block kv.0 kv.1 dim", "column 7 ... cannot ... split"),
    ("block, token dim", "column 6 ... ',' ... unexpected character"),
    ("block token-head dim", "column 12 ... '-' ... unexpected character"),
    ("block | k: dim | v: dim", "column 7 ... kvplan.allocate ... several parts ... makes"),
    ("block token subblock dim", "column 13 ... token and subblock exclude"),
]
REFUSED["KVLayout.from_tensors", lambda *given: KVLayout.from_tensors(*given), LayoutError] = [
    ("block token dim", zeros(8, 4, 2, 8), "has 3 dims ... (8, 4, 2, 8) ... has 4"),
    ("layer: block dim", zeros(4, 4), "layer ... asks for a sequence"),
    ("layer: block dim", {"a": zeros(4, 4)}, "tensors.values ... give list ... dict"),
    ("block dim", [zeros(4, 4)], "':' ... list stands ... axis"),
    ("layer: block dim", [], "no tensors ... 'layer'"),
    ("layer kv: block dim", [[zeros(4, 4)] * 2, [zeros(4, 4)]], "ragged"),
    ("kv: block dim", [zeros(4, 4)] * 3, "3 tensors ... 'kv'"),
    ("layer: block dim", [zeros(4, 4), zeros(5, 4)], "tensor 1 ... (5, 4)"),
    ("layer: block dim", [zeros(4, 4), zeros(4, 8)[:, :4]], "tensor 1 ... strides"),
    ("block kv dim", zeros(4, 3, 8), "kv=2 ... dim 1 ... (4, 3, 8)"),
    ("block 1 dim", zeros(4, 3, 8), "extent 3 ... cannot be 1"),
    ("(block token) dim", zeros(64, 8), "sizes= ... 'block' ... 'token'"),
    ("block dim", zeros(0, 8), "holds nothing"),
    ("block token dim", np.flip(zeros(4, 4, 8), 1), "run backwards"),
    ("block token dim", torch.zeros(1, 4, 8).expand(4, 4, 8), "overlaps itself"),
    ("layer: block dim", [torch.zeros(4, 8)] * 2, "layer 0 ... layer 1 ... overlap ... share bytes"),
    ("block: token dim", [zeros(4, 8)] * 2, "overlap ... share bytes"),
    ("block dim", as_strided(zeros(4, 8), (5, 8), (8, 1)), "outside its allocation"),
    ("block dim", torch.zeros(4, 8, device="meta"), "meta ... has no memory"),
    ("block dim", NoMemory(), "(4, 8) ... address null ... no memory"),
    ("block dim", fake(), "FakeTensor ... no memory"),
    ("block dim", freed(), "address null"),
]
MEMORY = zeros(4, 16)


def merged(*layouts):
    return KVLayout.merge(layouts)


def on(device, part):
    sizes = {"block": 4, "dim": 8}
    return KVLayout.from_spec({"notation": "block dim", "sizes": sizes, "part": part, "device": device})


def memory(part, start):
    return KVLayout.from_tensors("block dim", MEMORY[:, start : start + 8], part=part)


ONE = paged()
SLICED = tensors("kv block token dim", 2, 4, 2, 8)
PAGES = tensors("block subblock dim", 4, 3, 8, part="index")
OPAQUE = tensors("(block subblock) dim", 8, 8, sizes={"subblock": 4})
APART = KVLayout.from_tensors("layer head: block token dim", [[zeros(4, 2, 8) for _ in range(3)]], head_start=5)
FACTORS = tensors("block head.0 token head.1 dim", 3, 4, 5, 2, 8)
REFUSED["KVLayout", LayoutError] = [
    (lambda: tensors("(block token) dim", 64, 8, sizes={"token": 24}), "64 ... token=24"),
    (lambda: tensors("block token.0 dim token.1", 4, 2, 8, 3, sizes={"token": 5}), "(4, 2, 8, 3) ... says 6"),
    (lambda: KVLayout.from_tensors("layer: block dim", [zeros(4, 8)] * 2, sizes={"layer": 3}), "layer=3 ... has 2"),
    (lambda: paged(sizes={"token": 5}), "extent 4 ... 'block token head dim' ... token=5"),
    (lambda: paged(sizes={"layer": 5}), "'layer'"),
    (lambda: paged(sizes={"token": 0}), "'token' ... 0 ... at least 1"),
    (lambda: paged(dim=0), "dim 3"),
    (lambda: paged(layer_start=-1), "layer_start ... is -1"),
    (lambda: paged(head_start=-1), "head_start ... is -1"),
    (lambda: paged(part=""), "part ... ''"),
    (lambda: paged(part=3), "part ... is 3"),
    (lambda: paged(layers=(1, 2)), "(1, 2) ... layers are"),
    (lambda: paged(seams=(5,)), "seam 0x5 ... no allocation"),
    (lambda: paged(seams=("x",)), "seams[0] ... 'x'"),
    (lambda: paged().slice(layers=[3]), "[3] ... layers ... held"),
    (lambda: paged().slice(parts=("k",)), "['k'] ... parts ... held"),
    (lambda: paged().slice(heads=range(1, 3)), "heads 1 ... 2"),
    (lambda: paged().slice(heads=[0]), "[0] ... give a range"),
    (lambda: paged().slice(heads=range(0)), "range(0, 0) ... give a range"),
    (lambda: paged().slice(parts=()), "holds nothing"),
    (lambda: paged().address(layer=0, part="kv", token=4), "are 0 ... 3 ... token slots"),
    (lambda: paged().address(layer=0, part="kv", head=2), "are 0 ... 1 ... heads"),
    (lambda: paged().address(layer=1, part="kv"), "layer 1"),
    (lambda: merged(), "merge of no layouts"),
    (lambda: merged(paged(), paged()), "layouts 0 ... 1 ... layer 0 ... 'kv'"),
    (lambda: merged(paged(), paged(blocks=9, part="x")), "layout 1 ... 9 blocks"),
    (lambda: merged(paged(), paged(token=5, part="x")), "block_tokens ... differ"),
    (lambda: FACTORS.slice(heads=range(1, 3)), "cross a boundary"),
    (lambda: SLICED.slice(parts=("V",)), "'V' and 'v' differ only in letter case"),
    (lambda: SLICED.address(layer=0, part="V"), "'V' and 'v' differ only in letter case"),
    (lambda: OPAQUE.address(layer=0, part="kv", token=4), "sub-block 4 ... layer 0 'kv' ... 0 to 3"),
    (lambda: APART.address(layer=0, part="kv", head=8), "head 8 ... layer 0 'kv' ... 5 to 7"),
    (lambda: APART.slice(heads=range(6, 9)), "heads 6 to 8 ... layer 0 'kv' ... 5 to 7"),
    (lambda: merged(ONE, tensors("block dim", 8, 4, part="x"), ONE), "layouts 0 and 2 both hold"),
    (lambda: merged(SLICED, tensors("block token dim", 4, 3, 8, part="index")), "block_tokens differ: [2, 3]"),
    (lambda: merged(SLICED, PAGES), "'index' has 3 sub-blocks ... 2 tokens ... divides"),
    (lambda: merged(on("cpu", "ckv"), on("cuda:0", "kpe")), "layout 1 ... cuda:0 ... layout 0 ... cpu"),
    (lambda: merged(memory("a", 0), memory("b", 7)), "'a' ... 'b' overlap ... share bytes"),
]
REFUSED["KVLayout"] = [
    (lambda: paged().address(layer=0, part="kv", block=8), BlockIndexError, "block 8 ... 0 to 7"),
    (lambda: paged().address(layer=0, part="kv", block=1.5), BlockIndexError, "block is 1.5"),
    (lambda: KVLayout.from_tensors(7, zeros(4)), NotationError, "not int"),
]
REFUSED["locate", lambda address, nbytes: kvplan.locate(paged(), address, nbytes), kvplan.KVPlanError] = [
    (-1, 1, "address ... is -1 ... least 0"),
    (0, 0, "nbytes ... is 0 ... least 1"),
    (0, 2**63, "64 address ... largest int ... past the"),
]
REFUSED["locate", kvplan.KVPlanError] = [(lambda: kvplan.locate("block token dim", 0), "layout is a str")]

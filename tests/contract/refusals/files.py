"""Refusals of specs and dumps: what a file or a mapping says that cannot be, within bounds of size and depth."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvplan import KVLayout, LayoutError
from tests.contract.refusals.table import REFUSED, file, paged, tensors
from tests.unknown import GPU, padded_split_kv

LARGE = "over 2,097,152 nodes"
NEST = "layer: kv block token head dim"
SIZES = {"layer": 3, "block": 8, "token": 4, "head": 2, "dim": 16}


def spec(notation=NEST, **sizes):
    return {"notation": notation, "sizes": {axis: size for axis, size in (SIZES | sizes).items() if axis in notation}}


def nested(layout, levels):
    for _ in range(levels):
        layout = {"layouts": [layout]}
    return layout


REFUSED["KVLayout.from_spec", KVLayout.from_spec, LayoutError] = [
    ({}, "'notation' ... needs"),
    ({"notation": "block dim"}, "'sizes' ... needs"),
    ({"notation": "block token.0 dim token.1", "sizes": {"block": 2, "dim": 2, "token": 6, "token.0": 4}}, "split"),
    ({"notation": "block kv dim", "sizes": {"block": 2, "dim": 2, "kv": 3}}, "kv=3"),
    ({"layouts": [5]}, "layouts[0] ... is 5"),
    ({"layouts": [{}], "extra": 3}, "'extra' ... 'layouts'"),
    ({"layouts": []}, "layouts ... a list of at least one"),
    ({"layouts": "x"}, "layouts ... a list of at least one"),
    ({"layouts": [spec("block dim")] * 3, "device": "x" * 10**6}, "'device' ... 'layouts'"),
    ({"layouts": [spec(layer=1000) | {"layers": [*range(1000 * k, 1000 * (k + 1))]} for k in range(9)]}, LARGE),
    (nested(spec("block dim"), 2000), LARGE),
    (spec("1 " * 80_000 + "dim"), LARGE),
    (spec("block layer kv token head dim", layer=2**31), LARGE),
    (spec(layer=80_000), LARGE),
    (spec("block: dim", block=2**18), LARGE),
    (spec("layer: block dim", layer=2**14, block=2**30, dim=2**20), "int64"),
    (spec("block dim", block=2**40, dim=2**40), "int64"),
    (spec() | {"head_start": 2**31 - 1}, "are 2147483647 ... 2147483648"),
    (spec(dim=10**4000), "sizes['dim'] ... of 13288 bits"),
]
REFUSED["KVLayout.from_spec", lambda more: KVLayout.from_spec(spec("block dim") | more), LayoutError] = [
    ({"sizes": {"block": 2}}, "sizes['dim'] ... needs"),
    ({"sizes": {"block": 2, "dim": 2, "head": 2}}, "'head' ... which"),
    ({"dtype": "f13"}, "'f13' ... unknown ... dtype"),
    ({"dtype": [1]}, "[1] ... unknown ... dtype"),
    ({"strides": [4]}, "give 2 integers"),
    ({"strides": [3, 1]}, "overlaps itself"),
    ({"x" * 10**6: 1}, "unknown key 'xxxx"),
    ({"address": -1}, "'address' ... is -1"),
    ({"device": "cdua"}, "device ... 'cdua'"),
    ({"device": 5}, "device ... is 5"),
    ({"part": "a b"}, "part ... 'a b'"),
    ({"part": "p" * 201}, "part is 'pppp"),
    ({"layers": 5}, "'layers' ... is 5"),
    ({"layers": ["a"]}, "layers[0] ... 'a' ... from 0"),
    ({"layer_start": 2**31}, "'layer_start' ... is 2147483648"),
    ({"seams": None}, "'seams' ... None"),
    ({"seams": [10**400]}, "seams[0] ... of 1329 bits"),
]
REFUSED["KVLayout.from_spec", lambda name, text: KVLayout.from_spec(file(text, name)), LayoutError] = [
    ("a.toml", "notation = ", "a.toml ... TOML"),
    ("a.toml", "# " + "x" * 70_000, "a.toml ... 65,536 bytes"),
    ("a.toml", "a = 1\na = 2", "a.toml"),
    ("a.json", "{", "a.json ... JSON"),
    ("a.json", "[1]", "a.json ... holds a list"),
    ("a.json", "[" * 100_000, "a.json ... nested too deeply"),
    ("a.json", '{"a": 1, "a": 2}', "a.json ... 'a' is twice"),
    ("a.json", b"\xff\xfe{\x00}\x00", "a.json"),
    ("a.json", "[" + "9" * 5000 + "]", "a.json ... 4300 digits"),
    ("a.json", '{"schema": "kvplan.layout/9"}', "newer"),
    ("a.json", '{"schema": "kvplan.layout/1"}', "a.json ... lacks 'notation'"),
]
REFUSED["KVLayout.load", LayoutError] = [
    (lambda: KVLayout.from_spec("none.toml"), "none.toml ... No such file"),
    (lambda: KVLayout.load("none.json"), "none.json ... No such file"),
    (lambda: KVLayout.load({"a": 1}), "path ... {'a': 1} ... the path of a dump"),
]
REFUSED["KVLayout.save", lambda path: paged().save(path), LayoutError] = [
    ("nowhere/at/all.json", "cannot write the dump ... nowhere/at/all.json"),
    *[(path, "cannot write the dump") for path in (".", "", "a\0b")],
    (3, "3 ... give the file"),
    (None, "None ... give the file"),
]


@cache
def saved(which):
    """A dump of two layers with padding, or of three plain ones, as text."""
    layout = padded_split_kv() if which == "padded" else tensors("layer kv block token head dim", 3, 2, 8, 4, 2, 16)
    layout.save("saved.json")
    return Path("saved.json").read_text()


def changed(which, where, value):
    """A dump with another value at a place."""
    document = table = json.loads(saved(which))
    *path, last = [int(key) if key.isdigit() else key for key in where.split()]
    for key in path:
        table = table[key]
    table[last] = value
    return KVLayout.from_spec(document)


def lacking(key):
    document = json.loads(saved("padded"))
    del document[key]
    return KVLayout.from_spec(document)


def deep(key):
    value = []
    for _ in range(100_000):
        value = [value]
    return changed("padded", key, value)


def twice():
    return changed("plain", "regions", json.loads(saved("plain"))["regions"] * 2)


MANY = list(range(16_385))
REFUSED["dump", lambda where, value: changed("padded", where, value), LayoutError] = [
    ("schema", "kvplan.layout/2", "'kvplan.layout/2' ... this kvplan ... which reads"),
    ("schema", "kvplan.inspect/1", "schema ... 'kvplan.inspect/1' ... layout.save ... 'kvplan.layout/1'"),
    ("schema", 1, "schema ... is 1"),
    ("notation", "block heads", "notation ... 'heads'"),
    ("notation", 7, "missing or wrong"),
    ("sizes heads", 3, "'heads' ... sizes name"),
    ("sizes token", 0, "token is 0"),
    ("dtype", None, "missing or wrong"),
    ("dtype", "x" * 10**6, LARGE),
    ("num_blocks", 0, "num_blocks ... is 0 ... from 1"),
    ("block_tokens", 8, "of axis token, not 8"),
    ("parts", ["k"], "components hold others"),
    ("parts", ["k", "v", "z"], "components hold others"),
    ("parts", ["k", 3], "part is 3"),
    ("parts", ["k", "a b"], "part ... 'a b'"),
    ("regions", {}, "regions are on "),
    ("regions 0", 5, "missing or wrong"),
    ("regions 0 address", -1, "address is -1"),
    ("regions 0 address", 2**63 - 1, "a region ends at 0x80000000000001df, past the largest int64 "),
    ("regions 0 nbytes", 479, "layer 0 'v' ... outside its allocation"),
    ("regions 0 device", "", "device is ''"),
    ("regions 0 device", "cpu", "'cpu' ... 'cuda:0'"),
    ("regions 0 pinned", 0, "0 is neither true nor false"),
    ("regions 0 seams", [1], "seams is 1"),
    ("components", [], "components hold others"),
    ("components 0", None, "missing or wrong"),
    ("components 0 block 0", [3], "missing or wrong"),
    ("components 0 block 0", [3, -80], "a stride is -80"),
    ("components 0 block 0", [0, 80], "an extent is 0"),
    ("components 0 block 0", [4, 80], "of axis block, not 3"),
    ("components 0 block 0", [3, 40], "layer 1 'v' overlaps itself"),
    ("components 0 block 0", [3, 2**62], "outside its allocation"),
    ("components 0 dim 0", [8, 0], "layer 1 'v' overlaps itself"),
    ("components 0 head_start", 2**31, "head_start is 2147483648"),
    ("components 0 table", [0], "a table has 1 entries"),
    ("components 0 table", [0, 80, "x"], "table is 'x'"),
    ("components 0 held", [], "components hold others"),
    ("components 0 held 0 layers", [0], "missing or wrong"),
    ("components 0 held 0 layers", [0, -1], "layers is -1"),
    ("components 0 held 0 layers", [0, 0], "layer 0 ... 'k'"),
    ("components 0 held 1 addresses", [GPU + 8, GPU + 256 + (2 << 20)], "overlap"),
]
REFUSED["dump", lambda where, value: changed("plain", where, value), LayoutError] = [
    ("components 0 head_start", 2**31 - 1, "2 heads ... number 2147483647"),
    ("components 0 head", [[2, 0]] * 1000, "of 1001 bits ... number ... heads"),
    ("components 0 head", [[1 << 17, 1]], LARGE),
    ("components 0 dim", [[2**40, 1], [2**40, 0]], "more than any memory"),
    ("components 0 held", [{"part": "k", "layers": MANY, "addresses": MANY}], LARGE),
]
KEYS = ("notation", "sizes", "dtype", "num_blocks", "parts", "regions", "components")
REFUSED["dump", lacking, LayoutError] = [(key, f"lacks '{key}'") for key in KEYS]
REFUSED["dump", deep, LayoutError] = [(key, "") for key in ("notation", "sizes", "dtype", "regions", "parts")]
REFUSED["dump", LayoutError] = [(twice, "one allocation twice")]

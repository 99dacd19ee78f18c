"""Refusals of specs and dumps: what a file or a mapping says that cannot be, within bounds of size and depth."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvplan import KVLayout, LayoutError
from tests.contract.refusals.table import file, paged, rows, tensors
from tests.unknown import GPU, padded_split_kv

ROWS = []


def spec(notation="layer: kv block token head dim", **sizes):
    sizes = {"layer": 3, "block": 8, "token": 4, "head": 2, "dim": 16} | sizes
    return {
        "notation": notation,
        "sizes": {axis: size for axis, size in sizes.items() if axis in notation},
    }


def nested(layout, levels=2000):
    for _ in range(levels):
        layout = {"layouts": [layout]}
    return layout


ROWS += rows(
    "KVLayout.from_spec",
    KVLayout.from_spec,
    LayoutError,
    [
        ({}, "'notation' ... needs"),
        ({"notation": "block dim"}, "'sizes' ... needs"),
        ({"notation": "block dim", "sizes": {"block": 2}}, "sizes['dim'] ... needs"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": "x"}}, "sizes['dim'] ... 'x'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2, "head": 2}}, "'head' ... which"),
        ({"notation": "block kv dim", "sizes": {"block": 2, "dim": 2, "kv": 3}}, "kv=3"),
        ({"notation": "block token.0 dim token.1", "sizes": {"block": 2, "dim": 2, "token": 6, "token.0": 4}}, "split"),
        (
            {"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "dtype": "f13"},
            "'f13' ... unknown ... dtype",
        ),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "strides": [4]}, "give 2 integers"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "colour": 1}, "'colour' ... unknown key"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "address": -1}, "'address' ... is -1"),
        ({"notation": "block dim", "sizes": {"block": 2**40, "dim": 2**40}}, "int64"),
        (
            {"notation": "layer: block dim", "sizes": {"layer": 2**45, "block": 1, "dim": 2}},
            "over 2,097,152 nodes",
        ),
        ({"notation": "block: dim", "sizes": {"block": 2**18, "dim": 2}}, "over 2,097,152 nodes"),
        ({"notation": "layer: block dim", "sizes": {"layer": 2**14, "block": 2**30, "dim": 2**20}}, "int64"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "device": "cdua"}, "device ... 'cdua'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "device": 5}, "device ... is 5"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "part": "a b"}, "part ... 'a b'"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 4}, "strides": [3, 1]}, "overlaps itself"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "layers": 5}, "'layers' ... is 5"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "layers": ["a"]}, "layers[0] ... 'a' ... from 0"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "layers": [[1]]}, "layers[0] ... [1] ... from 0"),
        ({"notation": "block dim", "sizes": {"block": 2, "dim": 2}, "seams": None}, "'seams' ... None"),
        ({"layouts": [5]}, "layouts[0] ... is 5"),
        ({"layouts": [{}], "extra": 3}, "'extra' ... 'layouts'"),
        ({"layouts": []}, "layouts ... a list of at least one"),
        ({"layouts": "x"}, "layouts ... a list of at least one"),
        (spec("block layer kv token head dim", layer=10**6), "over 2,097,152 nodes"),
        (spec("block layer kv token head dim", layer=2**31), "over 2,097,152 nodes"),
        (spec(layer=80_000), "over 2,097,152 nodes"),
        (spec(head=5 * 10**8), "over 2,097,152 nodes"),
        (spec(token=5 * 10**8), "over 2,097,152 nodes"),
        (spec(dim=10**4000), "sizes['dim'] ... of 13288 bits"),
        (spec(block=2**62, token=2**20), "64 address ... largest int ... pass the"),
        ({**spec(), "layers": [1, 2, 10**400]}, "layers[2] ... of 1329 bits"),
        ({**spec(), "head_start": 2**31 - 1}, "are 2147483647 ... 2147483648"),
        ({**spec(), "layer_start": 2**31}, "'layer_start' ... is 2147483648"),
        ({**spec(), "seams": [10**400]}, "seams[0] ... of 1329 bits"),
        ({**spec(), "part": "p" * 201}, "part is 'pppp"),
        ({**spec(), "dtype": [1]}, "[1] ... unknown ... dtype"),
        ({**spec(), "x" * 10**6: 1}, "unknown key 'xxxx"),
        (spec("1 " * 80_000 + "dim"), "over 2,097,152 nodes"),
        ({"layouts": [spec("block dim")] * 3, "device": "x" * 10**6}, "'device' ... 'layouts'"),
        (nested(spec("block dim")), "over 2,097,152 nodes"),
        (
            {"layouts": [spec(layer=1000) | {"layers": list(range(1000 * k, 1000 * (k + 1)))} for k in range(9)]},
            "over 2,097,152 nodes",
        ),
    ],
)
ROWS += rows(
    "KVLayout.from_spec",
    lambda name, text: KVLayout.from_spec(file(text, name)),
    LayoutError,
    [
        ("a.toml", "notation = ", "a.toml ... TOML"),
        ("a.json", "{", "a.json ... JSON"),
        ("a.json", "[1]", "a.json ... holds a list"),
        ("a.json", "[" * 100_000, "a.json ... nested too deeply"),
        ("a.json", '{"a": 1, "a": 2}', "a.json ... 'a' is twice"),
        ("a.json", b"\xff\xfe{\x00}\x00", "a.json"),
        ("a.json", "[" + "9" * 5000 + "]", "a.json ... 4300 digits"),
        ("a.toml", "# " + "x" * 70_000, "a.toml ... 65,536 bytes"),
        ("a.toml", "a = 1\na = 2", "a.toml"),
    ],
)
ROWS += [
    ("KVLayout.from_spec", lambda: KVLayout.from_spec("none.toml"), LayoutError, "none.toml ... No such file"),
    ("KVLayout.load", lambda: KVLayout.load("none.json"), LayoutError, "none.json ... No such file"),
    ("KVLayout.load", lambda: KVLayout.load({"a": 1}), LayoutError, "path ... {'a': 1} ... the path of a dump"),
]
ROWS += rows("KVLayout.save", lambda path: paged().save(path), LayoutError, [
    ("nowhere/at/all.json", "cannot write the dump ... nowhere/at/all.json"), (".", "cannot write the dump"),
    ("", "cannot write the dump"), ("a\0b", "cannot write the dump"), (3, "3 ... give the file"),
    (None, "None ... give the file"),
])  # fmt: skip


@cache
def saved(which):
    """A dump, as text."""
    if which == "padded":
        padded_split_kv().save("saved.json")
    else:
        tensors("layer kv block token head dim", 3, 2, 8, 4, 2, 16).save("saved.json")
    return Path("saved.json").read_text()


def changed(where, value):
    """A dump of two layers with another value at a place."""
    document = json.loads(saved("padded"))
    table = document
    for key in where[:-1]:
        table = table[key]
    table[where[-1]] = value
    return KVLayout.from_spec(document)


def contradicting(change):
    """A dump of three layers with other keys; sizes one by one, None takes one away."""
    document = json.loads(saved("plain"))
    sizes = {**document["sizes"], **change.get("sizes", {})}
    kept = {axis: size for axis, size in sizes.items() if size is not None}
    return KVLayout.from_spec(document | change | {"sizes": kept})


def component(change):
    document = json.loads(saved("plain"))
    document["components"][0] |= change
    return KVLayout.from_spec(document)


def lacking(key):
    document = json.loads(saved("padded"))
    del document[key]
    return KVLayout.from_spec(document)


def twice():
    document = json.loads(saved("plain"))
    return KVLayout.from_spec(document | {"regions": document["regions"] * 2})


MANY = list(range(16_385))
ROWS += rows(
    "dump",
    changed,
    LayoutError,
    [
        (("schema",), "kvplan.layout/2", "'kvplan.layout/2' ... this kvplan ... which reads"),
        (("schema",), "kvplan.inspect/1", "schema ... 'kvplan.inspect/1' ... layout.save ... 'kvplan.layout/1'"),
        (("schema",), 1, "schema ... is 1"),
        (("schema",), "kvplan.layout/x", "layout.save ... writes"),
        (("notation",), "block heads", "notation ... 'heads'"),
        (("notation",), 7, "missing or wrong"),
        (("sizes", "heads"), 3, "'heads' ... sizes name"),
        (("sizes", "token"), 0, "token is 0"),
        (("dtype",), None, "missing or wrong"),
        (("num_blocks",), 0, "num_blocks ... is 0 ... from 1"),
        (("num_blocks",), 3.0, "num_blocks ... is 3.0"),
        (("num_blocks",), float("nan"), "num_blocks ... nan"),
        (("num_blocks",), True, "num_blocks ... True"),
        (("num_blocks",), 10**4000, "num_blocks ... of 13288 bits"),
        (("block_tokens",), 8, "of axis token, not 8"),
        (("parts",), [], "components hold others"),
        (("parts",), ["k"], "components hold others"),
        (("parts",), ["k", 3], "part is 3"),
        (("parts",), ["k", "a b"], "part ... 'a b'"),
        (("regions",), {}, "regions are on "),
        (("regions", 0), 5, "missing or wrong"),
        (("regions", 0, "address"), -1, "address is -1"),
        (("regions", 0, "address"), 2**63 - 1, "a region ends at 0x80000000000001df, past the largest int64 "),
        (("regions", 0, "nbytes"), 479, "layer 0 'v' ... outside its allocation"),
        (("regions", 0, "device"), "", "device is ''"),
        (("regions", 0, "device"), "cpu", "'cpu' ... 'cuda:0'"),
        (("regions", 0, "pinned"), 0, "0 is neither true nor false"),
        (("regions", 0, "seams"), [1], "seams is 1"),
        (("regions", 0, "seams"), "x", "seams is 'x'"),
        (("components",), [], "components hold others"),
        (("components", 0), None, "missing or wrong"),
        (("components", 0, "block", 0), [3], "missing or wrong"),
        (("components", 0, "block", 0), [3, -80], "a stride is -80"),
        (("components", 0, "block", 0), [0, 80], "an extent is 0"),
        (("components", 0, "block", 0), [3, 2**64], "a stride is a number of 65 bits"),
        (("components", 0, "block", 0), [4, 80], "of axis block, not 3"),
        (("components", 0, "block", 0), [3, 40], "layer 1 'v' overlaps itself"),
        (("components", 0, "dim", 0), [8, 0], "layer 1 'v' overlaps itself"),
        (("components", 0, "block", 0), [3, 2**62], "outside its allocation"),
        (("components", 0, "head_start"), 2**31, "head_start is 2147483648"),
        (("components", 0, "headed"), False, "of axis head, not 1"),
        (("components", 0, "opaque"), True, "of axis token, not 1"),
        (("components", 0, "table"), [0], "a table has 1 entries"),
        (("components", 0, "table"), [0, 80, "x"], "table is 'x'"),
        (("components", 0, "held"), [], "components hold others"),
        (("components", 0, "held", 0, "layers"), [0], "missing or wrong"),
        (("components", 0, "held", 0, "layers"), [0, -1], "layers is -1"),
        (("components", 0, "held", 0, "layers"), [0, 0], "layer 0 ... 'k'"),
        (("components", 0, "held", 0, "addresses"), [GPU, 5], "layer 1 'k' ... outside its allocation"),
        (("components", 0, "held", 1, "addresses"), [GPU + 8, GPU + 256 + (2 << 20)], "overlap"),
    ],
)
ROWS += rows(
    "dump",
    contradicting,
    LayoutError,
    [
        ({"dtype": "x" * 10**6}, "over 2,097,152 nodes"),
        ({"parts": ["k", "v", "z"]}, "components hold others"),
    ],
)
ROWS += rows(
    "dump",
    component,
    LayoutError,
    [
        ({"head_start": 2**31 - 1}, "2 heads ... number 2147483647"),
        ({"opaque": True, "token": []}, "block_tokens is 4"),
        ({"head": [[2, 0]] * 1000}, "of 1001 bits ... number ... heads"),
        ({"head": [[1 << 17, 1]]}, "over 2,097,152 nodes"),
        ({"dim": [[2**40, 1], [2**40, 0]]}, "more than any memory"),
        ({"held": [{"part": "k", "layers": MANY, "addresses": MANY}]}, "over 2,097,152 nodes"),
    ],
)
ROWS += rows(
    "dump",
    lacking,
    LayoutError,
    [(key, f"lacks '{key}'") for key in ("notation", "sizes", "dtype", "num_blocks", "parts", "regions", "components")],
)
ROWS += [
    ("dump", twice, LayoutError, "one allocation twice"),
    ("dump", lambda: KVLayout.from_spec(file('{"schema": "kvplan.layout/9"}')), LayoutError, "newer"),
    (
        "dump",
        lambda: KVLayout.from_spec(file('{"schema": "kvplan.layout/1"}')),
        LayoutError,
        "a.json ... lacks 'notation'",
    ),
]


def deep(key):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return KVLayout.from_spec(json.loads(saved("padded")) | {key: nested})


ROWS += rows("dump", deep, LayoutError, [
    (key, "") for key in ("notation", "sizes", "dtype", "regions", "parts")
])  # fmt: skip

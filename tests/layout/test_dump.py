"""Dumps: what is saved and read back is the same layout, and what is no dump is one clear error."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, KVPlanError, LayoutError
from kvplan.layout.dump import SCHEMA, document_of, text_of
from kvplan.memory.reserve import reserve
from tests.profiles import examples
from tests.strategies import cases, layout_of
from tests.unknown import FIVE, GPU, padded_split_kv


def check_same(layout, read):
    assert read == layout
    for name in ("notation", "sizes", "dtype", "device", "num_blocks", "block_tokens", "layers", "parts", "heads",
                 "seams", "nbytes", "block_nbytes", "opaque", "writable"):  # fmt: skip
        assert getattr(read, name) == getattr(layout, name), name
    assert str(read) == str(layout)
    for ours, theirs in zip(layout.regions, read.regions, strict=True):
        assert (theirs.virtual, theirs.recorded) == (ours.virtual, not ours.virtual)
        assert theirs.owner is None
        assert [getattr(ours, n) for n in ("address", "nbytes", "device", "pinned", "writable", "seams")] == [
            getattr(theirs, n) for n in ("address", "nbytes", "device", "pinned", "writable", "seams")
        ]
    for one in layout.components:
        other = read.component(one.layer, one.part, one.form.head_start)
        assert (other.address, other.form) == (one.address, one.form)
    extents = [kvplan.compile(side, side).program.extents("src") for side in (layout, read)]
    assert extents[0] == extents[1]


@examples(80)
@given(case=cases())
def test_saved_and_read_it_is_the_same(case):
    cache = case.src.build(case.seed)
    layout = layout_of(cache)
    text = text_of(layout.built)
    read = KVLayout.from_spec(json.loads(text))
    check_same(layout, read)
    assert text_of(read.built) == text


@pytest.mark.parametrize("name", FIVE)
def test_the_five(name, tmp_path):
    layout = FIVE[name]()
    layout.save(tmp_path / "dump.json")
    read = KVLayout.from_spec(tmp_path / "dump.json")
    check_same(layout, read)
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "dump.json").read_text()


def test_a_merged_layout_with_layers_of_its_own_seams_and_read_only_memory():
    memory = np.zeros((8, 4, 16), np.float16)
    memory.flags.writeable = False
    seam = memory.ctypes.data + 512
    rows = KVLayout.from_tensors("block token dim", memory, part="index", layers=[7], seams=[seam])
    kv = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((8, 2, 4, 2, 8), np.int8)] * 1, head_start=6)
    state = KVLayout.from_tensors("block: dim", [np.zeros(100, np.int8) for _ in range(8)], part="state", layers=[3])
    merged = KVLayout.merge([rows, kv, state])
    read = KVLayout.from_spec(json.loads(text_of(merged.built)))
    check_same(merged, read)
    assert (read.layers, read.heads, read.writable) == ((0, 3, 7), range(6, 8), False)
    assert seam in read.seams


def test_layers_out_of_order():
    layout = KVLayout.from_tensors("layer block kv dim", np.zeros((3, 4, 2, 8), np.int8), layers=[5, 1, 2])
    text = text_of(layout.built)
    assert KVLayout.from_spec(json.loads(text)) == layout
    assert text_of(KVLayout.from_spec(json.loads(text)).built) == text


def test_the_document_of_a_split_cache():
    made = document_of(padded_split_kv().built)
    regions = made.pop("regions")
    assert regions[0] == {
        "address": GPU, "nbytes": 480, "device": "cuda:0", "pinned": False, "writable": True, "seams": [],
    }  # fmt: skip
    assert made == {
        "schema": SCHEMA,
        "notation": "layer: kv block token head dim",
        "sizes": {"layer": 2, "kv": 2, "block": 3, "token": 4, "head": 2, "dim": 8},
        "dtype": "uint8",
        "itemsize": 1,
        "num_blocks": 3,
        "block_tokens": 4,
        "parts": ["k", "v"],
        "virtual": True,
        "components": [
            {
                "block": [[3, 80]],
                "token": [[4, 16]],
                "head": [[2, 8]],
                "dim": [[8, 1]],
                "head_start": 0,
                "headed": True,
                "opaque": False,
                "table": None,
                "held": [
                    {"part": "k", "layers": [0, 1], "addresses": [GPU, GPU + (2 << 20)]},
                    {"part": "v", "layers": [0, 1], "addresses": [GPU + 256, GPU + 256 + (2 << 20)]},
                ],
            }
        ],
    }


def test_eighty_layers_are_small():
    sizes = {"layer": 80, "block": 1024, "token": 16, "head": 2, "dim": 128}
    one = KVLayout.from_spec({"notation": "layer kv block token head dim", "sizes": sizes})
    assert len(text_of(one.built)) < 5000
    apart = KVLayout.from_spec({"notation": "layer: kv block token head dim", "sizes": sizes})
    assert len(text_of(apart.built)) < 20_000
    assert max(map(len, text_of(apart.built).splitlines())) < 1600


@pytest.mark.slow
def test_a_dump_is_for_looking_at(tmp_path):
    tensor = np.zeros((8, 4, 16), np.int8)
    layout = KVLayout.from_tensors("block token dim", tensor)
    layout.save(str(tmp_path / "cache.dump"))  # by any name: JSON is known by its brace
    read = KVLayout.from_spec(str(tmp_path / "cache.dump"))
    assert read.address(layer=0, part="kv", block=3) == layout.address(layer=0, part="kv", block=3)
    assert (read.addresses, read.virtual, layout.addresses) == ("dump", False, "memory")
    with kvplan.Executor() as executor, pytest.raises(LayoutError, match="those of the process that saved the dump"):
        executor.submit(kvplan.compile(read, layout).plan([0], [1]))
    with pytest.raises(LayoutError, match="those of the process that saved the dump"):
        kvplan.verify(read, layout)


def test_a_dump_of_a_spec_has_made_up_addresses(tmp_path):
    spec = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 8, "token": 4, "dim": 16}})
    spec.save(tmp_path / "a.json")
    read = KVLayout.from_spec(tmp_path / "a.json")
    assert (spec.addresses, read.addresses, read.virtual) == ("spec", "spec", True)
    read.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a.json").read_text()


def test_a_dump_is_loaded_as_a_spec_is(tmp_path):
    layout = KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
    layout.save(tmp_path / "cache.json")
    for path in (tmp_path / "cache.json", str(tmp_path / "cache.json")):
        assert KVLayout.load(path) == KVLayout.from_spec(path) == layout
    with pytest.raises(LayoutError, match="cannot read the spec"):
        KVLayout.load(tmp_path / "none.json")
    with pytest.raises(LayoutError, match=r"path is \{'a': 1\}; give the path of a dump"):
        KVLayout.load({"a": 1})


def test_a_dump_that_does_not_say_was_saved_by_an_engine(tmp_path):
    dump = document_of(KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8)).built)
    assert dump.pop("virtual") is False
    assert KVLayout.from_spec(dump).addresses == "dump"
    with pytest.raises(LayoutError, match=r"the dump\.virtual is 1; it is true or false"):
        KVLayout.from_spec(dump | {"virtual": 1})


def test_views_of_a_dump_keep_its_addresses():
    read = KVLayout.from_spec(document_of(padded_split_kv().built) | {"virtual": False})
    assert read.slice(layers=read.layers[:1]).addresses == "dump"
    spec = KVLayout.from_spec({"notation": "block token dim", "part": "other", "layers": [9], "address": 1 << 30,
                               "sizes": {"block": read.num_blocks, "token": read.block_tokens, "dim": 16},
                               "device": read.device})  # fmt: skip
    assert KVLayout.merge([read, spec]).addresses == "spec"
    assert reserve(read).addresses == "memory"


def test_the_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    layout, path = padded_split_kv(), tmp_path / "a.json"
    path.write_text("before")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(LayoutError, match=r"cannot write the dump '.*a\.json'.*No space left"):
        layout.save(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", ["nowhere/at/all.json", ".", "", "a\0b", 3, None])
def test_what_cannot_be_written(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LayoutError, match=r"cannot write the dump|give the file"):
        padded_split_kv().save(path)
    assert list(tmp_path.iterdir()) == []


# ---- what is no dump -----------------------------------------------------------------------------------------------


def at(document, *where):
    for key in where[:-1]:
        document = document[key]
    return document, where[-1]


SET = [
    (("schema",), "kvplan.layout/2", "schema 'kvplan.layout/2' is newer than this kvplan, which reads"),
    (("schema",), "kvplan.inspect/1", "schema is 'kvplan.inspect/1'; layout.save() writes 'kvplan.layout/1'"),
    (("schema",), 1, "schema is 1;"),
    (("schema",), "kvplan.layout/x", "layout.save() writes"),
    (("notation",), "block heads", "notation is 'block heads': unknown axis 'heads'"),
    (("notation",), 7, "notation is 7"),
    (("sizes",), [], "sizes is []; it is a table"),
    (("sizes", "heads"), 3, "sizes name 'heads'"),
    (("sizes", "block"), 4, "sizes say block=4, num_blocks says 3"),
    (("sizes", "token"), 0, "sizes.token is 0"),
    (("dtype",), None, "dtype is None"),
    (("num_blocks",), 0, "num_blocks is 0; it is an integer from 1"),
    (("num_blocks",), 3.0, "num_blocks is 3.0"),
    (("num_blocks",), float("nan"), "num_blocks is nan"),
    (("num_blocks",), True, "num_blocks is True"),
    (("num_blocks",), 10**4000, "num_blocks is a number of 13288 bits"),
    (("block_tokens",), 8, "components[0].token has 4 coordinates; the dump says 8"),
    (("parts",), [], "parts is []; it is a list of at least 1"),
    (("parts",), ["k"], "layer 0 'v' is not among parts 'k'"),
    (("parts",), ["k", 3], "parts[1] is 3"),
    (("parts",), ["k", "a b"], "part is 'a b'"),
    (("regions",), {}, "regions is {}; it is a list"),
    (("regions", 0), 5, "regions[0] is 5; it is a table of keys"),
    (("regions", 0, "address"), -1, "regions[0].address is -1"),
    (("regions", 0, "address"), 2**63 - 1, "regions[0] ends at"),
    (("regions", 0, "nbytes"), 479, "outside its allocation"),
    (("regions", 0, "device"), "", "regions[0].device is ''"),
    (("regions", 0, "device"), "cpu", "regions are on 'cpu', 'cuda:0'"),
    (("regions", 0, "pinned"), 0, "regions[0].pinned is 0; it is true or false"),
    (("regions", 0, "seams"), [1], "regions[0].seams[0] is 1"),
    (("regions", 0, "seams"), "x", "regions[0].seams is 'x'"),
    (("components",), [], "components is []"),
    (("components", 0), None, "components[0] is None"),
    (("components", 0, "block", 0), [3], "components[0].block[0] is [3]; it is [extent, stride in bytes]"),
    (("components", 0, "block", 0), [3, -80], "components[0].block[0][1] is -80; it is an integer from 0"),
    (("components", 0, "block", 0), [0, 80], "components[0].block[0][0] is 0; it is an integer from 1"),
    (("components", 0, "block", 0), [3, 2**64], "components[0].block[0][1] is a number of 65 bits"),
    (("components", 0, "block", 0), [4, 80], "components[0].block has 4 coordinates; the dump says 3"),
    (("components", 0, "block", 0), [3, 40], "overlaps itself"),
    (("components", 0, "dim", 0), [8, 0], "overlaps itself"),
    (("components", 0, "block", 0), [3, 2**62], "outside its allocation"),
    (("components", 0, "head_start"), 2**31, "components[0].head_start is 2147483648"),
    (("components", 0, "headed"), False, "components[0].head has 2 coordinates; the dump says 1"),
    (("components", 0, "opaque"), True, "components[0].token has 4 coordinates; the dump says 1"),
    (("components", 0, "table"), [0], "components[0].table has 1 entries"),
    (("components", 0, "table"), [0, 80, "x"], "components[0].table[2] is 'x'"),
    (("components", 0, "held"), [], "components[0].held is []"),
    (("components", 0, "held", 0, "layers"), [0], "components[0].held[0] has 1 layers and 2 addresses"),
    (("components", 0, "held", 0, "layers"), [0, -1], "components[0].held[0].layers[1] is -1"),
    (("components", 0, "held", 0, "layers"), [0, 0], "layer 0 'k' is there twice"),
    (("components", 0, "held", 0, "addresses"), [GPU, 5], "outside its allocation"),
    (("components", 0, "held", 1, "addresses"), [GPU + 8, GPU + 256 + (2 << 20)], "overlap"),
]


@pytest.mark.parametrize(("where", "value", "message"), SET, ids=lambda value: str(value)[:40])
def test_what_is_impossible_is_named(where, value, message):
    broken = copy.deepcopy(document_of(padded_split_kv().built))
    table, key = at(broken, *where)
    table[key] = value
    with pytest.raises(LayoutError, match=re.escape(message)):
        KVLayout.from_spec(broken)


def keys_of(value, *where):
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*where, key)
            yield from keys_of(item, *where, key)
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from keys_of(item, *where, k)


@pytest.mark.parametrize("where", sorted(keys_of(document_of(padded_split_kv().built)), key=str), ids=str)
def test_every_key_is_needed_but_those_that_only_tell(where):
    broken = copy.deepcopy(document_of(padded_split_kv().built))
    table, key = at(broken, *where)
    del table[key]
    if where == ("schema",):
        message = "unknown key"  # a mapping without it is a spec
    elif where in (("itemsize",), ("virtual",)) or (where[0] == "sizes" and len(where) > 1):
        assert KVLayout.from_spec(broken) == padded_split_kv()
        return
    else:
        message = f"lacks '{key}'"
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_spec(broken)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
    st.lists(st.integers(-2, 300), max_size=3), st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64]),
)  # fmt: skip


@examples(300)
@given(data=st.data())
def test_junk_anywhere_is_an_error_of_ours_or_a_layout(data):
    broken = copy.deepcopy(document_of(padded_split_kv().built))
    places = [*keys_of(broken), ("components", 0, "block", 0), ("components", 0, "held", 0, "layers", 1)]
    for where in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True)):
        try:
            table, key = at(broken, *where)
            table[key] = data.draw(JUNK)
        except (TypeError, KeyError, IndexError):  # inside what was replaced before
            continue
    try:
        layout = KVLayout.from_spec(broken)
    except KVPlanError:
        return
    assert text_of(layout.built)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"schema": "kvplan.layout/1"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"schema": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"schema": "kvplan.layout/1", "notation": "block dim", "sizes": {"block": NaN}}', "sizes.block is nan"),
        ('{"schema": "kvplan.layout/9"}', "is newer than this kvplan"),
        ('{"schema": "kvplan.layout/1"}', "the dump lacks 'notation'"),
    ],
    ids=["cut", "cut late", "deep", "long", "nan", "newer", "empty"],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(LayoutError, match=message) as raised:
        KVLayout.from_spec(path)
    assert "a.json" in str(raised.value)


def test_deep_nesting_in_a_mapping():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for key in ("notation", "sizes", "dtype", "regions", "parts"):
        with pytest.raises(LayoutError):
            KVLayout.from_spec({**document_of(padded_split_kv().built), key: deep})


def test_a_slice_keeps_its_numbers():
    tensors = [np.zeros((2, 6, 4, 8, 16), np.float16) for _ in range(4)]
    layout = KVLayout.from_tensors("layer: kv block token head dim", tensors, layer_start=3, head_start=8)
    part = layout.slice(layers=[4, 6], heads=range(10, 12), parts=["v"])
    read = KVLayout.from_spec(json.loads(text_of(part.built)))
    check_same(part, read)
    assert (read.layers, read.heads, read.parts) == ((4, 6), range(10, 12), ("v",))
    where = {"layer": 6, "part": "v", "block": 5, "token": 3, "head": 11}
    assert read.address(**where) == layout.address(**where)

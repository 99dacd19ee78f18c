"""Dumps: what is saved and read back is the same layout, however large."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given

import kvplan
from kvplan import KVLayout
from kvplan.layout.spec import document_of, text_of
from kvplan.memory.shared_mappings import reserve
from tests.commands import hold
from tests.profiles import examples
from tests.strategies import cases, layout_of
from tests.unknown import padded_split_kv


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


def test_the_document_of_a_split_cache():
    hold(Path(__file__).parent / "snapshots" / "split-cache.json", text_of(padded_split_kv().built))


def test_views_of_a_dump_keep_its_addresses():
    read = KVLayout.from_spec(document_of(padded_split_kv().built) | {"virtual": False})
    assert read.slice(layers=read.layers[:1]).addresses == "dump"
    spec = KVLayout.from_spec({"notation": "block token dim", "part": "other", "layers": [9], "address": 1 << 30,
                               "sizes": {"block": read.num_blocks, "token": read.block_tokens, "dim": 16},
                               "device": read.device})  # fmt: skip
    assert KVLayout.merge([read, spec]).addresses == "spec"
    assert reserve(read).addresses == "memory"


SIZES = {"layer": 3, "block": 8, "token": 4, "head": 2, "dim": 16}


def spec(notation="layer: kv block token head dim", **sizes):
    return {"notation": notation, "sizes": SIZES | sizes}


def test_large_caches_of_the_field_are_within():
    big = KVLayout.from_spec(spec(layer=128, block=10**6, token=64, head=256, dim=128))
    assert (len(big.components), big.num_blocks) == (256, 10**6)
    one = KVLayout.from_spec(spec("layer block kv token head dim", layer=80, block=1, token=1 << 20, head=8))
    assert kvplan.compile(one, one).runs == 1
    regions = KVLayout.from_spec(spec("block: layer kv token head dim", block=5000, layer=80))
    assert len(regions.regions) == 5000
    assert KVLayout.from_spec(json.loads(json.dumps(document_of(regions.built)))) == regions

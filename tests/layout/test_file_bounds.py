"""What comes from a file or another process is bounded in size, depth and work, and its errors are short."""

from __future__ import annotations

import json
import pickle
from zlib import crc32

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError, NotationError
from kvplan.cli.main import main
from kvplan.errors import MESSAGE
from kvplan.layout.dump import document_of

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


def test_nested_entries_lie_one_after_another():
    def entry(part):
        return {"notation": "block dim", "part": part, "sizes": {"block": 4, "dim": 8}, "address": 1 << 30}

    rest = [{k: v for k, v in entry(part).items() if k != "address"} for part in ("b", "c")]
    made = KVLayout.from_spec({"layouts": [{"layouts": [entry("a"), rest[0]]}, rest[1]]})
    assert [region.address - (1 << 30) for region in made.regions] == [0, 2 << 20, 4 << 20]


def test_layouts_of_one_card_share_its_budget():
    held = document_of(KVLayout.from_tensors("layer block dim", np.zeros((3000, 2, 4), np.uint8)).built)
    with kvplan.Agent("me", {}, transports=("shm",)) as me, kvplan.Agent("peer", {}, transports=("shm",)) as agent:
        card = json.loads(agent.card()) | {"layouts": dict.fromkeys("abcdef", held)}
        del card["sum"]
        card["sum"] = crc32(json.dumps(card, sort_keys=True).encode())
        with pytest.raises(LayoutError, match=r"layout 'e' of the card: over 2,097,152 nodes"):
            me.meet(json.dumps(card).encode())


def test_messages_are_bounded_whatever_they_quote():
    assert len(str(LayoutError("x" * 10**6))) == MESSAGE
    assert str(LayoutError("short")) == "short"
    assert str(pickle.loads(pickle.dumps(LayoutError("short")))) == "short"
    with pytest.raises(NotationError) as caught:
        kvplan.layout.notation.parse("block " * 50_000 + "heads")
    assert len(str(caught.value)) < 400
    assert len(caught.value.text) == 300_005
    lines = str(caught.value).splitlines()
    assert lines[1][lines[2].index("^") :].startswith("block ")
    assert lines[1].startswith("    ")
    assert lines[1].endswith("...")


# ---- dumps that contradict themselves -----------------------------------------------------------------------------


def test_slices_of_merged_layouts_tell_sizes_of_their_own():
    kv = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((8, 2, 4, 3, 16), np.float16)] * 1)
    scale = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 1, 6), np.uint8), part="scale", layers=[5])
    state = KVLayout.from_tensors("block dim", np.zeros((8, 100), np.int8), part="state", layers=[7])
    merged = KVLayout.merge([kv, scale, state])
    assert merged.sizes == {"layer": 3, "kv": 2, "block": 8, "token": 4}  # the others differ
    assert "| layer 0: k v head=3 dim=16 float16 | layer 5: scale head=1 dim=6 uint8 | layer 7: state dim=100" in str(
        merged
    )
    held = merged.slice(parts=["scale"])
    assert held.sizes == {"layer": 1, "block": 8, "kv": 1, "token": 4, "head": 1, "dim": 6}
    for layout in (merged, held, merged.slice(parts=["k"]), merged.slice(layers=[7]), merged.slice(layers=[5, 7])):
        assert KVLayout.from_spec(json.loads(json.dumps(document_of(layout.built)))) == layout


# ---- tensors without memory, names that are no text --------------------------------------------------------------


def test_layers_that_hold_different_parts_are_compared(tmp_path, capsys):
    one = np.zeros((8, 2, 64), np.uint8)
    rows = [KVLayout.from_tensors("block dim", one[:, k], part="kv"[k], layers=[k]) for k in (0, 1)]
    KVLayout.merge(rows).save(tmp_path / "m.json")
    path = str(tmp_path / "m.json")
    assert main(["explain", path, path]) == 0
    assert "nowhere: one run" in capsys.readouterr().out
    assert main(["report", path, path, "--output", str(tmp_path / "page.html")]) == 0
    other = np.zeros((8, 3, 64), np.uint8)
    apart = [KVLayout.from_tensors("block dim", other[:, k], part="kv"[k % 2], layers=[k]) for k in (0, 1, 2)]
    more = KVLayout.merge(
        [*rows, KVLayout.from_tensors("block dim", np.zeros((8, 64), np.uint8), part="k", layers=[2])]
    )
    more.save(tmp_path / "a.json")
    KVLayout.merge(apart).save(tmp_path / "b.json")
    assert main(["explain", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))["first_break"]["holds"] == (
        "layer 0-1, part k v"
    )


def test_a_pair_of_files_lists_only_so_many_copies(tmp_path, capsys):
    """In a file of 140 bytes, every byte of a unit may lie apart."""
    sizes = {"layer": 64, "block": 16, "token": 1024, "dim": 64}
    apart = {
        "notation": "layer: block token dim",
        "dtype": "uint8",
        "sizes": sizes,
        "strides": [1 << 45, 1 << 34, 1 << 28],
    }
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(apart))
    layout = KVLayout.from_spec(path)
    layout.save(tmp_path / "dump.json")
    for one in (layout, KVLayout.from_spec(tmp_path / "dump.json")):
        with pytest.raises(
            kvplan.IncompatibleLayoutsError, match=r"4,194,304 copies, and at most 524,288 are compiled"
        ):
            kvplan.compile(one, layout)
    for command in (["plan", "--src", "0", "--dst", "1"], ["report", "--output", str(tmp_path / "made.html")]):
        assert main([command[0], str(path), str(path), *command[1:]]) in (1, 2)
        capsys.readouterr()
    few = KVLayout.from_spec(apart | {"sizes": sizes | {"layer": 8}})
    assert kvplan.compile(few, few.slice(layers=range(8))).runs == 8 * 1024 * 64

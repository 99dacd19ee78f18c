"""What `kvplan advise` answers: the orders, and the lines to paste, which make the pool that was promised."""

from __future__ import annotations

import json

import pytest

import kvplan
from kvplan import KVLayout
from kvplan.memory.reserve import reserve
from tests.commands import answer, document

PARTS = """
[[layouts]]
notation = "layer: block head dim.0 token dim.1"
dtype = "fp16"
part = "k"
sizes = { layer = 2, block = 8, token = 8, head = 2, dim = 16, "dim.1" = 8 }
[[layouts]]
notation = "layer: block head dim token"
dtype = "fp16"
part = "v"
sizes = { layer = 2, block = 8, token = 8, head = 2, dim = 16 }
"""
# `sizes` of one call cannot say both: dim is 2 * 8 for K and 6 * 4 for V.
APART = PARTS.replace("layer: block head dim token", "layer: block head dim.0 token dim.1").replace(
    "head = 2, dim = 16 }", 'head = 2, dim = 24, "dim.1" = 4 }'
)


# Layers of two head sizes, and an index in one of them.
KINDS = """
[[layouts]]
notation = "layer: block kv token head dim"
layers = [0, 1, 3]
sizes = { layer = 3, block = 4, token = 8, head = 4, dim = 8 }
[[layouts]]
notation = "layer: block kv token head dim"
layers = [2]
sizes = { layer = 1, block = 4, token = 8, head = 2, dim = 16 }
[[layouts]]
notation = "layer: block token dim"
part = "index"
layers = [2]
sizes = { layer = 1, block = 4, token = 8, dim = 4 }
"""


@pytest.mark.parametrize(
    "spec", [PARTS, APART, KINDS, PARTS.partition('[[layouts]]\nnotation = "layer: block head dim token"')[0]]
)
def test_what_is_to_be_pasted_makes_the_pool(capsys, tmp_path, spec):
    file = tmp_path / "cache.toml"
    file.write_text(spec)
    shown = answer(capsys, "advise", str(file), "--block-tokens", "16")
    python = shown.partition("# in Python, where `gpu` is the layout; --json has a spec\n")[2]
    facts = document(capsys, "advise", str(file), "--block-tokens", "16")["advice"]
    names = {"gpu": reserve(KVLayout.from_spec(file)), "kvplan": kvplan}
    exec(python, names)  # what the page says to paste
    pool, promised = names["pool"], KVLayout.from_spec(facts["orders"][0]["spec"])
    assert kvplan.verify(names["gpu"], pool).ok
    assert pool.block_tokens == promised.block_tokens == 16
    assert kvplan.compile(names["gpu"], pool).runs == kvplan.compile(names["gpu"], promised).runs


def test_one_page_for_parts_that_differ_is_one_call_and_a_spec(capsys, tmp_path):
    """Blocks of 8 tokens of 2 heads of 16 elements of 2 bytes, in 2 layers: 256 elements a part."""
    file, host, page = (tmp_path / name for name in ("cache.toml", "host.toml", "page.json"))
    file.write_text(PARTS)
    notation = "block layer | k: head dim.0 token dim.1 | v: head dim token"
    shown = answer(capsys, "advise", str(file))
    assert f'pool = kvplan.allocate("{notation}", like=gpu, sizes={{"dim.0": 2, "dim.1": 8}})\n' in shown
    page.write_text(json.dumps(document(capsys, "advise", str(file))["advice"]["orders"][0]["spec"]))
    specs = json.loads(page.read_text())["layouts"]
    assert [spec["strides"] for spec in specs] == [[1024, 512, 128, 64, 8, 1], [1024, 512, 128, 8, 1]]
    assert specs[1]["address"] - specs[0]["address"] == 512
    assert answer(capsys, "advise", str(file), str(page)).count("best  HOST, as it is: none of") == 1
    host.write_text(PARTS.replace("layer: block", "block layer"))  # an allocation for K, and one for V
    facts = document(capsys, "advise", str(file), str(host))["advice"]
    assert (facts["present"]["extents"]["count"], facts["orders"][0]["extents"]["count"]) == (2, 1)
    assert facts["orders"][0]["notation"] == notation
    assert {"layouts": specs} == facts["orders"][0]["spec"]
    advice = document(capsys, "explain", str(file), str(host))["advice"]
    assert [(order["notation"], order["extents"]["count"]) for order in advice["orders"]] == [(notation, 1)]

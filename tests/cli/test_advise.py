"""What `kvplan advise` answers: the orders, and the lines to paste, which make the pool that was promised."""

from __future__ import annotations

import pytest

import kvplan
from kvplan import KVLayout
from kvplan.memory.shared_mappings import reserve
from tests.commands import answer, document

PARTS = """
[[layouts]]
notation = "layer: block head dim.0 token dim.1"
dtype = "fp16"
part = "k"
sizes = { layer = 2, block = 8, token = 8, head = 2, dim = 16, "dim.1" = 8 }
[[layouts]]
notation = "layer: block head dim.0 token dim.1"
dtype = "fp16"
part = "v"
sizes = { layer = 2, block = 8, token = 8, head = 2, dim = 24, "dim.1" = 4 }
"""


@pytest.mark.parametrize("spec", [PARTS, "".join(PARTS.partition("[[layouts]]\n")[2].partition("[[layouts]]")[:1])])
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

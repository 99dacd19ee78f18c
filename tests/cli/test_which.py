"""``kvplan which``: an address of a dump, in words."""

from __future__ import annotations

import numpy as np

from kvplan import KVLayout
from tests.commands import answer, document


def test_the_addresses_of_a_dump_are_the_engine_s(capsys, tmp_path):
    tensor = np.zeros((8, 4, 16), np.int8)
    KVLayout.from_tensors("block token dim", tensor).save(tmp_path / "a.json")
    path, address = str(tmp_path / "a.json"), tensor.ctypes.data + 64 + 16
    said = answer(capsys, "which", f"16@{address:#x}", path)
    assert said.splitlines()[0].split(maxsplit=1)[1] == "block token dim, addresses of the process that saved it"
    assert "layer 0 kv, block 1, token 1 (of 4)" in said
    assert document(capsys, "which", str(address), path)["layouts"][0]["addresses"] == "dump"
    assert "content     int8 on cpu, addresses of the process that saved it\n" in answer(capsys, "inspect", path)
    facts = document(capsys, "inspect", path)
    assert (facts["addresses"], facts["virtual"]) == ("dump", False)

"""What `kvplan plan` and `kvplan explain` answer, their numbers computed by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.cli import main
from tests.commands import SPECS, document


@pytest.mark.parametrize("columns", [40, 66, 80, 300])
@pytest.mark.parametrize("pair", list(permutations(sorted(map(str, SPECS.glob("*.toml"))), 2)), ids=str)
def test_explain_fits_and_says_all_of_it(capsys, monkeypatch, columns, pair):
    monkeypatch.setenv("COLUMNS", str(columns))
    src, dst = map(kvplan.KVLayout.from_spec, pair)
    try:
        whole = kvplan.compile(src, dst).explain()
    except kvplan.IncompatibleLayoutsError:
        return
    assert (
        main(["explain", *pair, "--no-advice", *(["--blocks", "0-2"] if src.block_tokens == dst.block_tokens else [])])
        == 0
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "".join(out.split()).startswith("".join(whole.split()))
    if columns == 300:
        assert out.startswith(whole.rstrip("\n") + "\n")


@pytest.mark.parametrize("turned", [False, True])
def test_a_notation_has_the_dtype_of_the_file_beside_it(capsys, tmp_path, turned):
    cache = KVLayout.from_tensors("layer: block token head dim", [np.zeros((8, 16, 2, 64), np.float16)])
    cache.save(tmp_path / "dump.json")
    pair = [str(tmp_path / "dump.json"), "block layer token head dim"]
    sizes = ["--src-sizes" if turned else "--dst-sizes", "layer=1,block=4,token=16,head=2,dim=64"]
    command = ["plan", *(reversed(pair) if turned else pair), *sizes, "--src", "0,1", "--dst", "2,3"]
    facts = document(capsys, *command)
    assert (facts["units"], facts["unit_tokens"]) == (2, 16)
    assert main([*command, "--dtype", "bf16"]) == 1
    assert "float16 in the" in capsys.readouterr().err

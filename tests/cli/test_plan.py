"""What `kvplan plan` and `kvplan explain` answer, their numbers computed by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.cli import main
from tests.commands import GPU, HOST, SPECS, answer, document


def test_explain_is_the_programs_own_text(capsys):
    program = kvplan.compile(kvplan.KVLayout.from_spec(GPU), kvplan.KVLayout.from_spec(HOST))
    assert answer(capsys, "explain", GPU, HOST).startswith(program.explain(80))
    assert document(capsys, "explain", GPU, HOST, "--no-advice")["text"] == program.explain()


def test_the_runs_of_a_program_are_drawn(capsys, tmp_path):
    drawn = tmp_path / "program.svg"
    text = answer(capsys, "explain", GPU, HOST, "--svg", str(drawn))
    program = kvplan.compile(KVLayout.from_spec(GPU), KVLayout.from_spec(HOST))
    assert drawn.read_text(encoding="utf-8") == program.diagram()
    assert text == answer(capsys, "explain", GPU, HOST)


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


def test_a_notation_beside_parts_of_several_dtypes_has_the_default(capsys, tmp_path):
    k = KVLayout.from_tensors("layer: block token head dim", [np.zeros((8, 16, 2, 64), np.uint8)], part="k")
    scale = KVLayout.from_tensors("layer: block token head", [np.zeros((8, 16, 2), np.float32)], part="s")
    KVLayout.merge([k, scale]).save(tmp_path / "dump.json")
    command = ["plan", str(tmp_path / "dump.json"), "block token head dim", "--src", "0", "--dst", "0"]
    assert main([*command, "--dst-sizes", "block=4,token=16,head=2,dim=64"]) != 0
    assert "dtype 'uint8 + float32'" not in capsys.readouterr().err

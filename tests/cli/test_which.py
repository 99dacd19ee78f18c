"""``kvplan which``: an address of a dump, in words."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from kvplan import KVLayout
from kvplan.cli import main
from kvplan.cli.answers import place_rows
from kvplan.cli.arguments.values import span
from tests.commands import GPU, HOST, ROOT, SPECS, TINY, TINY_SIZES, answer, document
from tests.unknown import FIVE, mla_656, overlaid, padded_split_kv, token_major


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    padded_split_kv().save("padded.json")
    mla_656().save("mla.json")
    token_major().save("tokens.json")
    return tmp_path


def test_content_of_a_spec(capsys):
    assert (
        answer(capsys, "which", "16@0x7f0000002000", GPU)
        == """\
layout          layer: kv block token head dim, made-up addresses
asked           16 bytes at 0x7f0000002000
region          0 of 80 regions, 8,192 bytes into its 16,777,216
0x7f0000002000  layer 0 k, block 1, token 0 (of 16), head 0 (of 2), bytes 0-15
                (of 256)
"""
    )


def test_a_padded_page_of_a_dump(capsys, dumps):
    assert (
        answer(capsys, "which", "96@0x7f0000000030", "padded.json", code=1)
        == """\
layout          layer: kv block token head dim, made-up addresses
asked           96 bytes at 0x7f0000000030
region          0 of 2 regions, 48 bytes into its 480
0x7f0000000030  layer 0 k, block 0, token 3 (of 4), all 2 heads, all 8 bytes
0x7f0000000040  16 bytes of padding, right after block 0 of layer 0 k, 16 bytes
                before block 1
0x7f0000000050  layer 0 k, block 1, all 4 tokens, all 2 heads, all 8 bytes
"""
    )


def test_padding_of_rows_and_what_lies_outside(capsys, dumps):
    assert (
        answer(capsys, "which", "0x7f0000000290", "mla.json", code=1)
        == """\
layout          layer: block token dim, made-up addresses
asked           1 byte at 0x7f0000000290
region          0 of 2 regions, 656 bytes into its 11,216
0x7f0000000290  1 byte of padding, right after token 0 of block 0 of layer 0 kv,
                48 bytes before token 1
"""
    )
    assert (
        answer(capsys, "which", "4096", "mla.json", code=1)
        == """\
layout  layer: block token dim, made-up addresses
asked   1 byte at 0x1000
0x1000  1 byte outside all regions; the nearest, region 0, begins
        139,637,976,723,455 bytes after
"""
    )


def test_layers_of_a_token_are_one_line(capsys, dumps):
    assert (
        answer(capsys, "which", "96@4096", "tokens.json")
        == """\
layout  kv (block token) layer head dim, made-up addresses
asked   96 bytes at 0x1000
region  0 of 1 region, 0 bytes into its 1,536
0x1000  layers 0-2 k, block 0, tokens 0-1 (of 4), all 2 heads, all 8 bytes, of
        each
"""
    )


def test_groups_that_overlay(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attention, state = overlaid()
    attention.save("attention.json")
    state.save("state.json")
    at = attention.regions[0].address + 256 + 196
    text = answer(capsys, "which", f"8@{at}", "attention.json", "--overlay", "state.json")
    one, other = text.split("\n\n")
    assert "layer 2 v, block 1, token 0 (of 4), bytes 4-11 (of 16)" in one
    assert "layer 1 state, block 1, bytes 196-199 (of 200)" in other
    assert "4 bytes of padding, right after block 1 of layer 1 state, 56 bytes before block 2" in " ".join(
        other.split()
    )
    facts = document(capsys, "which", f"8@{at}", "state.json", "--overlay", "attention.json")
    assert facts["content"]
    assert [layout["notation"] for layout in facts["layouts"]] == ["block dim", "block layer kv token dim"]


def test_many_lines_are_cut(capsys, monkeypatch):
    text = answer(capsys, "which", "100000@0x7f0000000010", str(SPECS / "mla_fp8_padded.toml"), code=1)
    assert "gaps, the first right after token 0 of block 0" in " ".join(text.split())
    monkeypatch.setattr(place_rows, "SHOWN_LINES", 2)
    text = answer(capsys, "which", "100000@0x7f0000000010", str(SPECS / "mla_fp8_padded.toml"), code=1)
    assert re.search(r"\n +and [3-9] more lines; --json has all of it\n$", text)


@pytest.mark.parametrize("name", FIVE)
def test_the_five_fit_80_columns(capsys, tmp_path, name):
    layout = FIVE[name]()
    layout.save(tmp_path / "a.json")
    region = layout.regions[0]
    for nbytes in (1, 100, region.nbytes, region.nbytes + 7):
        main(["which", f"{nbytes}@{region.address:#x}", str(tmp_path / "a.json")])
        out, err = capsys.readouterr()
        assert err == ""
        assert max(map(len, out.splitlines())) <= 80


def test_document(capsys):
    base = 0x7E00_0000_0000
    facts = document(capsys, "which", f"24@{base + 128 + 32}", TINY, "--sizes", TINY_SIZES)
    assert facts == {
        "schema": "kvplan.which/1",
        "address": base + 160,
        "nbytes": 24,
        "content": True,
        "layouts": [
            {
                "notation": TINY,
                "addresses": "spec",
                "places": [
                    {
                        "kind": "content", "address": base + 160 + 16 * head, "nbytes": 16 - 8 * head, "region": 0,
                        "offset": 160 + 16 * head, "layer": 0, "part": "k", "blocks": [1], "tokens": [1],
                        "heads": [head], "bytes": [[0, 16 - 8 * head]], "after": None, "after_nbytes": 0,
                        "before": None, "before_nbytes": 0, "gaps": 1, "words": words,
                    }
                    for head, words in enumerate((
                        "layer 0 k, block 1, token 1 (of 4), head 0 (of 2), all 16 bytes",
                        "layer 0 k, block 1, token 1 (of 4), head 1 (of 2), bytes 0-7 (of 16)",
                    ))
                ],
            }
        ],
    }  # fmt: skip


def test_document_of_padding(capsys, dumps):
    (layout,) = document(capsys, "which", "2@0x7f0000000044", "padded.json", code=1)["layouts"]
    (place,) = layout["places"]
    row = {"layer": 0, "part": "k", "token": 3, "head": 1, "byte": 7}
    assert (place["kind"], place["layer"], place["blocks"], place["nbytes"]) == ("padding", None, [], 2)
    assert (place["after"], place["after_nbytes"]) == (row | {"block": 0}, 4)
    assert (place["before"], place["before_nbytes"]) == (row | {"block": 1, "token": 0, "head": 0, "byte": 0}, 12)


@pytest.mark.parametrize(
    "text",
    ["", "@", "16@", "@16", "x", "0x", "-1", "1.5", "0@4096", "16 @4096", "16@4096@1", "9" * 19, "9" * 100,
     "1@0xffffffffffffffff", "0xg"],
)  # fmt: skip
def test_what_is_none_is_one_line(capsys, text):
    assert main(["which", f"{text}", GPU]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "BYTES@ADDRESS, as in 16@0x7f0000002000" in err or "arguments" in err


def test_what_is_decimal_or_hex():
    assert span("007") == (1, 7)
    assert span("0X10@0XfF") == (16, 255)


def test_a_broken_dump_is_one_line(capsys, dumps):
    text = (dumps / "mla.json").read_text().replace('"num_blocks": 4', '"num_blocks": -4')
    (dumps / "mla.json").write_text(text)
    assert main(["which", "1@0", "mla.json"]) == 2
    assert capsys.readouterr().err == (
        "kvplan: 'mla.json': num_blocks is -4; it is an integer from 1 to 9223372036854775807\n"
    )


def test_a_dump_is_a_layout_to_every_command(capsys, dumps):
    assert "layer: block token dim" in answer(capsys, "inspect", "mla.json")
    held = np.zeros((8, 4, 656), np.uint8)
    KVLayout.merge([KVLayout.from_tensors("block token dim", held), KVLayout.from_tensors(
        "block token dim", held.copy(), layer_start=1)]).save("pool.json")  # fmt: skip
    assert "1 unit of 4 tokens, 5,248 bytes" in answer(
        capsys, "plan", "mla.json", "pool.json", "--src", "1", "--dst", "7"
    )


@pytest.mark.slow
def test_it_starts_light():
    code = (
        "import sys; from kvplan.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numba', 'triton', 'cuda'} & set(sys.modules); sys.exit(code or bool(heavy))"
    )
    argv = [sys.executable, "-c", code, "which", "16@0x7f0000002000", GPU]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert HOST


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

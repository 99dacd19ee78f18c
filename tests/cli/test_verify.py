"""``kvplan verify``: markers there and back, between layouts that are only written down."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvplan.cli import main
from kvplan.plan.loops_numpy import Descriptors
from tests.commands import GPU, HOST_64, SPECS, TINY, TINY_SIZES, X_PACKED, answer, document, fails
from tests.unknown import FIVE
from tests.verification.broken_moves import exchanged, spoiled, without

HND = "block kv head token layer dim"


def test_all_arrives(capsys):
    assert (
        answer(capsys, "verify", TINY, HND, "--sizes", TINY_SIZES, "--blocks", "2")
        == """\
from     layer: kv block token head dim
         2 of 4 blocks of 4 tokens
to       block kv head token layer dim
         2 of 4 blocks of 4 tokens
markers  512 bytes each way, in CPU memory
there    every byte arrived where it belongs; 512 bytes around it unchanged
back     every byte arrived where it belongs; 512 bytes around it unchanged
"""
    )


def test_what_does_not_arrive_is_named(capsys, monkeypatch):
    spoiled(monkeypatch, lambda made: without(int(np.argmin(made.dst)))(made))
    text = answer(capsys, "verify", TINY, HND, "--sizes", TINY_SIZES, "--blocks", "1", code=1)
    assert "there    wrong: token 0, head 0, byte 0 of block " in text
    assert "and nothing arrived; 16 of 256 bytes are wrong\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_written_beside_is_named(capsys, monkeypatch, tmp_path):
    """Rows of 8 bytes in 10: the first copy is one byte too long, which the pad takes."""

    def overrun(made):
        size = made.size.copy()
        size[np.argmin(made.dst)] += 1
        return Descriptors(made.src, made.dst, size)

    sizes = {"block": 4, "token": 3, "dim": 8}
    spec = {"notation": "block token dim", "dtype": "uint8", "sizes": sizes}
    for name, more in (("dense", {}), ("padded", {"strides": [30, 10, 1]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(spec | more))
    pair = [str(tmp_path / f"{name}.json") for name in ("dense", "padded")]
    assert document(capsys, "verify", *pair, "--blocks", "1")["ok"]
    spoiled(monkeypatch, overrun)
    there = document(capsys, "verify", *pair, "--blocks", "1", code=1)["there"]
    assert (there["ok"], there["wrong_nbytes"], there["stray_nbytes"]) == (False, 0, 1)
    assert there["stray"]["nbytes"] == 1
    # Of the first round: the poison, and the marker of the source's second row, byte 8.
    assert (there["stray"]["before"], there["stray"]["after"]) == (0x5A, 8)
    text = answer(capsys, "verify", *pair, "--blocks", "1", code=1)
    assert "there    wrong: 1 byte of padding, right after token 0 of block " in text
    assert "0x5a before, 0x08 after" in " ".join(text.split())


@pytest.mark.slow
def test_document(capsys, monkeypatch):
    facts = document(capsys, "verify", GPU, HOST_64, "--blocks", "1")
    # The block of 5 MiB, and what is left of the 160 MiB that are looked at.
    assert facts["there"].pop("watched_nbytes") == 155 << 20
    assert facts["back"].pop("watched_nbytes") > 100 << 20
    good = {"ok": True, "rounds": 3, "wrong_nbytes": 0, "wrong": None, "stray": None, "stray_nbytes": 0,
            "unwritten": []}  # fmt: skip
    src, dst = facts.pop("src"), facts.pop("dst")
    assert facts == {"schema": "kvplan.verify/1", "nbytes": 5242880, "ok": True, "there": good, "back": good}
    assert (len(src.pop("blocks")), len(dst.pop("blocks"))) == (4, 1)
    assert src == {"notation": "layer: kv block token head dim", "num_blocks": 1024, "block_tokens": 16}
    assert dst == {"notation": "block layer kv token head dim", "num_blocks": 256, "block_tokens": 64}
    spoiled(monkeypatch, exchanged)
    facts = document(capsys, "verify", TINY, HND, "--sizes", TINY_SIZES, code=1)
    assert facts["ok"] is facts["there"]["ok"] is facts["back"]["ok"] is False
    assert facts["there"]["wrong_nbytes"] == 32
    assert ", and holds token " in facts["there"]["wrong"]


@pytest.mark.parametrize("name", FIVE)
def test_the_five_against_themselves(capsys, tmp_path, name):
    FIVE[name]().save(tmp_path / "a.json")
    facts = document(capsys, "verify", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    assert facts["ok"]


@pytest.mark.slow
def test_x_packed_keys_against_plain_ones(capsys):
    plain = "layer: kv block token head dim"
    extents = "layer=32,block=64,token=16,head=8,dim=128"
    facts = document(capsys, "verify", X_PACKED, plain, "--sizes", extents, "--dtype", "fp16", "--blocks", "1")
    assert facts["ok"]


@pytest.mark.slow
def test_a_padded_mla_against_a_dense_one(capsys):
    dense = ("block layer token dim", "--sizes", "layer=61,block=8,token=64,dim=656", "--dtype", "uint8")
    assert document(capsys, "verify", str(SPECS / "mla_fp8_padded.toml"), *dense, "--blocks", "1")["ok"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["verify", TINY, HND, "--sizes", TINY_SIZES, "--blocks", "0"], 2, "blocks is 0; give a number of at least 1"),
        (["verify", TINY, HND, "--sizes", TINY_SIZES, "--blocks", "x"], 2, "'x' is not a whole number of at least 0"),
        (["verify", GPU, HOST_64, "--blocks", "64"], 2, "a verification moves at most 67,108,864"),
        (["verify", TINY], 2, "arguments are required: DST"),
        (["verify", GPU, X_PACKED], 1, "the destination lacks layers 32-79"),
        (["verify", "block dim", "block dim", "--sizes", f"block={1 << 40},dim={1 << 20}"], 2, "cannot reserve"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, argv, code, message):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    if code == 1:
        assert main([*argv, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["schema"] == "kvplan.finding/1"


PAIR = ("kv block token head dim", "block kv head token dim", "--sizes", "block=4,token=4,dim=8")


@pytest.fixture
def formats(tmp_path):
    """Two specs of one cache, in bf16 and in fp16."""
    for dtype in ("bf16", "fp16"):
        spec = f'notation = "block token dim"\ndtype = "{dtype}"\n[sizes]\nblock = 8\ntoken = 4\ndim = 8\n'
        (tmp_path / f"{dtype}.toml").write_text(spec, encoding="utf-8")
    return str(tmp_path / "bf16.toml"), str(tmp_path / "fp16.toml")


@pytest.mark.parametrize(
    "command", [("verify",), ("explain",), ("plan", "--src", "0", "--dst", "1")], ids=lambda c: c[0]
)
def test_formats_that_differ_need_a_word(capsys, formats, command):
    name, *more = command
    told = fails(capsys, name, *formats, *more, code=1)
    assert "layer 0 'kv' is bf16 in the source and fp16 in the destination. A copy converts no numbers" in told
    assert told.endswith("or compile with reinterpret=True (--reinterpret)")
    assert answer(capsys, name, *formats, *more, "--reinterpret")


def test_a_difference_of_formats(capsys, formats):
    refused = document(capsys, "diff", *formats, code=1)
    assert refused["refused"].startswith("layer 0 'kv' is bf16 in the source and fp16")
    assert document(capsys, "diff", *formats, "--reinterpret")["refused"] is None


def test_a_report_of_formats_that_differ(capsys, formats, tmp_path):
    page = str(tmp_path / "page.html")
    assert "bf16 in the source" not in answer(capsys, "report", *formats, "--output", page, code=1)
    assert "Verification" in answer(capsys, "report", *formats, "--output", page, "--reinterpret")


def test_heads_that_are_never_written_are_told(capsys):
    ranks = (*PAIR, "--src-sizes", "head=2", "--dst-sizes", "head=8")
    told = "6 of 8 heads of the destination (2-7) are never written by this program"
    shown = " ".join(answer(capsys, "verify", *ranks).split())
    assert shown.count(told) == 1  # on the way there; all heads of the rank are written on the way back
    assert told in " ".join(answer(capsys, "explain", *ranks).split())
    found = document(capsys, "verify", *ranks)
    assert (found["ok"], found["back"]["unwritten"]) == (True, [])
    heads = {"layers": [0], "parts": ["k", "v"], "heads": [2, 3, 4, 5, 6, 7], "held": 8, "text": told}
    assert found["there"]["unwritten"] == document(capsys, "explain", *ranks)["unwritten"] == [heads]

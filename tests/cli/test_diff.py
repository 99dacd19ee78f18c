"""What `kvplan diff` answers, its numbers computed by hand."""

from __future__ import annotations

import json

import pytest

from kvplan import KVLayout
from kvplan.cli import main
from tests import unknown
from tests.commands import GPU, HOST, HOST_64, SPECS, X_PACKED, answer, document

TOKEN_MAJOR = str(SPECS / "host_token_major.toml")
SMALL = ("layer: block token dim", "(block token) layer dim", "--sizes", "layer=2,block=3,token=4,dim=8", "--dtype",
         "uint8", "--src-device", "cuda:0")  # fmt: skip

GOLDEN = {
    (GPU, TOKEN_MAJOR): """\
* differs       A                               B
───────────────────────────────────────────────────────────────────────────────
layout       *  layer: kv block token head dim  kv (block token) layer head dim
dtype           bf16                            bf16
device       *  cuda:0                          cpu
addresses       made up                         made up
layers          80 (0-79)                       80 (0-79)
parts           k, v                            k, v
heads           2 (0-1)                         2 (0-1)
blocks          1,024                           1,024
tokens each     16                              16
a token         81,920 bytes (80 KiB)           81,920 bytes (80 KiB)
a block         1,310,720 bytes (1.25 MiB)      1,310,720 bytes (1.25 MiB)
padding         none                            none
contiguous   *  160 extents of 8 KiB            2 extents of 640 KiB

matched  160 pairs: layers 0-79; parts k, v
         heads 0-1 of 0-1 in A, 0-1 in B
unit     16 tokens, 1,310,720 bytes (1.25 MiB); 1 a block of A, 1 a block of B
runs     a unit is 2,560 runs of 512 bytes
extents  a unit is 160 extents of 8 KiB in A
         a unit is 2 extents of 640 KiB in B
breaks   the first run, of layer 0 k, ends after 512 bytes: 2 heads, whole rows
         then A goes on with the next token
         and B goes on with the next layer
axis     token
better   for B, on the host; 248 orders tried:
         block kv layer token head dim
           160 runs of 8 KiB instead of 2,560 runs of 512 bytes; 1 extent
         kv block layer token head dim
           160 runs of 8 KiB instead of 2,560 runs of 512 bytes; 2 extents
         layer block kv token head dim
           160 runs of 8 KiB instead of 2,560 runs of 512 bytes; 80 extents
or       for A, on the device: block kv token layer head dim: 2 runs of 640 KiB
         (--change A)
""",
    (HOST, HOST): """\
* differs      A                              B
───────────────────────────────────────────────────────────────────────────
layout         block layer kv token head dim  block layer kv token head dim
dtype          bf16                           bf16
device         cpu                            cpu
addresses      made up                        made up
layers         80 (0-79)                      80 (0-79)
parts          k, v                           k, v
heads          2 (0-1)                        2 (0-1)
blocks         1,024                          1,024
tokens each    16                             16
a token        81,920 bytes (80 KiB)          81,920 bytes (80 KiB)
a block        1,310,720 bytes (1.25 MiB)     1,310,720 bytes (1.25 MiB)
padding        none                           none
contiguous     1 extent of 1.25 MiB           1 extent of 1.25 MiB

matched   160 pairs: layers 0-79; parts k, v
          heads 0-1 of 0-1 in A, 0-1 in B
unit      16 tokens, 1,310,720 bytes (1.25 MiB); 1 a block of A, 1 a block of B
runs      a unit is 1 run of 1.25 MiB
extents   a unit is 1 extent of 1.25 MiB in A
          a unit is 1 extent of 1.25 MiB in B
equal     one run a block
after it  A goes on with the next block, B goes on with the next block
better    nothing: B is as good as any of 248 orders that were tried
""",
    SMALL: """\
* differs       A                       B
───────────────────────────────────────────────────────────────
layout       *  layer: block token dim  (block token) layer dim
dtype           uint8                   uint8
device       *  cuda:0                  cpu
addresses       made up                 made up
layers          2 (0-1)                 2 (0-1)
parts           kv                      kv
heads           no axis of heads        no axis of heads
blocks          3                       3
tokens each     4                       4
a token         16 bytes                16 bytes
a block         64 bytes                64 bytes
padding         none                    none
contiguous   *  2 extents of 32 bytes   1 extent of 64 bytes

matched  2 pairs: layers 0-1; parts kv
unit     4 tokens, 64 bytes; 1 a block of A, 1 a block of B
runs     a unit is 8 runs of 8 bytes
extents  a unit is 2 extents of 32 bytes in A
         a unit is 1 extent of 64 bytes in B
breaks   the first run, of layer 0 kv, ends after 8 bytes: one token row
         then A goes on with the next token
         and B goes on with the next layer
axis     token
better   for B, on the host; 16 orders tried:
         block layer token dim
           2 runs of 32 bytes instead of 8 runs of 8 bytes; 1 extent
         layer block token dim
           2 runs of 32 bytes instead of 8 runs of 8 bytes; 2 extents
         block layer token dim, blocks of 2 tokens
           2 runs of 16 bytes a unit of 2 tokens; 1 extent
           instead of 8 runs of 8 bytes a unit of 4 tokens; 1 extent
or       for A, on the device: block token layer dim: 1 run of 64 bytes
         (--change A)
""",
}

REFUSED = """\
* differs       A                               B
────────────────────────────────────────────────────────────────────────────────
layout       *  layer: kv block token head dim  layer: kv block head dim.0 token
                                                dim.1
dtype        *  bf16                            fp16
device          cuda:0                          cuda:0
addresses       made up                         made up
layers       *  80 (0-79)                       32 (0-31)
parts           k, v                            k, v
heads        *  2 (0-1)                         8 (0-7)
blocks          1,024                           1,024
tokens each     16                              16
a token      *  81,920 bytes (80 KiB)           131,072 bytes (128 KiB)
a block      *  1,310,720 bytes (1.25 MiB)      2,097,152 bytes (2 MiB)
padding         none                            none
contiguous   *  160 extents of 8 KiB            64 extents of 32 KiB

no program  B lacks layers 32-79, which A holds; slice them away:
            layout.slice(layers=...)
better      no order of B would make the pair compile
"""


@pytest.mark.slow
@pytest.mark.parametrize("argv", GOLDEN, ids=["token-major", "equal", "small"])
def test_it_reads_well(capsys, argv):
    text = answer(capsys, "diff", *argv)
    assert text == GOLDEN[argv]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_a_pair_that_does_not_compile(capsys):
    assert answer(capsys, "diff", GPU, X_PACKED, code=1) == REFUSED
    facts = document(capsys, "diff", GPU, X_PACKED, code=1)
    assert facts["refused"].startswith("the destination lacks layers 32-79")
    assert (facts["matched"], facts["program"], facts["first_break"]) == (None, None, None)
    assert facts["advice"] == {"change": "B", "tried": 0, "present": None, "orders": [], "other_side": None}


def test_an_order_would_mend_it(capsys):
    argv = (
        "block token head dim",
        "block token dim",
        "--sizes",
        "block=4,token=4,head=2,dim=8",
        "--dst-sizes",
        "dim=16",
    )
    text = answer(capsys, "diff", *argv, code=1)
    assert "no program  " in text
    assert "block layer token head dim" in text.partition("better")[2]


@pytest.mark.slow
def test_the_host_side_changes(capsys):
    for argv, change in (((GPU, TOKEN_MAJOR), "B"), ((TOKEN_MAJOR, GPU), "A"), ((HOST, TOKEN_MAJOR), "B")):
        assert document(capsys, "diff", *argv)["advice"]["change"] == change
    assert document(capsys, "diff", GPU, TOKEN_MAJOR, "--change", "A")["advice"]["change"] == "A"


@pytest.mark.slow
def test_the_document(capsys):
    facts = document(capsys, "diff", GPU, HOST_64)
    assert facts["differs"] == ["notation", "device", "num_blocks", "block_tokens", "block_nbytes", "block_extents"]
    assert facts["direction"] == "store"
    assert facts["program"] == {
        "unit_tokens": 16, "unit_nbytes": 1310720, "a_units": 1, "b_units": 4, "runs": 160, "run_nbytes": [8192, 8192],
        "alignment": 8192,
        "extents": {side: {"count": 160, "min_nbytes": 8192, "max_nbytes": 8192} for side in ("a", "b")},
    }  # fmt: skip
    assert facts["first_break"] == {
        "nbytes": 8192,
        "start": {"layer": 0, "part": "k", "block": 0, "token": 0, "head": 0, "byte": 0},
        "holds": "16 tokens x 2 heads, whole rows",
        "a": {"axis": "block", "gap_nbytes": 0, "lacked": False, "text": "goes on with the next block"},
        "b": {"axis": "unit", "gap_nbytes": 0, "lacked": False, "text": "goes on with the next unit of its block"},
        "axis": "part",
    }
    best = facts["advice"]["orders"][0]
    built = KVLayout.from_spec(best["spec"])
    assert (built.notation, built.block_tokens, built.num_blocks) == (best["notation"], best["block_tokens"], 1024)


def test_heads_that_stay(capsys):
    argv = (
        "block token head dim",
        "block head token dim",
        "--sizes",
        "block=4,token=4,head=2,dim=8",
        "--dst-sizes",
        "head=8",
    )
    text = answer(capsys, "diff", *argv)
    assert "in B     heads 2-7 stay where they are" in text
    assert document(capsys, "diff", *argv)["matched"]["b_keeps"] == ["heads 2-7 stay where they are"]


@pytest.mark.slow
def test_the_other_side_is_told_only_where_it_is_better_and_no_side_was_asked_for(capsys):
    advice = document(capsys, "diff", *SMALL)["advice"]
    # Of B at best 2 runs a block; A laid out as B is, a block is one.
    assert advice["orders"][0]["runs"] == 2
    other = advice["other_side"]
    assert (other["change"], other["orders"][0]["runs"], other["orders"][0]["unit_nbytes"]) == ("A", 1, 64)
    assert "\nor  " not in answer(capsys, "diff", *SMALL, "--change", "B")
    assert document(capsys, "diff", *SMALL, "--change", "B")["advice"]["other_side"] is None
    assert document(capsys, "diff", HOST, HOST)["advice"]["other_side"] is None


UNLIKE_PARTS = """\
unit     4 tokens, 80 bytes; 1 a block of A, 1 a block of B
         of kv: 4 tokens, 64 bytes
         of index: a block whole, 16 bytes
runs     a unit is 10 runs of 8 bytes
         of kv: 8 runs of 8 bytes
         of index: 2 runs of 8 bytes
extents  a unit is 4 extents of 8 to 32 bytes in A
         of kv: 2 extents of 32 bytes in A
         of index: 2 extents of 8 bytes in A
         a unit is 2 extents of 16 to 64 bytes in B
         of kv: 1 extent of 64 bytes in B
         of index: 1 extent of 16 bytes in B
"""


@pytest.mark.slow
def test_parts_that_are_unlike_have_a_line_each(capsys, tmp_path):
    """Latents of 8 bytes a token, 4 tokens a block; indexer pages of 8 bytes that move whole; 2 layers."""
    sizes = {"layer": 2, "block": 3, "token": 4, "dim": 8}
    index = {"layer": 2, "block": 3, "dim": 8}
    for name, kv, page in (("a", "layer: block token dim", "layer: block dim"),
                           ("b", "(block token) layer dim", "block layer dim")):  # fmt: skip
        parts = [{"notation": kv, "dtype": "uint8", "sizes": sizes},
                 {"notation": page, "dtype": "uint8", "part": "index", "sizes": index}]  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps({"layouts": parts}))
    pair = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert UNLIKE_PARTS in answer(capsys, "diff", *pair)
    parts = document(capsys, "diff", *pair)["parts"]
    assert [(one["parts"], one["opaque"], one["runs"], one["unit_tokens"]) for one in parts] == [
        (["kv"], False, 8, 4),
        (["index"], True, 2, 1),
    ]
    assert document(capsys, "diff", GPU, HOST)["parts"] == []


@pytest.mark.parametrize("change", ["C", "a", ""])
def test_a_side_that_is_none(capsys, change):
    assert main(["diff", GPU, HOST, "--change", change]) == 2
    assert "argument --change: invalid choice" in capsys.readouterr().err


def test_where_both_sides_leave_the_unit_the_axis_says_so(capsys, tmp_path):
    unknown.padded_split_kv().save(tmp_path / "padded.json")
    host = ("block layer kv token head dim", "--dst-sizes", "layer=2,block=8,token=8,head=2,dim=8", "--dtype", "uint8")
    text = answer(capsys, "diff", str(tmp_path / "padded.json"), *host)
    # The run is all of K of a layer: A has padding and the next block then, B the unit's second half of tokens.
    assert (
        """\
breaks   the first run, of layer 0 k, ends after 64 bytes: 4 tokens x 2 heads,
         whole rows
         then A skips 16 bytes up to the next block
         and B goes on with the next unit of its block
axis     part: A and B leave the unit there, its next run is of another part
"""
        in text
    )

"""A block in characters: golden screens at 80 and 60 columns, and without block characters."""

from __future__ import annotations

import pytest

from kvplan import KVLayout
from kvplan.draw.block import block_picture
from kvplan.draw.text import ASCII, BLOCKS, NARROWEST, block_lines, encodable, plain
from tests.draw.drawn_layouts import CASES, PADDED_PAGE

# ruff: noqa: RUF001 (the screens hold what the screens hold)


def screen(given, width, *, ascii_only=False):
    return plain(block_lines(block_picture(KVLayout.from_spec(given).built), width, ascii_only=ascii_only)).split("\n")


def test_a_padded_page_at_80_columns():
    assert screen(PADDED_PAGE, 80) == [
        "block 0: 524,288 bytes in 64 runs of 8,192 bytes, in 32 allocations",
        "█ k   ▒ v   ╳ padding   · other blocks   … left out",
        "",
        "allocation × 32, 16,384 bytes of the block in each; 64 runs; not to scale",
        "█████╳╳╳╳·······▒▒▒▒▒▒╳╳╳  ……█████╳╳╳······▒▒▒▒▒╳╳╳……  █████╳╳╳╳·······▒▒▒▒▒▒╳╳╳",
        "layer 0                    30 more                     layer 31",
        "16,384 bytes               491,520 bytes               16,384 bytes",
        "",
        "in layer 0: k and v, 8,192 bytes each, 540,672 bytes apart; 2 runs; not to scale",
        "█████████████████╳╳╳╳╳╳╳╳╳╳╳╳╳····················▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒╳╳╳╳╳╳╳╳╳╳╳╳╳",
        "k                padding      other blocks        v                padding",
        "8,192 bytes      256 bytes    532,224 bytes       8,192 bytes      256 bytes",
        "",
        "in layer 0, k (v alike): token × 16, 512 bytes each, no gaps; one run; not to",
        "scale",
        "██████████████████████████│…████████████████████████……│█████████████████████████",
        "token 0                    14 more                     token 15",
        "512 bytes                  7,168 bytes                 512 bytes",
        "",
        "in layer 0, k, token 0: head × 2, 256 bytes each, no gaps; same run; to scale",
        "████████████████████████████████████████│███████████████████████████████████████",
        "head 0                                   head 1",
        "256 bytes                                256 bytes",
    ]


def test_a_padded_page_at_60_columns():
    assert screen(PADDED_PAGE, 60) == [
        "block 0: 524,288 bytes in 64 runs of 8,192 bytes, in 32",
        "allocations",
        "█ k   ▒ v   ╳ padding   · other blocks   … left out",
        "",
        "allocation × 32, 16,384 bytes of the block in each; 64 runs;",
        "not to scale",
        "████╳╳······▒▒▒▒╳╳  ……███╳╳╳····▒▒▒▒╳╳……  ████╳╳······▒▒▒▒╳╳",
        "layer 0             30 more               layer 31",
        "16,384 bytes        491,520 bytes         16,384 bytes",
        "",
        "in layer 0: k and v, 8,192 bytes each, 540,672 bytes apart;",
        "2 runs; not to scale",
        "██████████╳╳╳╳╳╳╳╳╳╳╳··················▒▒▒▒▒▒▒▒▒▒╳╳╳╳╳╳╳╳╳╳╳",
        "k         padding    other blocks      v         padding",
        "8 KiB     256 B      520 KiB           8 KiB     256 B",
        "",
        "in layer 0, k (v alike): token × 16, 512 bytes each, no",
        "gaps; one run; not to scale",
        "███████████████████│…██████████████████……│██████████████████",
        "token 0             14 more               token 15",
        "512 bytes           7,168 bytes           512 bytes",
        "",
        "in layer 0, k, token 0: head × 2, 256 bytes each, no gaps;",
        "same run; to scale",
        "██████████████████████████████│█████████████████████████████",
        "head 0                         head 1",
        "256 bytes                      256 bytes",
    ]


def test_rows_of_656_bytes_without_block_characters():
    assert screen(CASES["mla_fp8_padded"], 80, ascii_only=True) == [
        "block 0: 2,561,024 bytes in 3,904 runs of 656 bytes, in 61 allocations",
        "@ kv   / padding   ~ left out",
        "",
        "allocation x 61, 41,984 bytes of the block in each; 3,904 runs; not to scale",
        "@@@@@///~~@~~///@@@@@///  ~~@@@@@///~~@~~///@@@@@///~~  @@@@@///~~@~~///@@@@@///",
        "layer 0 kv                59 more                       layer 60 kv",
        "41,984 bytes              2,477,056 bytes               41,984 bytes",
        "",
        "in layer 0 kv: token x 64, 656 bytes each, 704 bytes apart; 64 runs; not to",
        "scale",
        "@@@@@@@@@@@@@@////////////~~@@@@@@@@@@@@@~~///////////@@@@@@@@@@@@@@////////////",
        "token 0       padding     62 more          padding    token 63      padding",
        "656 bytes     48 bytes    40,672 bytes     48 bytes   656 bytes     48 bytes",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 133])
@pytest.mark.parametrize("name", CASES)
def test_every_line_fits(name, width):
    assert max(map(len, screen(CASES[name], width))) <= max(width, NARROWEST)


@pytest.mark.parametrize("name", CASES)
def test_ascii_is_ascii(name):
    assert "\n".join(screen(CASES[name], 80, ascii_only=True)).isascii()


@pytest.mark.parametrize("characters", [BLOCKS, ASCII])
def test_every_kind_of_bytes_has_a_character_of_its_own(characters):
    used = [*characters.named.values(), *characters.others, characters.padding, characters.between, characters.dots]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("ascii", False), ("cp1252", False), (None, False),
                                               ("no-such-encoding", False)])  # fmt: skip
def test_which_streams_have_block_characters(encoding, can):
    assert encodable(encoding) is can


def test_parts_are_told_apart_without_colour():
    text = "\n".join(screen(CASES["scales"], 80))
    assert "█ k   ▒ v   ▚ k_scale   ▤ v_scale" in text


def test_a_row_that_is_to_scale_says_so_and_no_other_does():
    """Tokens of 48 bytes in 64: of 80 columns 30 and 10 each, which labels have room in; of 60 they have not."""
    given = {"notation": "block token dim", "dtype": "uint8", "strides": [128, 64, 1],
             "sizes": {"block": 4, "token": 2, "dim": 48}}  # fmt: skip
    wide, narrow = screen(given, 80), screen(given, 60)
    assert wide[3:5] == [
        "token × 2, 48 bytes each, 64 bytes apart; 2 runs; to scale",
        2 * (30 * "▓" + 10 * "╳"),
    ]
    assert "2 runs; not to scale" in " ".join(narrow)

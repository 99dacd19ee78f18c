"""What `kvplan inspect` answers, its numbers computed by hand."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvplan import KVLayout
from kvplan.base.limits import Limits
from kvplan.cli import main
from kvplan.draw import nest
from tests.commands import GPU, SPECS, TINY, TINY_SIZES, answer, document
from tests.draw.drawn_layouts import WOVEN


def test_inspect_reads_well(capsys):
    assert (
        answer(capsys, "inspect", GPU)
        == """\
layout      layer: kv block token head dim
content     bf16 on cuda:0, made-up addresses
layers      80 (0-79)
parts       k, v
heads       2 (0-1)
blocks      1,024 of 16 tokens
a token     81,920 bytes (80 KiB)
a block     1,310,720 bytes (1.25 MiB)
all blocks  1,342,177,280 bytes (1.25 GiB)
padding     none
contiguous  a block is 160 extents of 8,192 bytes (8 KiB)
regions     80 x 16,777,216 bytes (16 MiB)
seams       none

k, v         extent  stride in bytes
────────────────────────────────────
layer            80         separate
part              2        8,388,608
block         1,024            8,192
token            16              512
head              2              256
dim (bytes)     256                1
"""
    )


def test_inspect_of_padded_rows_and_no_heads(capsys):
    text = answer(capsys, "inspect", str(SPECS / "mla_fp8_padded.toml"))
    # 61 layers * (1024 * 64 - 1) gaps of 48 bytes: the one after the last row is no part of the tensor.
    assert "padding     191,886,480 bytes (183 MiB)" in text
    assert "contiguous  a block is 3,904 extents of 656 bytes" in text
    assert "heads       no axis of heads" in text
    assert "\nhead " not in text


def test_inspect_of_a_token_major_pool(capsys):
    text = answer(capsys, "inspect", str(SPECS / "host_token_major.toml"))
    assert "contiguous  a block is 2 extents of 655,360 bytes (640 KiB)" in text
    assert "layer            80              512" in text
    assert "part              2      671,088,640" in text


def test_inspect_shows_the_factors_of_a_split_axis(capsys):
    assert answer(capsys, "inspect", str(SPECS / "x_packed.toml")).endswith("dim (bytes)  16 x 16           256, 1\n")


def test_inspect_of_several_parts(capsys):
    text = answer(capsys, "inspect", str(SPECS / "mla_with_index.toml"))
    assert "contiguous  a block is 122 extents of 8,448 to 41,984 bytes (41 KiB)" in text
    assert "regions     61 x 42,991,616 bytes (41 MiB)\n            61 x 8,650,752 bytes (8.25 MiB)\n" in text
    assert [line.split()[0] for line in text.split("\n\n")[1:]] == ["kv", "index"]


def test_inspect_of_opaque_blocks(capsys):
    text = answer(capsys, "inspect", "layer: block dim", "--sizes", "layer=3,block=5,dim=1000", "--dtype", "uint8")
    assert "a token     none: blocks move whole" in text
    assert "a block     3,000 bytes (2.93 KiB)" in text


def test_inspect_of_blocks_that_are_looked_up(capsys):
    text = answer(capsys, "inspect", "block: layer kv token head dim", "--sizes", TINY_SIZES)
    assert "block             4         separate" in text
    assert "padding     none" in text
    assert "contiguous  a block is 1 extent of 256 bytes" in text


def test_inspect_of_seams_regions_and_layers_of_a_spec(capsys, tmp_path):
    spec = {
        "layouts": [
            {"notation": "block dim", "sizes": {"block": 2, "dim": k}, "dtype": "uint8", "part": "state",
             "layers": [3 * k], "address": 4096 * k, "seams": [4096 * k + 1]}
            for k in range(1, 11)
        ]
    }  # fmt: skip
    path = tmp_path / "state.json"
    path.write_text(json.dumps(spec))
    text = answer(capsys, "inspect", str(path))
    assert "layers      10 (3, 6, 9, 12, 15, 18, 21, 24, 27, 30)" in text
    assert "seams       10" in text
    assert "1 x 16 bytes\n            and 2 other sizes\n" in text
    assert "\nstate, layers 27  extent" in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_document(capsys):
    facts = document(capsys, "inspect", TINY, "--sizes", TINY_SIZES, "--device", "cuda:1")
    base = 0x7F00_0000_0000
    assert facts == {
        "schema": "kvplan.inspect/1",
        "notation": TINY,
        "sizes": {"layer": 1, "kv": 2, "block": 4, "token": 4, "head": 2, "dim": 8},
        "dtype": "bf16",
        "device": "cuda:1",
        "virtual": True,
        "addresses": "spec",
        "layers": [0],
        "heads": [0, 1],
        "parts": ["k", "v"],
        "num_blocks": 4,
        "block_tokens": 4,
        "nbytes": 1024,
        "block_nbytes": 256,
        "token_nbytes": 64,
        "padding_nbytes": 0,
        "padding": {
            "share": 0.0,
            "between_nbytes": 0,
            "before_nbytes": 0,
            "after_nbytes": 0,
            "block_nbytes": 0,
            "unused_nbytes": 0,
        },
        "block_extents": {"count": 2, "min_nbytes": 128, "max_nbytes": 128},
        "views": [
            {
                "parts": ["k", "v"],
                "layers": [0],
                "head_start": 0,
                "block_nbytes": 128,
                "axes": [
                    {"axis": "layer", "extent": 1, "factors": []},
                    {"axis": "part", "extent": 2, "factors": [{"extent": 2, "stride": 512}]},
                    {"axis": "block", "extent": 4, "factors": [{"extent": 4, "stride": 128}]},
                    {"axis": "token", "extent": 4, "factors": [{"extent": 4, "stride": 32}]},
                    {"axis": "head", "extent": 2, "factors": [{"extent": 2, "stride": 16}]},
                    {"axis": "dim", "extent": 16, "factors": [{"extent": 16, "stride": 1}]},
                ],
            }
        ],
        "regions": [{"address": base, "nbytes": 1024, "pinned": False, "writable": True}],
        "seams": [],
    }


@pytest.mark.parametrize("spec", sorted(SPECS.iterdir()), ids=lambda path: path.name)
def test_every_example_spec_fits_80_columns(capsys, spec):
    assert max(map(len, answer(capsys, "inspect", str(spec)).splitlines())) <= 80


def test_layers_out_of_order_have_no_stride(capsys, tmp_path):
    spec = {"notation": "layer block dim", "sizes": {"layer": 3, "block": 2, "dim": 8}, "layers": [2, 0, 1]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(spec))
    (view,) = document(capsys, "inspect", str(path))["views"]
    assert view["layers"] == [0, 1, 2]
    assert view["axes"][0] == {"axis": "layer", "extent": 3, "factors": [{"extent": 3, "stride": None}]}


# ---- pictures --------------------------------------------------------------------------------------------------------


def refusal(capsys, *argv):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_picture_below_the_facts(capsys):
    text = answer(capsys, "inspect", GPU, "--picture", "--block", "7")
    facts, _, picture = text.partition("\n\nblock 7: ")
    assert facts + "\n" == answer(capsys, "inspect", GPU)
    assert picture.startswith("1,310,720 bytes in 160 runs of 8,192 bytes, in 80 allocations\n")
    assert "\nlayer 0                   78 more" in picture
    assert max(map(len, text.splitlines())) <= 80


def test_no_picture_where_nobody_asked(capsys):
    assert "runs" not in answer(capsys, "inspect", GPU)


def test_picture_by_itself_in_a_terminal_where_it_fits(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for lines, drawn in (("20", False), ("60", True)):
        monkeypatch.setenv("LINES", lines)
        assert ("160 runs" in answer(capsys, "inspect", GPU)) is drawn
    assert "160 runs" in answer(capsys, "inspect", GPU, "--picture")


def test_no_picture_of_what_cannot_be_drawn(capsys, monkeypatch, tmp_path):
    path = tmp_path / "woven.json"
    path.write_text(json.dumps(WOVEN))
    monkeypatch.setattr(nest, "LIMITS", Limits(woven=3))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "6 extents" in answer(capsys, "inspect", str(path))
    assert main(["inspect", str(path), "--picture"]) == 2
    assert "too many to draw" in capsys.readouterr().err


def test_picture_files(capsys, tmp_path):
    pytest.importorskip("cairosvg")
    svg, png = tmp_path / "block.svg", tmp_path / "block.png"
    svg.write_text("what was there")
    answer(capsys, "inspect", GPU, "--svg", str(svg), "--png", str(png))
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["block.png", "block.svg"]


def test_picture_file_beside_json(capsys, tmp_path):
    document(capsys, "inspect", GPU, "--svg", str(tmp_path / "block.svg"), "--block", "3")
    assert "<title>Block 3 of 1,024" in (tmp_path / "block.svg").read_text(encoding="utf-8")


def test_pictures_that_cannot_be(capsys, tmp_path):
    assert refusal(capsys, "inspect", GPU, "--block", "1024") == "kvplan: --block 1024; blocks are 0 to 1023\n"
    assert "'-1' is not a whole number of at least 0" in refusal(capsys, "inspect", GPU, "--block=-1")
    assert "--picture draws in the terminal" in refusal(capsys, "inspect", GPU, "--picture", "--json")


def test_files_that_cannot_be_written(capsys, tmp_path):
    for name in (str(tmp_path / "nowhere" / "a.svg"), str(tmp_path), "/"):
        assert main(["inspect", GPU, "--svg", name]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"kvplan: --svg {name!r} cannot be written: ")
        assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_png_without_cairosvg(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    assert main(["inspect", GPU, "--png", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == "kvplan: PNG needs cairosvg; pip install cairosvg\n"
    assert list(tmp_path.iterdir()) == []


def test_png_without_the_cairo_library(capsys, monkeypatch, tmp_path):
    def missing(*_):
        raise OSError("no library called cairo-2 was found")

    finder = SimpleNamespace(find_spec=lambda name, *_: missing() if name == "cairosvg" else None)
    monkeypatch.delitem(sys.modules, "cairosvg", raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert main(["inspect", GPU, "--png", str(tmp_path / "a.png")]) == 2
    assert "apt install libcairo2" in capsys.readouterr().err


def test_picture_of_a_model(capsys, tmp_path):
    text = answer(capsys, "inspect", "--model", "llama-3.1-70b", "--engine", "vllm-split-kv", "--tp", "4", "--picture",
                  "--svg", str(tmp_path / "a.svg"))  # fmt: skip
    assert "block 0: 1,310,720 bytes in 160 runs of 8,192 bytes" in text
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_padding_in_per_cent(capsys):
    text = answer(capsys, "inspect", str(SPECS / "mla_fp8_padded.toml"))
    assert "padding     191,886,480 bytes (183 MiB), 6.8 %" in text


PADDED_PAGES = """\
padding     48 bytes, 20 %
            32 bytes between content, 16 bytes after all content
waste       16 bytes a block of 80, 20 %
"""


def test_the_padding_after_the_last_page_counts_where_the_allocation_is_known(capsys, tmp_path):
    pages = np.zeros((3, 80), np.uint8)
    KVLayout.from_tensors("block dim", pages[:, :64]).save(tmp_path / "dump.json")
    assert PADDED_PAGES in answer(capsys, "inspect", str(tmp_path / "dump.json"))
    facts = document(capsys, "inspect", str(tmp_path / "dump.json"))
    assert (facts["regions"][0]["nbytes"], facts["nbytes"], facts["padding_nbytes"]) == (240, 192, 48)
    assert facts["padding"] == {"share": 0.2, "between_nbytes": 32, "before_nbytes": 0, "after_nbytes": 16,
                                "block_nbytes": 16, "unused_nbytes": 0}  # fmt: skip
    assert answer(capsys, "diff", *[str(tmp_path / "dump.json")] * 2).count("48 bytes, 20 %") == 2


def test_a_spec_tells_of_no_memory_after_its_last_byte(capsys, tmp_path):
    spec = tmp_path / "pages.json"
    spec.write_text(json.dumps({"notation": "block dim", "dtype": "uint8", "strides": [80, 1],
                                "sizes": {"block": 3, "dim": 64}}))  # fmt: skip
    text = answer(capsys, "inspect", str(spec))
    # 2 * 80 + 64 bytes, of them 192 of content; a block still wastes 16.
    assert "padding     32 bytes, 14.3 %\n            the regions end with the last byte of content" in text
    assert "waste       16 bytes a block of 80, 20 %" in text

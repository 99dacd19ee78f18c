"""What `kvplan plan` and `kvplan explain` answer, their numbers computed by hand."""

from __future__ import annotations

import json
from itertools import permutations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.cli import main
from tests.commands import GPU, HOST, HOST_64, SPECS, TINY, TINY_SIZES, answer, document


def test_plan_reads_well(capsys):
    assert (
        answer(capsys, "plan", GPU, HOST_64, "--src", "0-10", "--dst", "0,1,3", "--dst-skip", "1", "--limit", "3")
        == """\
from     layer: kv block token head dim on cuda:0, made-up addresses
to       block layer kv token head dim on cpu, made-up addresses
store    11 units of 16 tokens, 14,417,920 bytes (13.8 MiB)
flat     480 descriptors, merged from 1,760 runs
sizes    320*[32768] | 160*[24576]
strided  22 rows
below    the first 3, in order of destination

   source          in region   destination     in region   bytes
────────────────────────────────────────────────────────────────
0  0x7f0000000000  0+0x0       0x7e0000002000  0+0x2000   24,576
1  0x7f0000800000  0+0x800000  0x7e000000a000  0+0xa000   24,576
2  0x7f0001200000  1+0x0       0x7e0000012000  0+0x12000  24,576
"""
    )


def test_plan_merges_consecutive_blocks(capsys):
    text = answer(capsys, "plan", HOST, HOST, "--src", "0,1,2,7", "--dst", "3-5,9")
    assert "host     4 units of 16 tokens, 5,242,880 bytes (5 MiB)" in text
    assert "flat     2 descriptors, merged from 4 runs" in text
    assert "sizes    [3932160, 1310720]" in text
    assert "below    all, in order of destination" in text


def test_plan_without_rows(capsys):
    assert answer(capsys, "plan", HOST, GPU, "--src", "0", "--dst", "0", "--limit", "0").splitlines()[2:] == [
        "load     1 unit of 16 tokens, 1,310,720 bytes (1.25 MiB)",
        "flat     160 descriptors, one a run",
        "sizes    160*[8192]",
        "strided  2 rows",
    ]


def test_plan_document(capsys):
    facts = document(capsys,
        "plan", TINY, "block layer kv token head dim", "--sizes", TINY_SIZES, "--src-device", "cuda:0",
        "--src", "2,3", "--dst", "1,0", "--limit", "all",
    )  # fmt: skip
    gpu, host = 0x7F00_0000_0000, 0x7E00_0000_0000
    assert facts == {
        "schema": "kvplan.plan/1",
        "src": {"notation": TINY, "device": "cuda:0", "addresses": "spec"},
        "dst": {"notation": "block layer kv token head dim", "device": "cpu", "addresses": "spec"},
        "direction": "store",
        "nbytes": 512,
        "units": 2,
        "unit_tokens": 4, "unit": "4 tokens",
        "runs": 4,
        "descriptors": 4,
        "strided_rows": 2,
        "sizes": [{"count": 4, "nbytes": 128}],
        # Source: V lies 512 bytes after K, a block is 128. Destination: K and V of a block follow one another.
        "rows": [
            {"src": gpu + src, "dst": host + dst, "nbytes": 128, "src_region": 0, "src_offset": src,
             "dst_region": 0, "dst_offset": dst}
            for src, dst in ((384, 0), (896, 128), (256, 256), (768, 384))
        ],
    }  # fmt: skip


def test_plan_caps_descriptors(capsys):
    facts = document(capsys, "plan", HOST, HOST, "--src", "0", "--dst", "1", "--max-bytes", "1000000", "--limit", "1")
    assert facts["sizes"] == [{"count": 1, "nbytes": 1_000_000}, {"count": 1, "nbytes": 310_720}]
    assert (facts["descriptors"], facts["runs"], len(facts["rows"])) == (2, 1, 1)


def test_plan_says_where_runs_were_cut(capsys):
    text = answer(capsys, "plan", HOST, HOST, "--src", "0", "--dst", "1", "--max-bytes", "1000000")
    assert "flat     2 descriptors, cut from 1 run" in text


def test_plan_of_many_sizes_stays_short(capsys, tmp_path):
    spec = [{"notation": "block dim", "sizes": {"block": 2, "dim": k}, "dtype": "uint8", "layer_start": k,
             "address": 4096 * k} for k in range(1, 11)]  # fmt: skip
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"layouts": spec}))
    assert "sizes    [10, 9, 8, 7, 6, 5, 4, 3] | and 2 smaller sizes" in answer(capsys, "plan", str(path), str(path),
                                                                               "--src", "0", "--dst", "1")  # fmt: skip


def test_explain_is_the_programs_own_text(capsys):
    program = kvplan.compile(kvplan.KVLayout.from_spec(GPU), kvplan.KVLayout.from_spec(HOST))
    assert answer(capsys, "explain", GPU, HOST) == program.explain(80)
    assert document(capsys, "explain", GPU, HOST)["text"] == program.explain()


def test_the_runs_of_a_program_are_drawn(capsys, tmp_path):
    drawn = tmp_path / "program.svg"
    text = answer(capsys, "explain", GPU, HOST, "--svg", str(drawn))
    program = kvplan.compile(KVLayout.from_spec(GPU), KVLayout.from_spec(HOST))
    assert drawn.read_text(encoding="utf-8") == program.diagram()
    assert text == answer(capsys, "explain", GPU, HOST)


EXPLAINED = """\
source       layer: kv block token head dim | layer=80 kv=2 block=1024 token=16
               head=2 dim=128 | bf16 on cuda:0, made-up addresses
destination  block layer kv token head dim | layer=80 kv=2 block=1024 token=16
               head=2 dim=128 | bf16 on cpu, made-up addresses
1 match      160 pairs: layers 0-79; parts k, v
             heads 0-1 of 0-1 in the source, 0-1 in the destination
2 refine     unit of 16 tokens; 1 a source block, 1 a destination block
             skips count units, not tokens: src_skip is 0; dst_skip is 0
             loops are count(+source stride|+destination stride), in bytes,
               outermost first
             160 x 16(+512|+512) 2(+256|+256) 256(+1|+1)
3 coalesce   160 x 8,192 B
4 fuse       +0|+0: 8,192 B x 80(+18,874,368|+16,384) 2(+8,388,608|+8,192)
5 analyse    1,310,720 B a unit in 160 x 8,192 B
             source extents a unit: 160 x 8,192 B
             destination extents a unit: 1 x 1,310,720 B
             alignment 8,192 B
             source units:      0x7f0000000000 + block 1024(+8,192)
             destination units: 0x7e0000000000 + block 1024(+1,310,720)
             a unit reaches 1,499,471,872 B in the source, 1,310,720 B in the
               destination
"""


def test_explain_prices_a_plan_by_layer(capsys):
    pair = GPU, HOST, "--blocks", "0-63", "--profile", "h200"
    whole, groups = (document(capsys, "explain", *pair, *more)["plan"]["candidates"] for more in ((), ("--by-layer",)))
    assert {one["groups"] for one in whole if not one["refused"]} == {1}
    assert {one["groups"] for one in groups if not one["refused"]} == {5}
    assert "layers:  5 groups, one after another" in answer(capsys, "explain", *pair, "--by-layer")


def test_explain_prices_a_plan_whose_compute_is_told(capsys):
    pair = GPU, HOST, "--blocks", "0-999", "--by-layer", "--profile"

    def groups(profile, *more):
        found = document(capsys, "explain", *pair, profile, *more)["plan"]["candidates"]
        return {one["groups"] for one in found if not one["refused"]}

    assert groups("h200") == {12}
    assert groups("h200", "--beside-ms", "60") == {12}, "less than three times the time of 1.3 GB"
    assert groups("h200", "--beside-ms", "80") == {5}
    assert groups("default", "--beside-ms", "1000") == {12}, "its speed is a guess"


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "x"])
def test_explain_takes_a_time_above_0(capsys, given):
    assert main(["explain", GPU, HOST, "--by-layer", "--beside-ms", given]) == 2
    assert "is not a time in milliseconds above 0" in capsys.readouterr().err


def test_explain_tells_compute_to_a_plan_by_layer_only(capsys):
    assert main(["explain", GPU, HOST, "--beside-ms", "5"]) == 2
    assert "give --by-layer, too" in capsys.readouterr().err


def test_explain_fits_80_columns_without_a_terminal(capsys, monkeypatch):
    assert answer(capsys, "explain", GPU, HOST) == EXPLAINED
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["explain", GPU, HOST]) == 0  # output is captured: no terminal
    assert capsys.readouterr().out == EXPLAINED


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
        main(["explain", *pair, "--blocks", "0-2"] if src.block_tokens == dst.block_tokens else ["explain", *pair]) == 0
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "".join(out.split()).startswith("".join(whole.split()))
    if columns == 300:
        assert out.startswith(whole.rstrip("\n") + "\n")


def test_explain_document(capsys):
    facts = document(capsys,
        "explain", TINY, "block kv layer token head dim", "--sizes", TINY_SIZES,
        "--src-device", "cuda:0", "--dst-sizes", "block=2,token=8",
    )  # fmt: skip
    assert "match" in facts.pop("text")
    assert facts == {
        "schema": "kvplan.explain/1",
        "src": {"notation": TINY, "device": "cuda:0", "addresses": "spec"},
        "dst": {"notation": "block kv layer token head dim", "device": "cpu", "addresses": "spec"},
        "direction": "store",
        "unit_tokens": 4,
        "unit_nbytes": 256,
        "src_units": 1,
        "dst_units": 2,
        "runs": 2,
        "run_nbytes": [128, 128],
        "alignment": 128,
        "extents": {
            "src": {"count": 2, "min_nbytes": 128, "max_nbytes": 128},
            "dst": {"count": 2, "min_nbytes": 128, "max_nbytes": 128},
        },
        "groups": [
            {
                "src": {"base": 0x7F00_0000_0000, "num_blocks": 4, "block_stride": 128, "unit_offsets": [0]},
                "dst": {"base": 0x7E00_0000_0000, "num_blocks": 2, "block_stride": 512, "unit_offsets": [0, 128]},
                "runs": facts["groups"][0]["runs"],
            }
        ],
        "unwritten": [],
    }
    copies = [
        (run["src"] + k * src, run["dst"] + k * dst, run["nbytes"])
        for run in facts["groups"][0]["runs"]
        for count, src, dst in [tuple(loop.values()) for loop in run["loops"]] or [(1, 0, 0)]
        for k in range(count)
    ]
    assert sorted(copies) == [(0, 0, 128), (512, 256, 128)]


@pytest.mark.parametrize(
    ("src", "dst", "units"),
    [
        (("block subblock dim", "block=4,subblock=2,dim=8"), ("block dim", "block=8,dim=8"), "2 units of 1 sub-block"),
        (("block dim", "block=4,dim=16"), ("block dim", "block=8,dim=16"), "2 units of 1 whole block"),
        (
            ("block token dim", "block=4,token=2,dim=8"),
            ("block token dim", "block=8,token=1,dim=8"),
            "2 units of 1 token,",
        ),
    ],
)
def test_units_are_told_in_words(capsys, src, dst, units):
    ids = ("--src", "0" if units != "2 units of 1 whole block" else "0,1", "--dst", "0,1")
    assert main(["plan", src[0], dst[0], "--src-sizes", src[1], "--dst-sizes", dst[1], *ids]) == 0
    assert f"host     {units}" in capsys.readouterr().out


@pytest.mark.parametrize("turned", [False, True])
def test_a_notation_has_the_dtype_of_the_file_beside_it(capsys, tmp_path, turned):
    cache = KVLayout.from_tensors("layer: block token head dim", [np.zeros((8, 16, 2, 64), np.float16)])
    cache.save(tmp_path / "dump.json")
    pair = [str(tmp_path / "dump.json"), "block layer token head dim"]
    sizes = ["--src-sizes" if turned else "--dst-sizes", "layer=1,block=4,token=16,head=2,dim=64"]
    command = ["plan", *(reversed(pair) if turned else pair), *sizes, "--src", "0,1", "--dst", "2,3"]
    assert "2 units of 16 tokens" in answer(capsys, *command)
    assert main([*command, "--dtype", "bf16"]) == 1
    assert "float16 in the" in capsys.readouterr().err


def test_a_notation_beside_parts_of_several_dtypes_has_the_default(capsys, tmp_path):
    k = KVLayout.from_tensors("layer: block token head dim", [np.zeros((8, 16, 2, 64), np.uint8)], part="k")
    scale = KVLayout.from_tensors("layer: block token head", [np.zeros((8, 16, 2), np.float32)], part="s")
    KVLayout.merge([k, scale]).save(tmp_path / "dump.json")
    command = ["plan", str(tmp_path / "dump.json"), "block token head dim", "--src", "0", "--dst", "0"]
    assert main([*command, "--dst-sizes", "block=4,token=16,head=2,dim=64"]) != 0
    assert "dtype 'uint8 + float32'" not in capsys.readouterr().err

"""Programs: units, groups, loops, alignment; literal numbers, and what explain and diagram say of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.program.explain import LEAST_WIDTH
from kvplan.program.fold import limit_loops, merge_and_fold
from kvplan.program.program import Run
from tests.compiled_cases import compiled
from tests.strategies import cases


def spec(notation: str, device: str = "cpu", dtype: str = "bf16", part: str = "kv", **sizes: int) -> KVLayout:
    content = {"notation": notation, "dtype": dtype, "device": device, "sizes": sizes, "part": part}
    return KVLayout.from_spec(content)


def split_kv(device="cuda:0", **sizes) -> KVLayout:
    return spec("layer: kv block token head dim", device, **({"layer": 80, "head": 2, "dim": 128} | sizes))


def page_first(**sizes) -> KVLayout:
    return spec("block layer kv token head dim", **({"layer": 80, "head": 2, "dim": 128} | sizes))


@pytest.mark.parametrize(
    ("src_tokens", "dst_tokens", "unit"),
    [(16, 16, 16), (16, 64, 16), (64, 16, 16), (16, 24, 8), (24, 16, 8), (16, 15, 1), (1, 256, 1), (48, 64, 16)],
)
def test_the_unit_is_the_greatest_common_divisor_of_the_block_sizes(src_tokens, dst_tokens, unit):
    program = kvplan.compile(split_kv(block=4, token=src_tokens), page_first(block=4, token=dst_tokens))
    assert program.unit_tokens == unit
    assert program.unit_nbytes == 80 * 2 * unit * 2 * 128 * 2
    assert (program.program.src_units, program.program.dst_units) == (src_tokens // unit, dst_tokens // unit)


def test_a_token_axis_split_unevenly_makes_the_unit_smaller():
    src = KVLayout.from_tensors("block token.0 dim token.1", np.zeros((4, 2, 8, 6), np.int8))  # 12 tokens, 2 x 6
    dst = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 8), np.int8))
    program = kvplan.compile(src, dst)  # units of 4 tokens would straddle the 6
    assert program.unit_tokens == 2
    assert (program.program.src_units, program.program.dst_units) == (6, 4)


def test_a_cross_layer_block_is_one_run():
    one = spec("block layer kv token head dim", "cuda:0", layer=80, block=4, token=16, head=2, dim=128)
    program = kvplan.compile(one, page_first(block=9, token=16))
    assert (program.runs, program.run_nbytes, program.direction) == (1, (1_310_720, 1_310_720), "store")
    assert program.alignment == 262_144  # 1,310,720 = 5 * 2**18


def test_fused_and_split_content_match_by_their_halves():
    fused = spec("layer: block token head dim", layer=2, block=4, token=16, head=2, dim=256)
    split = spec("layer: kv block token head dim", layer=2, block=4, token=16, head=2, dim=128)
    there, back = kvplan.compile(fused, split), kvplan.compile(split, fused)
    assert (there.runs, there.run_nbytes) == (2 * 2 * 16 * 2, (256, 256))
    assert (back.runs, back.unit_nbytes) == (there.runs, there.unit_nbytes)
    named = spec("layer: block token head (kv dim)", layer=2, block=4, token=16, head=2, dim=128)
    assert kvplan.compile(fused, named).runs == 2  # the same bytes, so one run a layer
    assert kvplan.compile(fused, fused).runs == 2


@pytest.mark.slow
def test_each_half_of_fused_content_goes_where_its_part_is():
    """Rows of 12 bytes hold K of 4 bytes and V of 8; of 3 blocks of one token."""
    fused = KVLayout.from_tensors("block dim", np.arange(36, dtype=np.uint8).reshape(3, 12))
    k, v = np.zeros((3, 4), np.uint8), np.zeros((3, 8), np.uint8)
    split = KVLayout.merge([KVLayout.from_tensors("block dim", t, part=part) for t, part in ((k, "k"), (v, "v"))])
    rows = fused.address(layer=0, part="kv", block=1)
    there = kvplan.compile(fused, split).plan([1], [2]).descriptors()
    back = kvplan.compile(split, fused).plan([2], [1]).descriptors()
    held = {4: (rows, k[2].ctypes.data), 8: (rows + 4, v[2].ctypes.data)}
    assert {n: (a, b) for a, b, n in zip(*(c.tolist() for c in there), strict=True)} == held
    assert {n: (b, a) for a, b, n in zip(*(c.tolist() for c in back), strict=True)} == held


def test_a_layer_may_hold_fused_content_beside_k_and_v():
    def cache():
        return KVLayout.merge([KVLayout.from_tensors("block dim", np.zeros((3, 8 * n), np.uint8), part=part)
                               for n, part in ((2, "kv"), (1, "k"), (1, "v"))])  # fmt: skip

    one, other = cache(), cache()
    program = kvplan.compile(one, other)
    moved = zip(*(column.tolist() for column in program.plan([0], [1]).descriptors()), strict=True)
    assert sorted(moved) == sorted(
        (one.address(layer=0, part=part, block=0), other.address(layer=0, part=part, block=1), nbytes)
        for part, nbytes in (("kv", 16), ("k", 8), ("v", 8))
    )


@pytest.mark.parametrize(("tokens", "unit"), [(2, 1), (3, 3), (6, 6), (1, 1)])
def test_a_unit_repeats_in_a_token_axis_of_two_factors(tokens, unit):
    """Six tokens, three and three: units of two would be a pair at one place and split at the next."""
    src = KVLayout.from_tensors("block token.0 dim token.1", np.zeros((4, 2, 8, 3), np.int8))
    dst = KVLayout.from_tensors("block token dim", np.zeros((12, tokens, 8), np.int8))
    assert kvplan.compile(src, dst).unit_tokens == kvplan.compile(dst, src).unit_tokens == unit


@pytest.mark.parametrize("part", ["kv", "k"])
def test_an_opaque_block_and_token_slots_say_how_many_there_are(part):
    opaque = KVLayout.from_tensors("block dim", np.zeros((4, 64), np.int8), part=part)
    slots = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 8), np.int8), part=part)
    for sides in ((opaque, slots), (slots, opaque)):
        with pytest.raises(kvplan.IncompatibleLayoutsError, match="the other's has 8 token slots"):
            kvplan.compile(*sides)


def test_one_head_of_any_number_is_content_without_heads():
    memory, other = np.zeros((4, 2, 1, 8), np.int8), np.zeros((4, 2, 8), np.int8)
    third = KVLayout.from_tensors("block token head dim", memory, head_start=3)
    plain = KVLayout.from_tensors("block token dim", other)
    for sides, arrays in (((third, plain), (memory, other)), ((plain, third), (other, memory))):
        moved = kvplan.compile(*sides).plan([1], [2]).descriptors()
        assert [column.tolist() for column in moved] == [[arrays[0][1].ctypes.data], [arrays[1][2].ctypes.data], [16]]


def test_x_packed_keys():
    packed = spec(
        "layer: kv block head dim.0 token dim.1", layer=1, block=4, token=16, head=2, **{"dim.0": 16, "dim.1": 8}
    )
    plain = spec("layer: kv block token head dim", layer=1, block=4, token=16, head=2, dim=128)
    program = kvplan.compile(packed, plain)
    assert program.run_nbytes == (16, 16)  # 8 elements of 2 bytes
    assert program.runs == 2 * 2 * 16 * 16
    assert program.alignment == 16


def test_a_head_range_of_a_larger_host():
    gpu = KVLayout.from_spec({"notation": "layer: kv block token head dim", "dtype": "bf16", "head_start": 4,
                              "sizes": {"layer": 80, "block": 4, "token": 16, "head": 2, "dim": 128}})  # fmt: skip
    program = kvplan.compile(gpu, page_first(block=4, token=16, head=8))
    assert (program.runs, program.run_nbytes) == (2560, (512, 512))
    group = program.program.groups[0]
    assert group.dst_base % (8 * 256) == 4 * 256  # the fifth head of a token row


def test_heads_split_across_ranges_on_both_sides():
    shards = KVLayout.from_tensors("block head.0 token head.1 dim", np.zeros((2, 3, 4, 2, 8), np.int8))  # 3 x 2 heads
    halves = KVLayout.from_tensors("block head.0 token head.1 dim", np.zeros((2, 2, 4, 3, 8), np.int8))  # 2 x 3 heads
    program = kvplan.compile(shards, halves)
    # Heads 0-1 | 2-3 | 4-5 against 0-2 | 3-5: stretches of 2, 1, 1, 2 heads in each of 4 tokens.
    assert (program.runs, program.run_nbytes) == (16, (8, 16))


def test_parts_of_different_block_strides_are_groups():
    def cache(num_blocks):
        kv = KVLayout.from_tensors(
            "layer: block kv token head dim", [np.zeros((num_blocks, 2, 16, 2, 64), np.int8)] * 1
        )
        scale = KVLayout.from_tensors("layer: block kv token head", [np.zeros((num_blocks, 2, 16, 2), np.float32)] * 1,
                                      part="scale")  # fmt: skip
        return KVLayout.merge([kv, scale])

    program = kvplan.compile(cache(4), cache(6))
    assert len(program.program.groups) == 2
    assert (program.runs, program.run_nbytes) == (2, (256, 4096))
    assert "group 1 of 2" in program.explain()


def test_padded_rows_are_runs_of_their_content():
    padded = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 64), np.int8)[:, :, :40])
    dense = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 40), np.int8))
    program = kvplan.compile(padded, dense)
    assert (program.runs, program.run_nbytes, program.unit_nbytes) == (8, (40, 40), 320)
    assert program.alignment == 8


@pytest.mark.parametrize(("nbytes", "alignment"), [(132, 4), (584, 8), (656, 16), (528, 16), (102, 2), (103, 1)])
def test_alignment_is_that_of_every_fragment(nbytes, alignment):
    rows = spec("layer: block token dim", dtype="uint8", layer=2, block=4, token=1, dim=nbytes)
    host = spec("block layer token dim", dtype="uint8", layer=2, block=4, token=1, dim=nbytes)
    assert kvplan.compile(rows, host).alignment == alignment


def test_blocks_that_are_looked_up():
    blocks = [np.zeros((2, 4, 8), np.int8) for _ in range(5)]
    program = kvplan.compile(
        KVLayout.from_tensors("block: layer token dim", blocks),
        KVLayout.from_tensors("block layer token dim", np.zeros((5, 2, 4, 8), np.int8)),
    )
    assert (program.runs, program.run_nbytes) == (1, (64, 64))
    d = program.plan([4, 0], [1, 3]).descriptors()
    assert sorted(d.src.tolist()) == sorted(blocks[k].ctypes.data for k in (4, 0))
    assert "looked up in a table of 5" in program.explain()


def test_compile_is_cached_on_the_pair_and_holds_no_memory_alive():
    import gc
    import weakref

    memory = np.zeros((4, 8), np.int8)
    src, dst = KVLayout.from_tensors("block dim", memory), KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8))
    program = kvplan.compile(src, dst)
    assert kvplan.compile(src, dst) is program
    assert kvplan.compile(dst, src) is not program
    alive = weakref.ref(memory)
    del memory, src, dst, program
    gc.collect()
    assert alive() is None


def test_loops_beyond_two_are_unrolled_shortest_first():
    runs = limit_loops([Run(0, 0, 4, ((3, 100, 300), (2, 50, 150), (4, 8, 30)))])
    assert runs == [Run(0, 0, 4, ((3, 100, 300), (4, 8, 30))), Run(50, 150, 4, ((3, 100, 300), (4, 8, 30)))]


def test_unevenly_spaced_components_stay_rows():
    runs = [Run(src, dst, 8, ()) for src, dst in ((0, 0), (100, 8), (300, 16), (350, 24))]
    assert len(merge_and_fold(runs)) == 4
    pairs = [Run(src + kv * 40, dst + kv * 8, 8, ()) for src, dst in ((0, 0), (100, 16), (300, 32)) for kv in (0, 1)]
    assert merge_and_fold(pairs) == [
        Run(0, 0, 8, ((2, 40, 8),)), Run(100, 16, 8, ((2, 40, 8),)), Run(300, 32, 8, ((2, 40, 8),))
    ]  # fmt: skip


def test_three_in_a_row_are_a_loop_beside_one_that_is_not():
    row = [Run(100 * k, 50 * k, 8, ()) for k in range(3)]
    other = Run(1000, 900, 8, ())
    assert set(merge_and_fold([*row, other])) == {Run(0, 0, 8, ((3, 100, 50),)), other}


def test_runs_of_other_loops_are_not_merged_though_they_touch():
    runs = [Run(0, 0, 8, ()), Run(8, 8, 8, ((2, 100, 50),))]
    assert merge_and_fold(runs) == runs


EXPLAINED = """\
source       layer: kv block token head dim | layer=80 kv=2 block=64 token=16 head=2 dim=128 | bf16 on cuda:0, made-up addresses
destination  block layer kv token head dim | layer=80 kv=2 block=64 token=64 head=2 dim=128 | bf16 on cpu, made-up addresses
1 match      160 pairs: layers 0-79; parts k, v
             heads 0-1 of 0-1 in the source, 0-1 in the destination
2 refine     unit of 16 tokens; 1 a source block, 4 a destination block
             skips count units, not tokens: src_skip is 0; dst_skip is 0 to 3
             loops are count(+source stride|+destination stride), in bytes, outermost first
             160 x 16(+512|+512) 2(+256|+256) 256(+1|+1)
3 coalesce   160 x 8,192 B
4 fuse       +0|+0: 8,192 B x 80(+2,097,152|+65,536) 2(+524,288|+32,768)
5 analyse    1,310,720 B a unit in 160 x 8,192 B
             source extents a unit: 160 x 8,192 B
             destination extents a unit: 160 x 8,192 B
             alignment 8,192 B
             source units:      0x7f0000000000 + block 64(+8,192)
             destination units: 0x7e0000000000 + block 64(+5,242,880), unit 4(+8,192)
             a unit reaches 166,207,488 B in the source, 5,218,304 B in the destination
"""  # noqa: E501


def test_explain_shows_the_program_after_every_pass():
    program = kvplan.compile(split_kv(block=64, token=16), page_first(block=64, token=64))
    assert program.explain() == EXPLAINED
    assert repr(program) == "CopyProgram(store, unit of 16 tokens, 160 runs of 8192 bytes)"


@given(case=cases(), width=st.integers(LEAST_WIDTH, 130))
def test_explain_in_a_width_loses_nothing(case, width):
    program = compiled(case)[2]
    made, whole = program.explain(width), program.explain()
    assert max(map(len, made.splitlines())) <= width
    assert "".join(made.split()) == "".join(whole.split())


def test_explain_in_less_than_40_columns_is_that_of_40():
    program = kvplan.compile(split_kv(block=64, token=16), page_first(block=64, token=64))
    assert program.explain(1) == program.explain(40) != program.explain(41)


def test_explain_counts_what_does_not_fit():
    layers = [np.zeros((2, 4, 2 ** (k % 4 + 1)), np.int8) for k in range(20)]
    alone = [KVLayout.from_tensors("block token dim", t, layer_start=k) for k, t in enumerate(layers)]
    program = kvplan.compile(KVLayout.merge(alone), KVLayout.merge(alone))
    assert "... and" in program.explain()


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("layers", [2, 80])
def test_a_diagram_draws_every_run_or_says_how_many(layers):
    program = kvplan.compile(split_kv(block=4, token=16, layer=layers), page_first(block=4, token=16, layer=layers))
    root = ET.fromstring(program.diagram())
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text == repr(program)
    assert len(root.findall(f"{SVG}polygon")) == min(2 * layers, 6)  # of 80 layers: the first two, and the last
    width = float(root.get("viewBox").split()[2])
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.get("width")) <= width + 1
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert f"destination: 1 x {layers * 16_384:,} B, contiguous, in 1 allocation" in texts


def test_a_diagram_of_many_runs_says_how_many_it_draws():
    program = kvplan.compile(
        split_kv(block=4, token=16), spec("block layer kv head token dim", layer=80, block=4, token=16, head=2, dim=128)
    )
    assert "; drawn: 16; left out: 5,104; layers 0, 79 of 80" in program.diagram()


def test_an_opaque_part_on_either_side_moves_whole_blocks_only():
    """A review's find: with an opaque part in the destination alone, two units wrote the same bytes."""
    state, rows = np.zeros((4, 1, 32), np.int8), np.zeros((4, 1, 8), np.int8)
    src = KVLayout.merge([
        KVLayout.from_tensors("block token dim", state, part="state"), KVLayout.from_tensors("block token dim", rows)
    ])  # fmt: skip
    dst = KVLayout.merge([
        KVLayout.from_tensors("block dim", np.zeros((2, 32), np.int8), part="state"),
        KVLayout.from_tensors("block token dim", np.zeros((2, 2, 8), np.int8)),
    ])  # fmt: skip
    for a, b in ((src, dst), (dst, src)):
        with pytest.raises(kvplan.IncompatibleLayoutsError, match="moves whole blocks"):
            kvplan.compile(a, b)


def test_extents_of_a_side_whose_groups_share_their_blocks():
    layers = [np.zeros((4, 8, 64), np.int8), np.zeros((4, 16, 64), np.int8)[:, :8]]  # of different block strides
    src = KVLayout.merge([KVLayout.from_tensors("block token dim", t, layer_start=k) for k, t in enumerate(layers)])
    dst = KVLayout.from_tensors("block layer token dim", np.zeros((4, 2, 8, 64), np.int8))
    program = kvplan.compile(src, dst).program
    assert len(program.groups) == 2
    assert program.extents("dst") == (1, 1024, 1024)
    assert program.extents("src") == (2, 512, 512)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (range(2), "the destination lacks layer 2, which the source holds; slice it away"),
        (range(1), "the destination lacks layers 1-2, which the source holds; slice them away"),
    ],
)
def test_layers_that_the_destination_lacks(held, says):
    layout = KVLayout.from_tensors("layer block token dim", np.zeros((3, 4, 2, 8), np.uint8))
    with pytest.raises(kvplan.IncompatibleLayoutsError, match=says):
        kvplan.compile(layout, layout.slice(layers=held))


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        (("k", "V"), ("k", "v"), "'V' and 'v' differ only in letter case"),
        (("k", "v"), ("k", "V"), "'v' and 'V' differ only in letter case"),
        (("k", "V"), ("kv",), "'V' and 'v' differ only in letter case"),
        (("kv",), ("K", "v"), "'K' and 'k' differ only in letter case"),
        (("k", "v"), ("k", "w"), r"slice it away: layout.slice\(parts=...\)$"),
    ],
)
def test_parts_in_other_letter_case_are_named(here, there, says):
    src, dst = (
        KVLayout.merge([
            KVLayout.from_tensors("block token head dim", np.zeros((4, 2, 2, 8 // len(parts)), np.uint8), part=part)
            for part in parts
        ])
        for parts in (here, there)
    )  # fmt: skip
    with pytest.raises(kvplan.IncompatibleLayoutsError, match=says):
        kvplan.compile(src, dst)

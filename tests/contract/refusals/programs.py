"""Refusals of compile, plan, join and descriptors, of groups, and of ranks."""

from __future__ import annotations

import numpy as np
import torch

import kvplan
from kvplan import BlockIndexError, IncompatibleLayoutsError, KVLayout, KVPlanError, LayoutError, OverlapError, Shard
from tests.contract.refusals.table import REFUSED, paged, spec, tensors, zeros


def typed(dtype, notation="block token dim"):
    return spec(notation, dtype=dtype, block=4, token=8, dim=32)


def state(tokens, blocks=8):
    return KVLayout.merge([paged(blocks, tokens), tensors("block dim", blocks, 4, part="state")])


def indexed(tokens, pages):
    """Rows of tokens, and opaque pages beside them."""
    index = tensors("block subblock dim", 4, pages, 8, part="index")
    return KVLayout.merge([tensors("block token dim", 4, tokens, 2), index])


def parts(*names):
    return KVLayout.merge([tensors("block token head dim", 4, 2, 2, 8 // len(names), part=name) for name in names])


def layers(*held):
    return tensors("layer block token dim", 3, 4, 2, 8).slice(layers=held)


def heads(start=0):
    return KVLayout.from_tensors("head: block token dim", [zeros(4, 2, 8) for _ in range(3)], head_start=start)


UNEVEN = tensors("block token.0 dim token.1", 4, 2, 8, 6), tensors("block subblock dim", 4, 3, 8, part="index")
EVEN = tensors("block token dim", 4, 8, 8), tensors("block subblock dim", 4, 2, 8, part="index")
OPAQUE = KVLayout.merge([tensors("block dim", 2, 32, part="state"), tensors("block token dim", 2, 2, 8)])
SLOTS = KVLayout.merge([tensors("block token dim", 4, 1, 32, part="state"), tensors("block token dim", 4, 1, 8)])
ROWS, PAIR = tensors("block token head dim", 8, 4, 2, 8), tensors("block kv token head dim", 8, 2, 4, 2, 8)
MHA = spec("layer: block kv token head dim", layer=2, block=4, kv=2, token=16, head=2, dim=64)
MLA = spec("layer: block token dim", layer=2, block=4, token=16, dim=256)
SCATTERED = spec("block.0 token block.1 dim", **{"block.0": 1 << 20, "block.1": 1 << 18, "token": 16, "dim": 64})
REFUSED["compile", kvplan.compile, IncompatibleLayoutsError] = [
    (paged(), paged(layer_start=1), "destination lacks layer 0 ... source holds"),
    (paged(part="a"), paged(part="b"), "one name on both sides"),
    (paged(), paged(dim=16), "8 bytes per (token, head) ... 16"),
    (paged(), paged(head_start=2), "heads 0 to 1 ... 2 to 3"),
    (paged(), tensors("block token dim", 8, 4, 8), "no head axis"),
    (tensors("block dim", 8, 8), paged(head=1), "4 token slots"),
    (tensors("block dim", 8, 64), paged(head=1), "no common unit"),
    (tensors("block dim", 2, 8), tensors("block token dim", 2, 4, 8), "4 token slots ... name their axis subblock"),
    (tensors("block token dim", 8, 4, 16), tensors("block kv token head dim", 8, 2, 4, 1, 8), "only one ... head axis"),
    (ROWS, PAIR, "'kv' of 8 bytes ... 'k' of 8 ... 'v' of 8"),
    (MHA, MLA, "layer 0 ... 'kv' of 256 bytes ... 'k' of 64 and 'v' of 64"),
    (state(4), state(8), "'state' ... moves whole blocks"),
    (SLOTS, OPAQUE, "'state' ... whole blocks"),
    (OPAQUE, SLOTS, "'state' ... whole blocks"),
    (layers(0, 1, 2), layers(0, 1), "destination lacks layer 2 ... slice it away"),
    (layers(0, 1, 2), layers(0), "destination lacks layers 1-2 ... slice them away"),
    (parts("k", "V"), parts("k", "v"), "lacks part 'V' ... has ['k', 'v']"),
    (parts("kv"), parts("K", "v"), "lacks part 'kv' ... has ['K', 'v']"),
    (typed("bf16"), typed("fp16"), "bf16 in the source ... fp16 ... reinterpret=True"),
    (typed("fp16"), tensors("block token dim", 4, 8, 16, kind=np.float32), "layer 0 'kv' ... fp16 ... float32"),
    (KVLayout.merge(UNEVEN), KVLayout.merge(EVEN), "no unit ... whole sub-blocks"),
    (heads(), heads(3), "heads 0 to 2 ... 3 to 5"),
    (tensors("block token dim", 4, 2, 8), heads(), "3 heads ... no head axis"),
]
REFUSED["compile", LayoutError] = [
    (lambda: kvplan.compile(SCATTERED, SCATTERED), "no single stride ... over 33,554,432")
]


def small(src_blocks, dst_blocks, skips=(0, 0)):
    """Blocks of 4 tokens to blocks of 12, whose bytes must stay as they are."""
    memory = np.full((8, 12, 2, 8), 7, np.uint8)
    program = kvplan.compile(paged(), KVLayout.from_tensors("block token head dim", memory))
    try:
        program.plan(src_blocks, dst_blocks, *skips)
    finally:
        assert (memory == 7).all()
        program.plan([0, 1, 2], [0])  # a refusal leaves nothing behind


REFUSED["CopyProgram.plan", small, OverlapError] = [
    ([0, 1, 2, 3, 4, 5], [1, 1], "block 1 ... unit 0"),
    ([0, 1, 2, 3], [2, 2], (0, 1), "block 2 ... dst_blocks[0] and dst_blocks[1]"),
]
REFUSED["CopyProgram.plan", small, BlockIndexError] = [
    ([0, 1, -1], [0], "src_blocks[2] ... is -1 ... are 0 ... 7"),
    ([0, 1, 8], [0], "src_blocks[2] ... is 8"),
    ([0, 1, 2], [9], "dst_blocks[0] ... is 9 ... are 0 ... 7"),
    ([0.0, 1.0, 2.0], [0], "src_blocks holds float64"),
    (np.array([True, False, True]), [0], "src_blocks holds bool"),
    ([[0, 1], [2]], [0], "src_blocks ... ragged"),
    ([[0, 1, 2]], [0], "(1, 3) ... shape"),
    (3, [0], "src_blocks has shape ()"),
    (None, [0], "src_blocks"),
    (["0", "1", "2"], [0], "src_blocks holds <U1"),
    (np.array([2**63, 1, 2], np.uint64), [0], "64 ... largest int ... past the"),
    (torch.zeros(3, device="meta", dtype=torch.int64), [0], "src_blocks ... ids.cpu()"),
    ([0, 1, 2, 3], [0], "4 src ... cover 4 units ... 1 dst ... cover 3"),
    ([0, 1, 2], [0, 1], "partly used"),
    ([], [0], "cover 0 units"),
    ([0], [], "cover 0"),
    ([0, 1], [0], (0, 3), "dst_skip ... is 3 ... holds 3 units ... is 0 ... 2"),
    ([0, 1], [0], (0, -1), "dst_skip ... is -1"),
    ([0, 1], [0], (1, 0), "src_skip ... is 1 ... holds 1 unit ... is 0"),
    ([0, 1], [0], (0, 1.0), "dst_skip ... 1.0 ... integer"),
    (torch.zeros(3, requires_grad=True), [0], "src_blocks"),
    (torch.eye(3).to_sparse(), [0], "src_blocks"),
    (range(5), range(3), "give 2 dst blocks"),
    (range(3), range(1), (0, 2), "give 2 dst blocks"),
]


def same():
    layout = paged()
    return kvplan.compile(layout, layout)


BLOCKS = zeros(64 * 96)
FULL, WINDOW = (KVLayout.from_tensors("block dim", BLOCKS.reshape(n, -1)) for n in (64, 32))


def overlaid():
    """Plans of two groups over the same bytes."""
    plans = [kvplan.compile(tensors("block dim", 64, 96), FULL).plan([0], [5])]
    return kvplan.join([*plans, kvplan.compile(tensors("block dim", 32, 192), WINDOW).plan([0], [2])])


def both_ways():
    gpu, cpu = spec(device="cuda:0"), spec(device="cpu")
    return kvplan.join([kvplan.compile(cpu, gpu).plan([0], [1]), kvplan.compile(gpu, cpu).plan([0], [1])])


def units():
    src, dst = tensors("block token.0 dim token.1", 4, 2, 8, 6), tensors("block token dim", 4, 8, 8)
    return kvplan.compile(src, dst)


REFUSED["CopyProgram"] = [
    (lambda: same().plan([0, 1], [1, 2]), OverlapError, "both reads and writes"),
    (lambda: units().plan([0], [0], src_skip=6), BlockIndexError, "0 to 5 ... a unit is 2 tokens"),
    (lambda: units().plan([0, 1, 2], [0]), BlockIndexError, "partly used ... give 5 dst"),
    (lambda: same().of_layers((2,)), LayoutError, "layers [2] are not held"),
    (lambda: same().of_layers(()), LayoutError, "holds nothing"),
    (lambda: same().plan([0], [1]).nixl("source"), KVPlanError, "'src' or 'dst'"),
]
REFUSED["Plan.descriptors", lambda most: same().plan([0], [1]).descriptors(max_nbytes=most), KVPlanError] = [
    (0, "0 ... at least one byte"),
    (-1, "-1 ... at least one byte"),
    (1.5, "1.5 ... at least one byte"),
    (True, "True ... at least one byte"),
]


def joined(*blocks):
    """Two plans of one program, of which the second is one block to one block."""
    program = same()
    return lambda: kvplan.join([program.plan([0], [4]), program.plan(*blocks)])


REFUSED["join"] = [
    (lambda: kvplan.join([]), KVPlanError, "no plans"),
    (both_ways, kvplan.PathError, "load ... store"),
    (overlaid, OverlapError, "write address"),
    (joined([5], [4]), OverlapError, "two of the joined plans write"),
    (joined([5], [0]), OverlapError, "reads and writes"),
    (joined([4], [6]), OverlapError, "reads and writes"),
]


def group(layer, tokens):
    return tensors("layer block kv token head dim", 1, 64, 2, tokens, 2, 8, layers=[layer])


def groups(src=((0,), (0,)), dst=((0,), (0,)), **firsts):
    return kvplan.Groups([kvplan.compile(group(k, 16), group(k, 64)) for k in (0, 1)]).plan(src, dst, **firsts)


REFUSED["Groups.plan", lambda given: groups(**given), BlockIndexError] = [
    ({"src": [[0]]}, "src_blocks ... [[0] ... of 2, one"),
    ({"src": 3}, "src_blocks ... is 3 ... of 2"),
    ({"src": [[0], None]}, "group 1 ... src_blocks"),
    ({"src": [[0], iter([0])]}, "group 1 ... src_blocks"),
    ({"src": [[0], [0, 99]]}, "group 1 ... src_blocks[1] ... is 99 ... are 0 ... 63"),
    ({"dst": [[0], [0, 1]]}, "group 1 ... 1 src ... cover 1 units"),
    ({"src_first": np.zeros((2, 1), int)}, "group 0 ... src_first ... [0]"),
    ({"src_first": [0, -1]}, "group 1 ... src_first ... is -1"),
    ({"dst_first": [True, 0]}, "group 0 ... dst_first"),
    ({"src_first": [0, 4], "dst_first": [0, 0]}, "group 1 ... token 0 ... at 64 ... 1 dst"),
]
REFUSED["Groups", kvplan.Groups, LayoutError] = [([], "no groups"), (3, "programs ... 3"), ([3], "programs[0] ... int")]


def rank(heads=range(1), layers=range(1)):
    """A rank that is not here."""
    axes = {"layer": len(layers), "block": 8, "token": 16, "head": len(heads), "dim": 128}
    starts = {"layer_start": layers.start, "head_start": heads.start}
    return KVLayout.from_spec({"notation": "block layer kv token head dim", "sizes": axes, "dtype": "bf16"} | starts)


def half(part, heads, address, dim=8):
    sizes = {"block": 4, "token": 2, "dim": dim, "head": heads}
    return KVLayout.from_spec({"notation": "block token head dim", "sizes": sizes, "part": part, "address": address})


FOUR = [rank(heads=range(k, k + 2)) for k in (0, 2, 4, 6)]
HALVES = KVLayout.merge([half("k", 4, 0x1000), half("v", 2, 0x8000)])
LATENT = tensors("block token dim", 8, 4, 8)
TWO = [tensors("block token head dim", 8, 4, 1, 8, head_start=k) for k in (0, 1)]
HELD = tensors("block token head dim", 4, 2, 4, 8)
OVERLAPPING = [HELD.slice(heads=range(2)), HELD.slice(heads=range(1, 4))]
REFUSED["Shard", lambda layout, numbers: Shard(layout, **numbers), LayoutError] = [
    (rank(), {"cp_rank": 2, "cp_size": 2}, "cp_rank ... 2 ... 0 to 1"),
    (rank(), {"cp_rank": -1}, "cp_rank ... -1"),
    (rank(), {"cp_size": 0}, "cp_size ... 0"),
    (rank(), {"cp_size": 2, "interleave": 3}, "interleave ... 3 ... divide ... 16"),
    (rank(), {"interleave": 1.5}, "interleave ... 1.5"),
    (spec(), {"cp_size": 2}, "without token slots"),
    (3, {}, "layout is a int"),
]
REFUSED["reshard", kvplan.reshard, LayoutError] = [
    ([], rank(), "sources ... []"),
    (rank(), [], "destinations ... []"),
    (7, rank(), "sources ... 7"),
    ([rank(), 3], rank(), "sources[1] ... int"),
    ([Shard(rank(), 0, 2), Shard(rank(), 1, 2, 2)], rank(), "2 ranks, 1 tokens ... 2 ranks, 2 tokens"),
]
REFUSED["reshard", kvplan.reshard, IncompatibleLayoutsError] = [
    ([*FOUR[:2], FOUR[3]], rank(range(8)), "no source holds layer 0 'k', heads 4-5 ... destination 0"),
    (FOUR, rank(range(8), range(2)), "no source holds layer 1 'k', heads 0-7"),
    (HALVES, half("kv", 4, 0, dim=16), "no source holds layer 0 'kv', heads 2-3"),
    ([Shard(rank(), 0, 2)], rank(), "context-parallel rank 1 of 2 ... destination 0"),
    (Shard(LATENT, 1, 4), Shard(LATENT, 1, 2), "context-parallel rank 3 of 4"),
    (typed("bf16"), typed("fp16"), "bf16 in the source ... fp16"),
    (tensors("block dim", 8, 8), tensors("block subblock dim", 2, 4, 8), "1 sub-blocks ... 4"),
    (TWO, LATENT, "layer 0 'kv' ... heads 0-1 ... no head axis"),
    (state(16), state(64), "'state' ... whole blocks ... 16 tokens"),
]
REFUSED["reshard", kvplan.reshard, OverlapError] = [(HELD, OVERLAPPING, "destinations 0 and 1 share bytes")]


def resharded(src_blocks, dst_blocks):
    program = kvplan.reshard([rank(heads=range(k, k + 1)) for k in (0, 1)], rank(range(2)))[1, 0]
    return program.plan(src_blocks, dst_blocks)


REFUSED["PairProgram.plan", resharded] = [
    ([0, 8], [0, 1], BlockIndexError, "src_blocks[1] ... 8 ... 0 to 7"),
    ([0, 1], [-1, 1], BlockIndexError, "dst_blocks[0] ... -1"),
    ([0, 1], [3, 3], OverlapError, "block 3 more than once"),
    ([0, 1], [3], BlockIndexError, "2 src blocks ... 1 dst blocks"),
]

"""Every public integer may be of any kind that has ``__index__``, becomes a Python int, and is no bool."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout, KVPlanError
from kvplan.backends import lmcache, mla, quantized, sglang, tensorrt_llm, vllm
from kvplan.base.integers import integer, integers
from kvplan.base.quoting import quoted
from kvplan.draw.block import block_picture
from kvplan.engines.lmcache.objects import chunks_of
from kvplan.engines.sglang import HostTransfers
from kvplan.engines.vllm.jobs import ids_of
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.execute.transfer import check_layer

KINDS = {
    "int64": np.int64, "uint8": np.uint8, "uint64": np.uint64, "int32": np.int32, "array": np.array,
    "tensor": torch.tensor,
}  # fmt: skip
NOT = {
    "bool": True, "numpy bool": np.True_, "torch bool": torch.ones((), dtype=torch.bool), "float": 1.0, "string": "1",
    "list": [1], "numpy float": np.float32(1), "meta": torch.ones((), dtype=torch.int64, device="meta"),
}  # fmt: skip
SPEC = {"notation": "layer block token head dim", "dtype": "uint8", "address": 4096,
        "sizes": {"layer": 2, "block": 64, "token": 4, "head": 4, "dim": 8}}  # fmt: skip


def paged(**options):
    return KVLayout.from_tensors("block (token head) dim", np.zeros((8, 16, 4), np.uint8),
                                 **{"sizes": {"token": 4, "head": 4}} | options)  # fmt: skip


def spec(**keys):
    return KVLayout.from_spec(SPEC | keys)


def larger():
    """Blocks of 4 tokens into blocks of 1,024: 256 units, one more than np.uint8 counts."""
    small = {"notation": "block token dim", "dtype": "uint8", "sizes": {"block": 300, "token": 4, "dim": 16}}
    large = small | {"sizes": {"block": 2, "token": 1024, "dim": 16}}
    return KVLayout.from_spec(small), KVLayout.from_spec(large)


def loads():
    k, v = ([np.zeros((12, 2, 8), np.float16) for layer in range(3)] for _ in "kv")
    device = SimpleNamespace(size=8, page_size=4, k_buffer=k, v_buffer=v)
    host = SimpleNamespace(layout="page_first", page_size=4, head_num=2, layer_num=3,
                           kv_buffer=np.zeros((2, 20, 3, 2, 8), np.float16))  # fmt: skip
    return device, host


def transfers(n, page=4):
    device, host = loads()
    device.page_size = host.page_size = page
    with kvplan.Executor() as executor:
        made = HostTransfers(device, host, executor)
        assert type(made.page_size) is int
        return made.moves(n), made._number(n), str(made.device)


def chunks(start, end, offset=0, cached=0):
    memory = SimpleNamespace(tensor=torch.zeros(2, 3, 4, 16), get_tensor=None, metadata=SimpleNamespace(phy_size=0))
    made = chunks_of([memory], [start], [end], np.arange(300), offset, cached)
    return [(chunk.skip, chunk.slots.tolist()) for chunk in made[0]]


def raw_place(**given):
    sizes = {"layers": 1, "blocks": 4, "heads": 2, "tokens": 8, "row_nbytes": 16}
    return [view.shape for view in vllm.place(np.zeros(4096, np.int8), **sizes | given)]


# Of each: what takes the integer, and one that is right.
TAKES = {
    "sizes": (lambda n: str(paged(sizes={"token": n})), 4),
    "nested sizes": (lambda n: str(KVLayout.from_tensors("layer: block dim", [np.zeros((4, 8))], sizes={"layer": n})),
                     1),
    "layer_start": (lambda n: paged(layer_start=n).layers, 250),
    "head_start": (lambda n: paged(head_start=n).heads, 250),
    "layers": (lambda n: paged(layers=[n]).layers, 250),
    "slice layers": (lambda n: spec().slice(layers=[n]).layers, 1),
    "slice one layer": (lambda n: spec().slice(layers=n).layers, 1),
    "address layer": (lambda n: spec().address(layer=n, part="kv"), 1),
    "address block": (lambda n: spec().address(layer=0, part="kv", block=n), 60),
    "address token": (lambda n: spec().address(layer=0, part="kv", token=n), 3),
    "address head": (lambda n: spec().address(layer=0, part="kv", head=n), 3),
    "component": (lambda n: str(spec().component(n, "kv")), 1),
    "spec sizes": (lambda n: spec(sizes=SPEC["sizes"] | {"block": n}).regions[0].nbytes, 64),
    "spec layer_start": (lambda n: spec(layer_start=n).layers, 250),
    "spec layers": (lambda n: spec(layers=[250, n]).layers, 255),
    "spec head_start": (lambda n: spec(head_start=n).heads, 250),
    "spec address": (lambda n: spec(address=n).regions[0].end, 128),
    "spec seams": (lambda n: spec(address=0, seams=[n]).seams, 128),
    "spec strides": (lambda n: spec(strides=[8192, n, 32, 8, 1]).regions[0].end, 128),
    "num_blocks": (lambda n: kvplan.allocate("block layer token head dim", like=spec(), num_blocks=n).nbytes, 200),
    "block_tokens": (lambda n: kvplan.allocate("block layer token head dim", like=spec(), num_blocks=2,
                                               block_tokens=n).nbytes, 200),
    "pool layers": (lambda n: kvplan.allocate("layer block token head dim", like=spec(), layers=[0, 1, n],
                                              num_blocks=2).layers, 200),
    "pool sizes": (lambda n: str(kvplan.allocate("block head.0 layer token head.1 dim", like=spec(),
                                                 sizes={"head.0": n})), 2),
    "src_skip": (lambda n: kvplan.compile(*reversed(larger())).plan([0], range(206), n).nbytes, 50),
    "dst_skip": (lambda n: kvplan.compile(*larger()).plan(range(206), [0], 0, n).nbytes, 50),
    "reshard skip": (lambda n: kvplan.reshard(*larger())[0, 0].plan(range(206), [0], 0, n).descriptors().dst.tolist(),
                     50),
    "all pairs skip": (lambda n: kvplan.reshard(*larger()).plan(range(206), [0], 0, n)[0, 0].nbytes, 50),
    "src_first": (lambda n: kvplan.Groups([kvplan.compile(*larger())]).plan([range(100)], [[0]], src_first=[n]).nbytes,
                  156),
    "dst_first": (lambda n: kvplan.Groups([kvplan.compile(*reversed(larger()))]).plan(
        [[0]], [range(56)], src_first=[0], dst_first=[n]).nbytes, 200),
    "max_nbytes": (lambda n: kvplan.compile(spec(), spec(address=1 << 20)).plan([0], [0]).descriptors(n).size.sum(),
                   100),
    "cp_rank": (lambda n: kvplan.Shard(paged(), n, 4).cp_rank, 3),
    "cp_size": (lambda n: kvplan.Shard(paged(), 0, n).span_tokens, 128),
    "interleave": (lambda n: kvplan.Shard(paged(), 0, 100, n).period, 4),
    "locate address": (lambda n: kvplan.locate(spec(address=0), n)[0].address, 250),
    "locate nbytes": (lambda n: kvplan.locate(spec(address=0), 200, n)[0].nbytes, 250),
    "verified blocks": (lambda n: kvplan.verify(paged(), paged(), blocks=n).nbytes, 3),
    "width": (lambda n: kvplan.compile(spec(), spec()).explain(n), 60),
    "picture": (lambda n: block_picture(spec().built, n).heading, 60),
    "layer to wait for": (lambda n: check_layer(kvplan.compile(spec(), spec()).plan([], []), n), 1),
    "policy": (lambda n: kvplan.Policy(threads=n).threads, 100),
    "mla block_tokens": (lambda n: str(mla.describe(np.zeros((256, 8)), block_tokens=n)), 128),
    "mla row_nbytes": (lambda n: str(mla.describe(np.zeros((8, 4, 300), np.uint8), row_nbytes=n)), 200),
    "quantized block_tokens": (
        lambda n: str(quantized.describe(np.zeros((8, 37440), np.uint8), "deepseek_v4", block_tokens=n)), 64),
    "sglang page_size": (lambda n: str(sglang.describe([np.zeros((300, 1, 8))], page_size=n)), 100),
    "sglang layer_start": (
        lambda n: sglang.describe([np.zeros((300, 1, 8))] * 1, page_size=100, layer_start=n).layers, 250),
    "vllm heads": (lambda n: str(vllm.describe([np.zeros((10, 2, 16, 256))], form="head_slots", heads=n)), 4),
    "vllm block_tokens": (lambda n: str(vllm.describe([np.zeros((40, 4, 16, 128))], block_tokens=n)), 64),
    "vllm head_size_v": (lambda n: str(vllm.describe([np.zeros((40, 4, 16, 128))], head_size_v=n)), 100),
    "vllm layer_start": (lambda n: vllm.describe([np.zeros((40, 4, 16, 128))] * 1, layer_start=n).layers, 250),
    "vllm layers": (lambda n: vllm.describe([np.zeros((40, 4, 16, 128))], layers=[n]).layers, 250),
    "placed blocks": (lambda n: raw_place(blocks=n), 4),
    "placed offset": (lambda n: raw_place(offset=n), 200),
    "placed layer_stride": (lambda n: raw_place(layer_stride=n), 100),
    "tokens_per_block": (
        lambda n: str(tensorrt_llm.describe(np.zeros((8, 2, 2, 4096)), tokens_per_block=n, num_kv_heads=4)), 32),
    "lmcache heads": (lambda n: str(lmcache.describe([np.zeros((2, 3, 16, 64))], heads=n)), 4),
    "lmcache layer_start": (lambda n: lmcache.describe([np.zeros((2, 1, 16, 64))], heads=4, layer_start=n).layers,
                            250),
    "sglang layer": (transfers, 2),
    "sglang pool's page": (lambda n: transfers(1, page=n), 4),
    "lmcache start": (lambda n: chunks(n, 254), 250),
    "lmcache end": (lambda n: chunks(4, n), 8),
    "lmcache offset": (lambda n: chunks(254, 258, offset=n), 250),
    "lmcache cached": (lambda n: chunks(250, 254, cached=n), 252),
    "vllm group_sizes": (lambda n: [len(g.blocks) for g in ids_of(
        SimpleNamespace(block_ids=range(100), group_sizes=[n], block_indices=[250]),
        SimpleNamespace(block_ids=range(26)), 1, 4)], 100),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TAKES)
def test_every_kind_of_integer_means_the_same(name, kind):
    take, right = TAKES[name]
    assert repr(take(KINDS[kind](right))) == repr(take(right))


# Where a sequence means something else, it is no wrong integer.
SEQUENCES = {(name, kind) for name in ("slice one layer", "verified blocks") for kind in ("list", "string")}


@pytest.mark.parametrize(("name", "kind"), sorted({(name, kind) for name in TAKES for kind in NOT} - SEQUENCES))
def test_what_is_no_integer_is_a_clear_error(name, kind):
    with pytest.raises(KVPlanError, match=r" is ") as caught:
        TAKES[name][0](NOT[kind])
    assert len(str(caught.value)) < 400


def test_numbers_of_what_moves_do_not_wrap():
    """np.uint8(0) as a skip once made 256 bytes 0, and the executor moved nothing."""
    a, b = np.arange(512, dtype=np.uint8).reshape(8, 64) % 251 + 1, np.zeros((8, 64), np.uint8)
    program = kvplan.compile(*(KVLayout.from_tensors("block dim", t) for t in (a, b)))
    plan = program.plan([0, 1, 2, 3], [4, 5, 6, 7], np.uint8(0), np.int8(0))
    assert (type(plan.nbytes), plan.nbytes, type(plan.units), plan.skips) == (int, 256, int, ((0, 0),))
    assert {type(skip) for skip in plan.skips[0]} == {int}
    with kvplan.Executor() as executor:
        result = executor.submit(plan).result()
    assert (type(result.nbytes), result.nbytes) == (int, 256)
    assert (b[4:] == a[:4]).all()


class Twice:
    """An integer that is another one when it is asked for again."""

    def __init__(self):
        self.asked = 0

    def __index__(self):
        self.asked += 1
        return 3 if self.asked == 1 else 10**9


def test_an_integer_is_asked_for_once():
    assert integer("n", Twice(), least=0, most=5) == 3
    assert kvplan.Shard(paged(), Twice(), 4).cp_rank == 3


def test_what_is_quoted_is_short():
    assert quoted(2**64) == "a number of 65 bits"
    assert quoted(-(10**5000)) == "a number of 16610 bits"
    assert quoted(2**63 - 1) == "9223372036854775807"
    assert len(quoted("x" * 10**6)) == 80
    with pytest.raises(LayoutError) as caught:
        integers("ns", [[0] * 10**5])
    assert len(str(caught.value)) < 120


HUGE = 10**5000  # more digits than Python prints


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda layout, program: program.plan([0], [0], HUGE), BlockIndexError, "src_skip is a number of 16610 bits"),
        (lambda layout, program: program.plan([0], [0], 0, -HUGE), BlockIndexError, "dst_skip is a number of"),
        (lambda layout, program: layout.address(layer=HUGE, part="kv"), LayoutError, "layer is a number of 16610 bits"),
        (lambda layout, program: layout.address(layer=0, part="kv", block=HUGE), BlockIndexError, "block is a number"),
        (lambda layout, program: layout.address(layer=0, part="kv", token=HUGE), LayoutError, "token is a number"),
        (lambda layout, program: layout.address(layer=0, part="kv", head=HUGE), LayoutError, "head is a number"),
        (lambda layout, program: layout.component(0, "kv", HUGE), LayoutError, "head is a number of 16610 bits"),
        (lambda layout, program: layout.slice(layers=[HUGE]), LayoutError, "layers[0] is a number of 16610 bits"),
        (lambda layout, program: layout.slice(heads=range(0, HUGE, 2)), LayoutError, "heads is "),
        (lambda layout, program: kvplan.locate(layout, HUGE), KVPlanError, "address is a number of 16610 bits"),
        (lambda layout, program: kvplan.locate(layout, 0, 1 << 63), KVPlanError, "ends at 0x8000000000000000, past"),
    ],
)
def test_numbers_that_python_does_not_print_are_refused(call, error, says):
    layout = KVLayout.from_tensors("block token head dim", np.zeros((4, 2, 2, 8), np.uint8))
    with pytest.raises(error) as caught:
        call(layout, kvplan.compile(layout, layout))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300

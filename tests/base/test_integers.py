"""Every public integer may be of any kind that has ``__index__``, becomes a Python int, and is no bool."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout, KVPlanError
from kvplan.backends import mla, sglang, vllm
from kvplan.engines.lmcache.objects import chunks_of
from kvplan.engines.vllm.jobs import ids_of
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


def chunks(start, end, offset=0, cached=0):
    memory = SimpleNamespace(tensor=torch.zeros(2, 3, 4, 16), get_tensor=None, metadata=SimpleNamespace(phy_size=0))
    made = chunks_of([memory], [start], [end], np.arange(300), offset, cached)
    return [(chunk.skip, chunk.slots.tolist()) for chunk in made[0]]


# Of each: what takes the integer, and one that is right.
TAKES = {
    "sizes": (lambda n: str(paged(sizes={"token": n})), 4),
    "layer_start": (lambda n: paged(layer_start=n).layers, 250),
    "layers": (lambda n: paged(layers=[n]).layers, 250),
    "slice layers": (lambda n: spec().slice(layers=[n]).layers, 1),
    "slice one layer": (lambda n: spec().slice(layers=n).layers, 1),
    "address block": (lambda n: spec().address(layer=0, part="kv", block=n), 60),
    "address head": (lambda n: spec().address(layer=0, part="kv", head=n), 3),
    "spec sizes": (lambda n: spec(sizes=SPEC["sizes"] | {"block": n}).regions[0].nbytes, 64),
    "spec address": (lambda n: spec(address=n).regions[0].end, 128),
    "spec strides": (lambda n: spec(strides=[8192, n, 32, 8, 1]).regions[0].end, 128),
    "num_blocks": (lambda n: kvplan.allocate("block layer token head dim", like=spec(), num_blocks=n).nbytes, 200),
    "block_tokens": (lambda n: kvplan.allocate("block layer token head dim", like=spec(), num_blocks=2,
                                               block_tokens=n).nbytes, 200),
    "pool layers": (lambda n: kvplan.allocate("layer block token head dim", like=spec(), layers=[0, 1, n],
                                              num_blocks=2).layers, 200),
    "src_skip": (lambda n: kvplan.compile(*reversed(larger())).plan([0], range(206), n).nbytes, 50),
    "dst_skip": (lambda n: kvplan.compile(*larger()).plan(range(206), [0], 0, n).nbytes, 50),
    "reshard skip": (lambda n: kvplan.reshard(*larger())[0, 0].plan(range(206), [0], 0, n).descriptors().dst.tolist(),
                     50),
    "src_first": (lambda n: kvplan.Groups([kvplan.compile(*larger())]).plan([range(100)], [[0]], src_first=[n]).nbytes,
                  156),
    "max_nbytes": (lambda n: kvplan.compile(spec(), spec(address=1 << 20)).plan([0], [0]).descriptors(n).size.sum(),
                   100),
    "cp_rank": (lambda n: kvplan.Shard(paged(), n, 4).cp_rank, 3),
    "interleave": (lambda n: kvplan.Shard(paged(), 0, 100, n).period, 4),
    "locate nbytes": (lambda n: kvplan.locate(spec(address=0), 200, n)[0].nbytes, 250),
    "verified blocks": (lambda n: kvplan.verify(paged(), paged(), blocks=n).nbytes, 3),
    "layer to wait for": (lambda n: check_layer(kvplan.compile(spec(), spec()).plan([], []), n), 1),
    "policy": (lambda n: kvplan.Policy(threads=n).threads, 100),
    "mla block_tokens": (lambda n: str(mla.describe(np.zeros((256, 8)), block_tokens=n)), 128),
    "sglang page_size": (lambda n: str(sglang.describe([np.zeros((300, 1, 8))], page_size=n)), 100),
    "vllm heads": (lambda n: str(vllm.describe([np.zeros((10, 2, 16, 256))], form="head_slots", heads=n)), 4),
    "lmcache start": (lambda n: chunks(n, 254), 250),
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

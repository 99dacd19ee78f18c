"""Refusals of policies, executors, transfers by layer, and verification, as far as they need no GPU."""

from __future__ import annotations

import asyncio

import kvplan
from kvplan import BlockIndexError, KVLayout, KVPlanError, LayoutError, OverlapError, PathError, Policy, TransferError
from tests.contract.refusals.table import REFUSED, paged, spec, tensors, zeros
from tests.simulated.objects import Tensor
from tests.unknown import padded_split_kv

REFUSED["Policy", lambda name, value: Policy(**{name: value}), PathError] = [
    ("path", "gpu", "path 'gpu' ... 'auto', 'host', 'copy_engine'"),
    ("path", "Kernel", "path 'Kernel' ... 'kernel'"),
    ("overlap", "Decode", "overlap 'Decode' ... 'idle', 'decode', 'prefill'"),
    ("threads", 0, "threads ... 0 ... at least one"),
    ("max_programs", -1, "max_programs ... -1 ... at least one"),
    ("tile_bytes", 1024, "no tile_bytes ... max_programs"),
    ("staging_bytes", 1023, "staging_bytes ... 1023 ... 1,024"),
    ("chunk_bytes", 4096, "no chunk_bytes ... staging_bytes"),
]
REFUSED["Executor", lambda more: kvplan.Executor(**more), PathError] = [
    ({"policy": "auto"}, "Policy(path='auto')"),
    ({"policy": Policy}, "give a kvplan.Policy"),
    ({"policy": Policy(path="kernel")}, "path 'kernel' ... device 'cpu'"),
    ({"device": "hpu:0"}, "'hpu:0'"),
]


def plan(src=None, dst=None, ids=((0,), (1,))):
    src = src or paged()
    return kvplan.compile(src, dst or paged()).plan(*ids)


def cancelled(executor):
    begun = executor.begin(plan())
    assert begun.cancel()
    return begun


def executed(call):
    """A call of an executor of the CPU."""
    with kvplan.Executor(policy=Policy(threads=1)) as executor:
        try:
            return call(executor)
        finally:
            assert executor.stats().transfers == 0


def frozen():
    memory = zeros(8, 4, 2, 8)
    memory.setflags(write=False)
    return KVLayout.from_tensors("block token head dim", memory)


def dumped():
    """A layout that another process saved."""
    paged().save("a.json")
    return KVLayout.from_spec("a.json")


def on_gpu():
    return KVLayout.from_tensors("block token head dim", Tensor(zeros(8, 4, 2, 8)))


def swapped():
    """A plan of a tensor that has other memory since."""
    import torch

    tensor = torch.zeros(8, 4, 2, 8, dtype=torch.uint8)
    made = plan(KVLayout.from_tensors("block token head dim", tensor))
    tensor.set_(torch.ones(8, 4, 2, 8, dtype=torch.uint8))
    return made


REFUSED["Executor.submit", executed, KVPlanError] = [
    (lambda executor: executor.submit([plan()]), "plan is a list"),
    (lambda executor: executor.submit(plan(), after=3), "after ... int"),
    (lambda executor: executor.submit(plan(), after=asyncio.Event()), "asyncio ... awaited"),
    (lambda executor: executor.submit(plan(), priority="urgent"), "'urgent' ... 'high' or 'normal'"),
    (lambda executor: executor.submit(plan(), priority=None), "None ... 'high' or 'normal'"),
    (lambda executor: executor.prepare(3), "plan is a int"),
    (lambda executor: executor.begin(plan(), groups=0), "groups ... 0"),
]
REFUSED["LayerwiseTransfer", executed, TransferError] = [
    (lambda executor: cancelled(executor).submit(0), "cancelled before it began"),
    (lambda executor: cancelled(executor).synchronize(), "cancelled before it began"),
]
REFUSED["Executor.submit", executed, LayoutError] = [
    (lambda executor: executor.submit(plan(dst=frozen())), "read-only"),
    (lambda executor: executor.submit(plan(tensors("block dim", 4, 8), spec())), "virtual"),
    (lambda executor: executor.submit(plan(dumped())), "the process that saved the dump"),
    (lambda executor: executor.prepare(swapped()), "other memory now"),
]
REFUSED["Executor.submit", executed, PathError] = [
    (lambda executor: executor.submit(plan(on_gpu())), "'store'"),
    (lambda executor: executor.prepare(plan(on_gpu())), "path 'host'"),
]


def closed(call):
    executor = kvplan.Executor()
    begun = executor.begin(plan())
    executor.close()
    return call(executor, begun)


REFUSED["a closed executor", closed, TransferError] = [
    (lambda executor, _: executor.submit(plan()), "the executor is closed"),
    (lambda executor, _: executor.submit(plan(), priority="high"), "the executor is closed"),
    (lambda executor, _: executor.prepare(plan()), "the executor is closed"),
    (lambda executor, _: executor.begin(plan()), "closed"),
    (lambda _, begun: begun.submit(0), "closed"),
]


def by_layer(call):
    """A store of layers 5 to 7 that has begun; layer 6 was submitted."""
    gpu = KVLayout.from_tensors("layer: block token dim", [zeros(8, 4, 16) for _ in range(3)], layer_start=5)
    host = tensors("block layer token dim", 8, 3, 4, 16, layer_start=5)
    with kvplan.Executor(policy=Policy(threads=1)) as executor:
        store = executor.begin(kvplan.compile(gpu, host).plan([0], [3]))
        store.submit(6)
        try:
            return call(store)
        finally:
            if not store.cancel():
                for layer in store.missing:
                    store.submit(layer)


REFUSED["LayerwiseTransfer", by_layer] = [
    (lambda store: store.submit(6), KVPlanError, "layer 6 ... submitted before"),
    (lambda store: store.submit(4), LayoutError, "layer 4 is not moved"),
    (lambda store: store.wait_layer(8), LayoutError, "layer 8 is not moved"),
    (lambda store: store.submit(5, after=7), KVPlanError, "after ... int"),
    (lambda store: store.synchronize(), TransferError, "layers 5 7 ... not submitted ... submit(layer)"),
    (lambda store: store.result(), TransferError, "layers 5 7 ... not submitted"),
    (lambda store: store.wait(), TransferError, "layers 5 7 ... not submitted"),
    (lambda store: store.wait_layer(5), TransferError, "layers 5 7 ... not submitted"),
]


class Gone:
    """What is waited for, and is no more."""

    def wait(self):
        raise RuntimeError("the stream is gone")


def failed(call):
    with kvplan.Executor(policy=Policy(threads=1)) as executor:
        transfer = executor.submit(plan(), after=Gone())
        return call(executor, transfer)


REFUSED["Transfer", failed, TransferError] = [
    (lambda _, transfer: transfer.synchronize(), "the stream is gone"),
    (lambda _, transfer: transfer.result(), "the stream is gone"),
    (lambda executor, transfer: executor.submit(plan(), after=transfer).result(), "the stream is gone"),
]

SRC = tensors("layer kv block token head dim", 2, 2, 6, 4, 2, 8)
DST = tensors("block layer kv head token dim", 3, 2, 2, 2, 8, 8)
REFUSED["verify", lambda more: kvplan.verify(SRC, DST, **more)] = [
    ({"blocks": 0}, BlockIndexError, "blocks ... 0 ... at least 1"),
    ({"blocks": ([0, 0], [0])}, BlockIndexError, "src_blocks ... more than once"),
    ({"blocks": ([9], [0])}, BlockIndexError, "src_blocks[0] ... 9"),
    ({"blocks": ([0, 1, 2, 3], [1, 1])}, OverlapError, "more than once"),
    ({"blocks": ([0, 1, 2], [1])}, BlockIndexError, "cover"),
]
READ_ONLY = "read-only array; verification writes to it"
LARGE = tensors("block dim", 4, 40 << 20)
REFUSED["verify", lambda *given, **more: kvplan.verify(*given, **more)] = [
    (frozen(), paged(), LayoutError, READ_ONLY),
    (paged(), frozen(), LayoutError, "read-only"),
    (spec(), spec(), LayoutError, "virtual"),
    (padded_split_kv(), padded_split_kv(), KVPlanError, "takes an executor of that GPU"),
    (paged(), paged(dim=16), kvplan.IncompatibleLayoutsError, "8 ... 16"),
    (kvplan.compile(SRC, DST), DST, LayoutError, "src is a CopyProgram; give the layout to read"),
    (kvplan.reshard(SRC, DST), DST, LayoutError, "src is a Resharding; give the layout to read"),
    ([1, 2], DST, LayoutError, "src is a list ... verify takes two layouts"),
    (SRC, None, LayoutError, "dst is a NoneType; give the layout to write"),
]
REFUSED["verify", LayoutError] = [
    (lambda: kvplan.verify(dumped(), paged()), "the process that saved the dump"),
    (lambda: kvplan.verify(LARGE, LARGE, blocks=([0, 1], [2, 3])), "a verification moves at most 67,108,864"),
]

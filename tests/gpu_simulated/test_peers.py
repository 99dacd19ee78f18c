"""Transfers between two simulated GPUs: reach, order, waits on either side, and several sources in one launch."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

import kvplan
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move
from tests.simulated import Device, Event, Stream, Tensor
from tests.simulated.executors import MOVE, PATHS, POOL, SMALL, OnDevice, executor_on, is_apart, pair_on

PEER_PATHS = [path for path in PATHS if path != "staged"]
pushes_and_pulls = pytest.mark.parametrize("route", ["push", "pull"])
every_peer_path = pytest.mark.parametrize("path", PEER_PATHS)


@pushes_and_pulls
@every_peer_path
def test_either_gpu_moves_a_plan_between_both(route, path):
    """A push of one GPU is a pull of the other; each reaches the other's memory, and asks for it once."""
    first = Device(3)
    second = Device(4, ordinal=1, beside=first)
    pair = pair_on(first, route)
    second.owned = first.owned
    for device, other in ((first, 1), (second, 0)):
        with executor_on(device, path) as executor:
            for k in range(3):
                assert executor.submit(pair.plan(Move([k, 5 + k], [8 - k, k]))).result().path == path
        assert device.enabled == [other]
        pair.check()


@pushes_and_pulls
def test_memory_out_of_reach_is_refused_by_kernels_and_left_to_the_copy_engine(route):
    device = Device()
    device.unreachable[1] = "cuda:0 cannot reach the memory of cuda:1: they have no link"
    pair = pair_on(device, route)
    refused = pytest.raises(kvplan.PathError, match="path 'kernel' cannot serve this plan: cuda:0 cannot reach")
    with executor_on(device, "kernel") as executor, refused:
        executor.submit(pair.program.plan([1], [2]))
    with executor_on(device) as executor:
        assert executor.submit(pair.plan(MOVE)).result().path == "copy_engine"
        found = {one.path: one.refused for one in executor.candidates(pair.program.plan([1], [2]))}
        assert "no link" in found["kernel"]
        pair.check()


def test_memory_that_is_not_mapped_for_this_gpu_is_refused_before_a_launch():
    """Memory of cuMemMap names the GPUs that reach it; a kernel that reads it without access loses the context."""
    device = Device()
    device.unmapped.add(1)
    pair = pair_on(device, "pull")
    with executor_on(device, "kernel") as executor:
        with pytest.raises(kvplan.PathError, match=r"is not mapped for cuda:0; .*cuMemSetAccess"):
            executor.submit(pair.program.plan([1], [2]))
        assert "cuLaunchKernelEx" not in device.calls


@pytest.mark.parametrize("why", ["unreachable", "unmapped"])
def test_memory_that_comes_into_reach_is_reached_by_the_next_plan(why):
    """An owner gives access to its memory later; or the peer's context found too little memory at the first plan."""
    device = Device()
    pair = pair_on(device, "pull")
    with executor_on(device) as executor:
        if why == "unmapped":
            device.unmapped.add(1)
        else:
            device.unreachable[1] = "cuCtxEnablePeerAccess returned CUDA_ERROR_OUT_OF_MEMORY"
        for k in range(2):  # also with the decision of the plan before
            assert executor.submit(pair.plan(Move([k], [k + 1]))).result().path == "copy_engine"
        device.unmapped.clear()
        device.unreachable.clear()
        for k in range(2, 4):
            assert executor.submit(pair.plan(Move([k], [k + 1]))).result().path == "kernel"
        pair.check()


@pytest.mark.parametrize("path", ["auto", "kernel", "copy_engine"])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
def test_a_plan_within_host_memory_names_the_executor_that_serves_it(path, pin):
    device = Device()
    roots = [POOL.poisoned(), POOL.poisoned()]
    for root in (*roots[0], *roots[1]) if pin else ():
        device.pin(root)
    plan = kvplan.compile(*(POOL.describe(held) for held in roots)).plan([1], [2])
    with executor_on(device, path) as executor:
        with pytest.raises(kvplan.PathError, match="between CPU memories, the executor of device 'cpu' copies"):
            executor.submit(plan)
        assert {one.refused for one in executor.candidates(plan)} == {
            "no path serves this 'host' plan: "
            + "; ".join(f"{name}: between CPU memories, the executor of device 'cpu' copies" for name in PATHS)
        }


def test_memory_that_is_mapped_to_be_read_is_pulled_and_not_pushed_into():
    device = Device()
    device.readable.add(1)
    pull, push = pair_on(device, "pull"), pair_on(device, "push")
    with executor_on(device, "kernel") as executor:
        executor.submit(pull.plan(MOVE)).synchronize()
        pull.check()
        with pytest.raises(kvplan.PathError, match="to be read only; let the executor of its own GPU pull"):
            executor.submit(push.program.plan([1], [2]))
    with executor_on(device) as executor:
        assert executor.submit(push.plan(MOVE)).result().path == "copy_engine"
        push.check()


def test_a_plan_of_two_other_gpus_names_the_executors_that_serve_it():
    device = Device()
    one, two = (OnDevice(SMALL.notation, dim=96, padded=True, ordinal=k) for k in (1, 2))
    plan = kvplan.compile(one.describe(one.poisoned()), two.describe(two.poisoned())).plan([1], [2])
    for path in (*PEER_PATHS, "auto"):
        refused = pytest.raises(kvplan.PathError, match="of cuda:1, cuda:2; take an executor of cuda:1 or cuda:2")
        with executor_on(device, path) as executor, refused:
            executor.submit(plan)


@pytest.mark.parametrize("name", ["xpu:0", "xpu:1"])
@pytest.mark.parametrize("path", ["auto", "kernel", "copy_engine"])
def test_memory_of_another_maker_s_gpu_is_no_peer_s(name, path):
    device = Device()
    pair = pair_on(device, "device")
    there = pair.dst.poisoned()
    views = [Tensor(pair.dst.view(root), name) for root in there]
    layout = kvplan.KVLayout.from_tensors(pair.dst.notation, views if pair.dst.nested else views[0])
    with executor_on(device, path) as executor:
        plan = kvplan.compile(pair.layouts[0], layout).plan([1], [2])
        with pytest.raises(kvplan.PathError, match=f"{name} is no GPU of CUDA"):
            executor.submit(plan)
        assert all(f"{name} is no GPU of CUDA" in one.refused for one in executor.candidates(plan))
        assert not device.enabled


def test_the_staged_path_serves_no_peers():
    device = Device()
    with executor_on(device, "staged") as executor, pytest.raises(kvplan.PathError, match="staged"):
        executor.submit(pair_on(device, "push").program.plan([1], [2]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("default", [False, True], ids=["stream", "default stream"])
def test_a_stream_of_the_other_gpu_waits_for_the_end(seed, default):
    """The default stream has the handle 0 on every GPU."""
    first = Device(seed, eager=False)
    second = Device(seed, ordinal=1, beside=first, eager=False)
    pair = pair_on(first, "push")
    seen: list[np.ndarray] = []
    with executor_on(first, "kernel") as executor:
        stream = OtherStream(second.stream(), second)
        if default:
            first.default, second.default = first.stream(), stream.cuda_stream
            stream = OtherStream(0, second)
        transfer = executor.submit(pair.plan(MOVE))
        transfer.wait(stream)
        second.put(second.default or stream.cuda_stream, lambda: seen.append(pair.dst_roots[0].copy()))
        first.run()
        assert transfer.done()
    pair.check()
    np.testing.assert_array_equal(seen[0], pair.dst_roots[0])


@pytest.mark.parametrize("route", ["push", "pull", "load"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_by_default_the_current_streams_of_both_gpus_wait(route, by_layer):
    """The decode's GPU is not the executor's if that one pushes: its stream must not read too early."""
    first = Device(3, eager=False)
    second = Device(3, ordinal=1, beside=first, eager=False)
    pair = pair_on(first, route)
    streams = [first.stream(), second.stream()]
    handles = mock.patch("kvplan.execute.gpu.waits.current_stream", side_effect=streams.__getitem__)
    with executor_on(first, "kernel") as executor, handles as asked:
        gate = first.gate(user := first.stream())
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user), by_layer=by_layer)
        transfer.wait_layer(0) if by_layer else transfer.wait()
        seen: list[int] = []
        for k, (device, stream) in enumerate(zip((first, second), streams, strict=True)):
            device.put(stream, lambda k=k: seen.append(k))
        first.run()
        assert seen == ([1] if route == "load" else [])
        gate.set()
        first.run()
        assert sorted(seen) == [0, 1]
        assert [call.args for call in asked.call_args_list] == ([(0,)] if route == "load" else [(0,), (1,)])
        transfer.synchronize()
    pair.check()


@dataclass
class OtherStream(Stream):
    """A stream of the second GPU, as torch has them."""

    device: Device

    device_index = 1

    def record_event(self) -> Event:
        return Event.on(self.device, self.cuda_stream)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("route", ["push", "pull"])
@pytest.mark.parametrize("late", [False, True], ids=["in the submit", "in the issuer's thread"])
def test_a_transfer_waits_for_a_stream_of_the_other_gpu(seed, route, late):
    first = Device(seed, eager=False)
    second = Device(seed, ordinal=1, beside=first, eager=False)
    pair = pair_on(first, route)
    fresh = [root.copy() for root in pair.src_roots]
    stream = OtherStream(second.stream(), second)
    for root in pair.src_roots:
        root[:] = 0

    def write() -> None:
        for root, new in zip(pair.src_roots, fresh, strict=True):
            root[:] = new

    second.put(stream.cuda_stream, write)
    with (
        executor_on(first, "kernel", limits=Limits(lane_calls=-1 if late else 192)) as executor,
    ):
        transfer = executor.submit(pair.plan(MOVE), after=stream)
        transfer.synchronize()
        assert is_apart(executor) == late
    pair.check()


@pytest.mark.parametrize("seed", range(6))
def test_a_transfer_of_one_gpu_waits_for_a_transfer_of_the_other(seed):
    """There and back: the second GPU pulls back what the first has pushed."""
    first = Device(seed, eager=False)
    second = Device(seed, ordinal=1, beside=first, eager=False)
    pair = pair_on(first, "push", SMALL, SMALL)
    second.owned = first.owned
    before = [root.copy() for root in pair.src_roots]
    back = kvplan.compile(pair.layouts[1], pair.layouts[0])
    with executor_on(first, "kernel") as pusher, executor_on(second, "kernel") as puller:
        there = pusher.submit(pair.program.plan(range(9), range(8, -1, -1)))
        puller.submit(back.plan(range(8, -1, -1), range(9)), after=there)
        first.run()
        there.synchronize()
    for root, want in zip(pair.src_roots, before, strict=True):
        np.testing.assert_array_equal(root, want)


def test_several_sources_are_pulled_in_one_launch():
    """Two source ranks, one on each GPU, hold the heads 0 and 1; the destination holds both."""
    device = Device(1)
    ranks = [OnDevice(SMALL.notation, dim=96, padded=True, ordinal=k) for k in (0, 1)]
    whole = OnDevice("layer: kv block head token dim", head=2, dim=96, padded=True)
    held = [[rank.poisoned() for rank in ranks], whole.poisoned()]
    layouts = [rank.describe(roots, head_start=k) for k, (rank, roots) in enumerate(zip(ranks, held[0], strict=True))]
    target = whole.describe(held[1])
    for roots, ordinal in ((held[0][0], 0), (held[0][1], 1), (held[1], 0)):
        for root in roots:
            device.own(root, ordinal)
    plans = kvplan.reshard(layouts, [target]).plan([2, 5, 7], [1, 0, 4])
    with executor_on(device, "kernel") as executor:
        result = executor.submit(kvplan.join(list(plans.values()))).result()
    assert (result.launches, result.nbytes) == (1, 3 * target.block_nbytes)
    read = {part: np.stack([np.asarray(whole.view(root)) for root in held[1]]) for part in ("all",)}["all"]
    for head, (rank, roots) in enumerate(zip(ranks, held[0], strict=True)):
        source = np.stack([np.asarray(rank.view(root)) for root in roots])  # layer, kv, block, token, head, dim
        for src, dst in zip([2, 5, 7], [1, 0, 4], strict=True):
            np.testing.assert_array_equal(read[:, :, dst, head], source[:, :, src, :, 0])


def test_a_push_does_not_wait_for_a_load_before_it():
    device, opened = Device(1, eager=False), threading.Event()
    load, push = pair_on(device, "load", SMALL, POOL), pair_on(device, "push")
    with executor_on(device, "kernel") as executor:
        user = device.stream()
        gate = device.gate(user)
        late = executor.submit(load.plan(MOVE), after=Stream(user))
        executor.submit(push.plan(MOVE)).synchronize()
        push.check()
        assert not late.done()
        gate.set()
        late.synchronize()
    load.check()
    assert not opened.is_set()


@pytest.mark.parametrize("near", [0, 1 << 30], ids=["copied first", "read in place"])
@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_unit_addresses_come_to_the_gpu_before_the_launch(near, route):
    for seed in range(8):
        device = Device(seed, eager=False)
        pair = pair_on(device, route)
        with executor_on(device, "kernel", limits=Limits(near_rows=near)) as executor:
            for k in range(4):
                executor.submit(pair.plan(Move([k, k + 4], [8 - k, k])))
            device.run()
        assert device.calls.count("cuMemcpyAsync") == (5 if near == 0 else 1), "one copy is the run table"
        pair.check()

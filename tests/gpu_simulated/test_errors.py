"""A simulated driver that fails: the transfer says so, nothing leaks, and the executor goes on."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move, Pair
from tests.patience import PATIENCE, until
from tests.simulated import Device, Stream
from tests.simulated.executors import (
    MOVE,
    POOL,
    SMALL,
    OnDevice,
    both_ways,
    every_path,
    executor_on,
    open_executor,
    pair_on,
)

pytestmark = pytest.mark.slow

CALLS = ("cuMemAlloc", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuMemcpyBatchAsync",
         "cuMemcpy2DAsync", "cuLaunchKernelEx", "cuModuleLoadData")  # fmt: skip
TINY = {"chunk_nbytes": 1024, "small_chunk_nbytes": 1}


def goes_on(executor: kvplan.Executor, *pairs: Pair) -> None:
    """After an error, transfers of these pairs move what they should."""
    for pair in pairs:
        for root, want in zip(pair.dst_roots, pair.dst_bytes, strict=True):
            root[:] = want  # whatever the failed one has moved
        for k in range(3):
            executor.submit(pair.plan(Move([k, 8 - k, 4], [8 - k, k, 5])))
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("late", "inlined"), [(False, 0), (False, 1 << 20), (True, 0)])
def test_a_call_that_fails_is_the_error_of_its_transfer_and_of_no_other(path, direction, call, late, inlined):
    failed, enough = 0, set()
    for spare in (0, 1, 2, 3, 5, 9, 14):
        if spare % 2 in enough:
            continue
        device = Device(spare)
        pair = pair_on(device, direction)
        sizes = {**TINY, "batch_nbytes": inlined, **({"inline_effort": 0} if late else {})}
        with executor_on(device, path, streams=2, limits=Limits(**sizes)) as executor:
            if call != "cuModuleLoadData":
                executor.submit(pair.plan(Move([0], [1]))).synchronize()
            if call in ("cuEventCreate", "cuMemAlloc"):  # none is left over
                while executor._backend.resources.events:
                    device.destroy_event(executor._backend.resources.events.pop())
                executor._backend.resources.slots._free.clear()
            device.fail(call, spare=spare, code=719)
            happened = threading.Event()
            after = {"after": happened} if late else {}
            transfer = None
            try:
                transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), by_layer=bool(spare % 2), **after)
                happened.set()
                transfer.synchronize(timeout=PATIENCE)
            except kvplan.TransferError as error:
                assert f"{call} returned CUDA_ERROR_SIMULATED (719)" in str(error)  # noqa: PT017
                failed += 1
                assert late == (transfer is not None)
                if transfer is not None:
                    says_so(transfer, call)
            if device.faults.pop(call):  # a transfer of this kind makes no more such calls
                enough.add(spare % 2)
            goes_on(executor, pair)
    assert failed or call not in used(path, small=direction == "load" and inlined > 0)


@both_ways
@pytest.mark.parametrize("path", ["kernel", "staged"])
@pytest.mark.parametrize("call", CALLS)
def test_a_first_transfer_that_fails_leaves_no_event(path, direction, call):
    for spare in range(12):
        device = Device(spare)
        pair = pair_on(device, direction)
        with executor_on(device, path) as executor:
            device.fail(call, spare=spare, code=719)
            with contextlib.suppress(kvplan.TransferError):
                executor.submit(pair.program.plan(MOVE.src, MOVE.dst)).synchronize()
            failed = not device.faults.pop(call)
            goes_on(executor, pair)
        if not failed:  # it is not called as often
            break


def says_so(transfer: kvplan.Transfer, call: str) -> None:
    assert transfer.done()
    for ask in (transfer.result, transfer.synchronize, lambda: transfer.wait(Stream(1))):
        with pytest.raises(kvplan.TransferError, match=call):
            ask()
    assert repr(transfer).endswith("failed)")


def used(path: str, *, small: bool) -> set[str]:
    """Calls that a warm transfer of a path needs, of copies that may go in batches or of small ones from the host."""
    copying = "cuMemcpyAsync" if small else "cuMemcpyBatchAsync"
    always = {"cuEventRecord", "cuModuleLoadData"} if path in ("kernel", "staged") else {"cuEventRecord"}
    own = {
        "copy_engine": {copying, "cuStreamWaitEvent", "cuEventCreate"},
        "copy_engine_2d": {"cuMemcpy2DAsync", "cuEventCreate"},
        "kernel": {"cuLaunchKernelEx", "cuEventCreate"},
        "toy": {"cuMemcpyAsync", "cuEventCreate"},
        "staged": {"cuLaunchKernelEx", copying, "cuStreamWaitEvent", "cuEventCreate"},
    }
    return always | own[path]


@both_ways
def test_a_batch_that_the_driver_refuses_is_named_by_its_copy(direction):
    device = Device(1)
    pair = pair_on(device, direction)
    plan = pair.program.plan(MOVE.src, MOVE.dst)
    with executor_on(device, "copy_engine", limits=Limits(batch_copies=3, batch_nbytes=0)) as executor:
        device.fail("cuMemcpyBatchAsync", spare=1)
        with pytest.raises(kvplan.TransferError, match=r": descriptor [345] of \d+, \d+ bytes from 0x\w+ to 0x\w+"):
            executor.submit(plan)
        device.faults.clear()
        goes_on(executor, pair)


def test_a_2d_copy_that_the_driver_refuses_is_named_by_its_rows():
    device = Device(1)
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine_2d") as executor:
        device.fail("cuMemcpy2DAsync", code=719)
        with pytest.raises(kvplan.TransferError, match=r"2-D copy 0 of \d+, \d+ rows of \d+ bytes from 0x\w+ to 0x"):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        goes_on(executor, pair)


def test_2d_copies_between_allocations_go_row_by_row():
    device = Device(1)
    pair = pair_on(device, "store")
    with executor_on(device, "copy_engine_2d") as executor:
        device.faults["cuMemcpy2DAsync"] = [1] * 100  # an invalid value: rows of several allocations
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


@every_path
def test_what_failed_on_the_gpu_is_said_by_the_transfer(path):
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, path) as executor:
        user = device.stream()
        gate = device.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
        device.fail("cuEventQuery", code=716)
        until(transfer.done)
        with pytest.raises(kvplan.TransferError, match=r"cuEventQuery returned CUDA_ERROR_SIMULATED \(716\)"):
            transfer.result()
        gate.set()
        device.run()


@every_path
def test_a_lost_context_ends_every_transfer_and_closing_does_not_hang(path):
    device = Device()
    pair = pair_on(device, "load")
    executor = open_executor(device, path)
    user = device.stream()
    device.gate(user)
    transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
    device.lost = True
    with pytest.raises(kvplan.TransferError, match=r"\(700\)"):
        transfer.synchronize()
    with pytest.raises(kvplan.TransferError, match=r"\(700\)"):
        executor.submit(pair.program.plan([1], [2]))
    executor.close()
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor.submit(pair.program.plan([1], [2]))


@every_path
def test_an_after_that_fails_is_the_transfer_s_error_and_the_next_one_runs(path):
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, path) as executor:
        transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=Broken())
        with pytest.raises(kvplan.TransferError, match="failed: it never happened"):
            transfer.synchronize()
        with pytest.raises(kvplan.TransferError, match="it never happened"):
            executor.submit(pair.program.plan([1], [1]), after=transfer)
        goes_on(executor, pair)


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("it never happened")


@every_path
def test_pageable_memory_goes_by_the_copy_engine_only(path):
    device = Device()
    pair = pair_on(device, "load", pin=False)
    with executor_on(device, path) as executor:
        if path.startswith("copy_engine"):
            executor.submit(pair.plan(MOVE)).synchronize()
        else:
            with pytest.raises(kvplan.HostMemoryError, match=r"reaches pinned memory only: host memory at 0x\w+"):
                executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
            for root in pair.src_roots:  # pinned since, as cudaHostRegister does
                device.pin(root)
            executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


def test_half_pinned_memory_is_pageable_and_auto_says_so():
    device = Device()
    pair = pair_on(device, "load", pin=False)
    for root in pair.src_roots:
        device.pin(root, 0, root.nbytes // 2)
    with executor_on(device) as executor:
        assert executor.submit(pair.plan(MOVE)).result().path == "copy_engine"
        pair.check()


@every_path
def test_plans_that_no_path_or_another_device_serves(path):
    device = Device()
    here, other = pair_on(device, "device"), OnDevice(SMALL.notation, dim=96, padded=True, ordinal=1)
    roots = other.poisoned()
    there = other.describe(roots)
    host = [POOL.describe(POOL.poisoned()) for _ in range(2)]
    with executor_on(device, path) as executor:
        with pytest.raises(kvplan.PathError, match="between CPU memories, the executor of device 'cpu' copies"):
            executor.submit(kvplan.compile(*host).plan([1], [2]))
        with pytest.raises(kvplan.PathError, match="moves memory of cuda:0, and this plan is of cuda:1"):
            executor.submit(kvplan.compile(there, there).plan([1], [2]))
        across = kvplan.compile(here.layouts[0], there).plan([1], [2])
        if path != "staged":
            executor.submit(across).synchronize()
            return
        for plan in (across, here.program.plan([1], [2])):
            with pytest.raises(kvplan.PathError, match="within a GPU and between GPUs, path 'kernel' copies directly"):
                executor.submit(plan)


@pytest.mark.parametrize("pinned", [False, True])
def test_auto_names_all_paths_of_a_plan_that_none_serves(pinned):
    device, host = Device(), [POOL.poisoned() for _ in range(2)]
    for roots in host if pinned else ():
        for root in roots:
            device.pin(root)
    plan = kvplan.compile(*(POOL.describe(roots) for roots in host)).plan([1], [2])
    with executor_on(device) as executor:
        for attempt in (executor.submit, executor.prepare):
            with pytest.raises(kvplan.PathError, match="no path serves this 'host' plan: copy_engine: between CPU"):
                attempt(plan)
        found = executor.candidates(plan)
        assert all("executor of device 'cpu'" in one.refused for one in found)


@every_path
def test_layouts_that_cannot_be_moved(path):
    device = Device()
    pair = pair_on(device, "store")
    sizes = {"layer": 2, "block": 9, "token": 2, "head": 1, "dim": 96}
    virtual = KVLayout.from_spec({"notation": SMALL.notation, "sizes": sizes, "dtype": "uint8", "device": "cuda:0"})
    view = POOL.view(np.array(pair.dst_roots[0]))
    view.flags.writeable = False
    fixed = KVLayout.from_tensors(POOL.notation, view)
    with executor_on(device, path) as executor:
        with pytest.raises(kvplan.LayoutError, match="virtual"):
            executor.submit(kvplan.compile(virtual, pair.layouts[1]).plan([1], [2]))
        with pytest.raises(kvplan.LayoutError, match="read-only"):
            executor.submit(kvplan.compile(pair.layouts[0], fixed).plan([1], [2]))
        with pytest.raises(kvplan.KVPlanError, match="plan is a int"):
            executor.submit(3)
        with pytest.raises(kvplan.KVPlanError, match="after is a"):
            executor.submit(pair.program.plan([1], [2]), after=3)
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()

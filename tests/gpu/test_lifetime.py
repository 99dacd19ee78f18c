"""What is in flight keeps itself alive; what is done lets go."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import kvplan
from tests.gpu.flights import MOVE, small_pair, warm
from tests.gpu.gate import Gate
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, assert_same_bytes, pair_of, put

pytestmark = pytest.mark.gpu

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged")
every_path = pytest.mark.parametrize("path", PATHS)
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
MIB = 1 << 20


def own_executor(path: str) -> kvplan.Executor:
    return kvplan.Executor(device="cuda:0", policy=kvplan.Policy(path=path))


def all_gone(references: list[weakref.ref], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while any(reference() is not None for reference in references):
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


@every_path
@both_ways
def test_a_source_dropped_in_flight_lives_until_it_is_read(path, direction, executor_of):
    executor, pair, stream = executor_of(path=path), small_pair(direction), torch.cuda.Stream()
    warm(executor, pair)
    place, numbers = pair.places[0], [root.numel() for root in pair.src_roots]
    poison = [put(root, place) for root in pair.src.poisoned()]  # what fills memory that was let go too early

    def empty() -> list[torch.Tensor]:
        return [torch.empty(n, dtype=torch.uint8, device=old.device, pin_memory=place == "pinned")
                for n, old in zip(numbers, poison, strict=True)]  # fmt: skip

    caches = empty(), empty()  # torch keeps this memory: while the gate is shut, the driver's allocation would block
    del caches
    with Gate(stream) as gate:
        transfer = executor.submit(pair.plan(MOVE), after=stream)
        held = pair.layouts[0].tensors
        references = [weakref.ref(tensor) for tensor in (held if isinstance(held, list) else [held])]
        dst_roots, expected = pair.dst_roots, pair.dst_bytes
        del pair, transfer, held
        gc.collect()
        assert all(reference() is not None for reference in references)
        # On the stream that the source was allocated on: another's allocations would not reuse its memory.
        for _ in range(3):
            again = empty()
            for new, old in zip(again, poison, strict=True):
                new.copy_(old)
        torch.cuda.current_stream().synchronize()
        gate.open()
        assert all_gone(references)
    other = small_pair(direction)
    executor.submit(other.plan(MOVE)).synchronize()  # the lane is in order: the first has landed
    assert_same_bytes(dst_roots, expected)


@every_path
@both_ways
def test_what_is_done_is_let_go(path, direction, executor_of):
    executor, pair = executor_of(path=path), small_pair(direction)
    transfer = executor.submit(pair.plan(MOVE))
    transfer.synchronize()
    pair.check()
    tensors = [layout.tensors for layout in pair.layouts]
    references = [weakref.ref(tensor) for held in tensors for tensor in (held if isinstance(held, list) else [held])]
    del pair, transfer, tensors
    assert all_gone(references)


@every_path
@both_ways
def test_an_executor_dropped_without_close_finishes(path, direction):
    executor, pair, stream = own_executor(path), small_pair(direction), torch.cuda.Stream()
    warm(executor, pair)
    with Gate(stream) as gate:
        transfer = executor.submit(pair.plan(MOVE), after=stream)
        last = [executor]
        del executor
        dropped = threading.Thread(target=last.clear, daemon=True)
        dropped.start()
        dropped.join(10)
        assert not dropped.is_alive()  # dropping blocks nobody
        gc.collect()
        assert not transfer.done()
        gate.open()
        transfer.synchronize()
    pair.check()


@every_path
@both_ways
def test_close_drains_and_may_be_called_twice(path, direction):
    executor, pair, stream = own_executor(path), small_pair(direction), torch.cuda.Stream()
    warm(executor, pair)
    with Gate(stream) as gate:
        flying = [executor.submit(pair.plan(Move([k], [31 - k])), after=stream) for k in range(32)]
        assert not flying[0].done()
        threading.Timer(0.1, gate.open).start()
        executor.close()
        assert all(transfer.done() for transfer in flying)
        pair.check()
    executor.close()
    assert [transfer.result().nbytes for transfer in flying] == [flying[0].plan.nbytes] * 32


@every_path
def test_after_close_nothing_is_taken(path):
    pair = small_pair("store")
    with own_executor(path) as executor:
        executor.submit(pair.plan(MOVE)).synchronize()
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor.submit(pair.program.plan([1], [2]))
    pair.check()


@every_path
@both_ways
def test_a_result_says_what_was_done(path, direction, executor_of):
    pair = small_pair(direction)
    plan = pair.plan(MOVE)
    transfer = executor_of(path=path).submit(plan)
    result = transfer.result()
    assert transfer.done()
    assert (result.nbytes, result.path) == (plan.nbytes, path)
    assert result.descriptors > 0
    assert result.launches > 0
    assert result.seconds >= 0
    assert transfer.result() == result
    pair.check()


@every_path
def test_a_timeout_says_so_and_the_transfer_goes_on(path, executor_of):
    executor, pair, stream = executor_of(path=path), small_pair("store"), torch.cuda.Stream()
    warm(executor, pair)
    with Gate(stream) as gate:
        transfer = executor.submit(pair.plan(MOVE), after=stream)
        with pytest.raises(kvplan.TransferError, match=r"0\.01 seconds"):
            transfer.synchronize(timeout=0.01)
        gate.open()
        transfer.synchronize()
    pair.check()


@every_path
def test_twenty_thousand_submits_leave_memory_as_it_was(path):
    tiny = Paged(DEVICE_NOTATION, dim=256)
    pool = Paged(HOST_NOTATIONS["page-first"], dim=256)
    pairs = [pair_of("store", tiny, pool), pair_of("load", tiny, pool)]
    plans = [pair.plan(Move([k], [8 - k])) for k in range(9) for pair in pairs]

    def submit(executor: kvplan.Executor, times: int) -> None:
        for k in range(times):
            transfer = executor.submit(plans[k % len(plans)])
            if k % 500 == 499:
                transfer.synchronize()

    with own_executor(path) as executor:
        submit(executor, 2000)
        before = resident(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        submit(executor, 20_000)
        after = resident(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    grown = [there - then for there, then in zip(after, before, strict=True)]
    assert max(grown) < 64 * MIB, grown
    for pair in pairs:
        pair.check()


def resident() -> int:
    """Bytes of this process in memory, those pinned included."""
    gc.collect()
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found.group(1)) * 1024

"""What an executor of a simulated GPU holds, and that it lets go of it; closing, dropping, forking."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan.execute.gpu import reaper
from kvplan.execute.gpu.lanes.issuing import REAP_EVERY
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.merges import possible_merges
from kvplan.program.passes import compile_geometry
from tests.paged_caches import DEVICE_NOTATION, Move, Paged
from tests.patience import PATIENCE, once, takes_no_more, until
from tests.simulated import Device, Stream
from tests.simulated.executors import (
    LARGE_BLOCKS,
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
from tests.simulated.lifetime import tensors_of, wait_until_gone

pytestmark = pytest.mark.slow


@every_path
@both_ways
def test_what_is_in_flight_lives_and_what_is_done_is_let_go(path, direction):
    device = Device()
    with executor_on(device, path) as executor:
        user = device.stream()
        gate = device.gate(user)
        pair = pair_on(device, direction)
        plan = pair.plan(MOVE)
        references = [weakref.ref(each) for each in tensors_of(pair)]
        expected, roots = pair.dst_bytes, pair.dst_roots
        transfer = executor.submit(plan, after=Stream(user))
        del plan, pair
        waiting = weakref.ref(transfer)
        del transfer
        gc.collect()
        assert all(reference() is not None for reference in references)
        gate.set()
        wait_until_gone([*references, waiting], device)
        for root, want in zip(roots, expected, strict=True):
            np.testing.assert_array_equal(root, want)


@every_path
def test_two_thousand_submits_take_no_more_memory_than_the_first_hundred(path):
    device = Device()
    pairs = [pair_on(device, direction) for direction in ("load", "store")]
    with executor_on(device, path) as executor:

        def submit(times: int) -> None:
            for k in range(times // 2):
                flying = [executor.submit(pair.program.plan([k % 9], [(k + 1) % 9])) for pair in pairs]
                if k % 10 == 9:
                    for transfer in flying:
                        transfer.synchronize()
                    executor._backend.reap()

        # The most that is ever in flight at once, so that no later moment needs more than this one.
        user = device.stream()
        gate = device.gate(user)
        held = [executor.submit(pair.program.plan([k % 9], [(k + 1) % 9]), after=Stream(user))
                for k in range(10) for pair in pairs]  # fmt: skip
        gate.set()
        for transfer in held:
            transfer.synchronize()
        submit(100)
        before = device.nbytes, len(device.streams)
        events = len(device.recorded)
        submit(2000)
        assert (device.nbytes, len(device.streams)) == before
        assert len(device.recorded) <= events + 60


@every_path
def test_the_loans_of_a_caller_that_never_asks_are_bounded(path, monkeypatch):
    """Submits take them back, where nobody waits for a transfer and the executor's thread does not look."""
    monkeypatch.setattr(reaper, "LOOK_SECONDS", PATIENCE)
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, path) as executor:
        lane, most, held = executor._backend.lanes["load"], 0, []
        for k in range(10 * REAP_EVERY):
            executor.submit(pair.program.plan([k % 9], [(k + 1) % 9]))
            device.run()
            most = max(most, len(lane.flying))
            held.append(device.nbytes)
        assert 1 < most <= REAP_EVERY
        assert held[-1] == held[2 * REAP_EVERY]


@both_ways
def test_a_ring_grows_with_what_goes_through_it_and_the_old_one_is_used_again(direction):
    device = Device(7, eager=False)
    with executor_on(
        device, "staged", limits=Limits(chunk_nbytes=256, small_chunk_nbytes=1, inline_effort=10_000)
    ) as executor:
        large = OnDevice(DEVICE_NOTATION, dim=4096)
        pairs = [pair_on(device, direction), pair_on(device, direction, large, Paged(POOL.notation, dim=4096))]
        for pair in (*pairs, *pairs):
            executor.submit(pair.plan(MOVE))
        device.run()
        for pair in pairs:
            pair.check()
        rings = executor._backend.paths["staged"]._rings
        assert [ring.slot_nbytes % 256 for ring in rings.values()] == [0]


@every_path
@both_ways
def test_close_drains_and_may_be_called_twice(path, direction):
    device = Device()
    pair = pair_on(device, direction)
    with executor_on(device, path) as executor:
        user = device.stream()
        gate, happened = device.gate(user), threading.Event()
        flying = [executor.submit(pair.plan(Move([k], [8 - k])), after=Stream(user)) for k in range(4)]
        flying += [executor.submit(pair.plan(Move([k], [8 - k])), after=happened) for k in range(4, 8)]
        opening = once(lambda: takes_no_more(executor), lambda: (happened.set(), gate.set()))
        executor.close()
        assert all(transfer.done() for transfer in flying)
        pair.check()
        executor.close()
        with pytest.raises(kvplan.TransferError, match="closed"):
            executor.submit(pair.program.plan([1], [2]))
        opening.join()
    assert [transfer.result().nbytes for transfer in flying] == [flying[0].plan.nbytes] * 8


@every_path
def test_an_executor_dropped_without_close_finishes_and_gives_back(path):
    device = Device()
    pair = pair_on(device, "load")
    executor = open_executor(device, path)
    user = device.stream()
    gate = device.gate(user)
    transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
    keeper = executor._backend.reaper
    last = [executor]
    del executor
    dropped = threading.Thread(target=last.clear)
    dropped.start()
    dropped.join(PATIENCE)
    assert not dropped.is_alive()  # dropping blocks nobody
    gc.collect()
    assert not transfer.done()
    gate.set()
    transfer.synchronize()
    pair.check()
    assert keeper.thread.join(PATIENCE)
    assert not device.memory


@pytest.mark.parametrize("awake", [False, True])
def test_an_executor_whose_finalizer_was_interrupted_is_noticed(awake, monkeypatch):
    """Its thread hears of the deletion, also while it looks for transfers that have ended."""
    monkeypatch.setattr(reaper, "IDLE_LOOKS", 10**9 if awake else 1)
    monkeypatch.setattr(reaper, "LOOK_SECONDS", PATIENCE if awake else 1e-3)
    device = Device()
    executor = open_executor(device, "kernel")
    keeper = executor._backend.reaper
    (finalizer,) = [one for one in weakref.finalize._registry if one.peek() and one.peek()[0] is executor]
    finalizer.detach()
    executor.submit(pair_on(device, "load").plan(MOVE)).synchronize()
    until(lambda: keeper.alarm.calls.empty() and keeper.alarm.asleep is not awake)
    del executor, finalizer
    gc.collect()
    assert keeper.thread.join(PATIENCE)
    assert not device.memory


def test_tables_are_shared_by_plans_of_a_program_and_given_back_with_it():
    device = Device()
    with executor_on(device, "kernel") as executor:
        tables = executor._backend.resources.tables
        pair = pair_on(device, "load")
        for k in range(3):
            executor.submit(pair.plan(Move([k], [k]))).synchronize()
        held = executor._backend.resources.memory
        assert len(tables._known) == len(pair.program.program.groups)
        before = device.calls.count("cuMemcpyAsync")
        executor.submit(pair.plan(Move([4], [4]))).synchronize()
        assert device.calls.count("cuMemcpyAsync") == before
        group = weakref.ref(pair.program.program.groups[0])
        free = sum(map(len, held._free.values()))
        del pair
        possible_merges.cache_clear()
        compile_geometry.cache_clear()
        wait_until_gone([group], device)
        assert sum(map(len, held._free.values())) > free


def test_a_block_larger_than_the_ring_is_refused_and_named():
    device = Device()
    pair = pair_on(device, "store", OnDevice(DEVICE_NOTATION, dim=4096), Paged(LARGE_BLOCKS.notation, dim=4096))
    with executor_on(device, "staged", staging_bytes=4096) as executor:
        with pytest.raises(kvplan.PathError, match=r"staging_bytes is 4096; a block here takes \d+ bytes of the ring"):
            executor.submit(pair.program.plan([1], [2]))
        small = pair_on(device, "store", SMALL, POOL)
        executor.submit(small.plan(MOVE)).synchronize()
        small.check()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_an_executor_does_not_survive_a_fork():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        ask, answer = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if not child:
            try:
                executor.submit(pair.program.plan([1], [2]))
            except kvplan.TransferError as error:
                answer.send(str(error))
            executor.close()
            os._exit(0)
        assert ask.poll(PATIENCE)
        assert "do not survive a fork" in ask.recv()
        assert os.waitpid(child, 0)[1] == 0
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_transfers_of_a_parent_are_refused_in_its_child_whatever_lock_was_held():
    device = Device(2, eager=False)
    pair, user = pair_on(device, "load"), Stream(device.stream())
    with executor_on(device, "kernel") as executor:
        flying = executor.submit(pair.plan(MOVE))
        waiting = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=threading.Event())
        ask, answer = multiprocessing.Pipe(duplex=False)
        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            with executor._backend.resources.lock:
                held.set()
                free.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if not child:
            for transfer in (flying, waiting):
                for call in ("done", "synchronize", "cancel", "result", "wait"):
                    try:
                        answer.send(str(getattr(transfer, call)(*([user] if call == "wait" else []))))
                    except kvplan.TransferError as error:
                        answer.send(str(error))
            os._exit(0)
        free.set()
        holder.join()
        for _ in range(10):
            assert ask.poll(PATIENCE), "it hangs"
            assert "do not survive a fork" in ask.recv()
        assert os.waitpid(child, 0)[1] == 0
        assert waiting.cancel()
        device.run()
        assert flying.result().nbytes == flying.plan.nbytes
        pair.check()


EXIT = """
import atexit, sys

def check():
    print("at exit", all(bool((got == want).all()) for got, want in zip(pair.dst_roots, pair.dst_bytes)))

atexit.register(check)  # the first is called last
from kvplan.execute.gpu.resources import Limits
from tests.patience import PATIENCE
from tests.simulated import Device, Stream
from tests.simulated.executors import MOVE, open_executor, pair_on
opened = sys.argv[1] == "opened"
device = Device()
pair = pair_on(device, "load")
executor = open_executor(device, "kernel", limits=Limits(exit_seconds=PATIENCE if opened else 0.2))
user = device.stream()
gate = device.gate(user)
executor.submit(pair.plan(MOVE), after=Stream(user))
if opened:
    atexit.register(gate.set)  # the exit has begun by then, and waits for nothing yet
"""


@pytest.mark.parametrize(("gate", "said"), [("opened", ""), ("closed", "1 transfers of a GPU were given up")])
def test_an_exit_waits_for_what_is_in_flight_but_not_for_ever(gate, said):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, gate], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"at exit {gate == 'opened'}\n"), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) == bool(said), done.stderr

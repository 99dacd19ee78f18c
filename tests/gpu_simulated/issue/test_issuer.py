"""Long lists of calls, which another thread plays: order, errors, waits and the end, on a simulated GPU."""

from __future__ import annotations

import os
import threading

import pytest

import kvplan
from kvplan.cuda.call_list import RECORD
from kvplan.execute.gpu.resources import Limits
from tests.interrupts import Interrupt
from tests.paged_caches import Move
from tests.patience import PATIENCE, until
from tests.profiles import points
from tests.simulated import Device, Event, Stream
from tests.simulated.executors import (
    MOVE,
    PATHS,
    both_ways,
    every_path,
    executor_on,
    is_apart,
    open_executor,
    pair_on,
    paths_in_turn,
)
from tests.simulated.held_lists import BLOCKED, LAYERS, LONG, Held, device_of

# Waits.


@both_ways
@pytest.mark.parametrize("path", PATHS)
def test_a_wait_for_a_layer_is_for_the_calls_up_to_its_event(path, direction):
    device = device_of()
    pair = pair_on(device, direction)
    with executor_on(device, path, limits=Limits(**LONG, **LAYERS)) as executor:
        user = device.stream()
        gate = device.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user), by_layer=True)
        transfer.await_issue()
        rows = [row for segment in transfer._segments for row in segment.rows.tolist()]
        assert transfer.layer_groups == ((0,), (1,))
        for mark in transfer._marks:
            assert rows[mark.rows - 1][:2] == [RECORD, mark.event]
        gate.set()
        transfer.synchronize()
        pair.check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_an_event_of_a_layer_is_found_among_the_calls_that_wait_for_the_gpu(path, every):
    device = Device(3, eager=False)
    pair = pair_on(device, "load")
    sizes = LONG | LAYERS | {"calls_in_flight": every, "batch_copies": 1}
    with executor_on(device, path, limits=Limits(**sizes)) as executor:
        gate = device.gate(user := device.stream())
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user), by_layer=True)
        rows = [row for segment in transfer._segments for row in segment.rows.tolist()]
        for mark in transfer._marks:
            assert rows[mark.rows - 1][:2] == [RECORD, mark.event]
        gate.set()
        transfer.synchronize()
        pair.check()


def test_a_wait_for_the_first_layer_does_not_wait_for_the_list():
    device = device_of()
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine", limits=Limits(**LONG | LAYERS | {"calls_in_flight": 12})) as executor:
        held = Held(device, executor, pair, by_layer=True)
        reader = device.stream()
        held.transfer.wait_layer(0, Stream(reader))
        assert held.transfer.unplayed
        held.open()
        held.transfer.wait_layer(1, Stream(reader))
        held.transfer.synchronize()
        pair.check()


@both_ways
@pytest.mark.parametrize("path", PATHS)
def test_a_list_that_is_not_played_yet_is_in_flight(path, direction):
    device = device_of()
    pair = pair_on(device, direction)
    with executor_on(device, path, limits=Limits(**BLOCKED)) as executor:
        held = Held(device, executor, pair)
        assert not held.transfer.done()
        assert executor.stats().in_flight == 1
        with pytest.raises(kvplan.TransferError, match=r"within 0\.01 seconds"):
            held.transfer.synchronize(timeout=0.01)
        assert not held.transfer.cancel()
        held.open()
        held.transfer.await_issue()
        assert not held.transfer.unplayed
        held.transfer.synchronize(timeout=PATIENCE)
        assert held.transfer.done()
        held.transfer.await_issue()  # it is over
        pair.check()


# Order.


@pytest.mark.parametrize("late", [False, True], ids=["a short list", "a long list"])
@pytest.mark.parametrize("path", PATHS)
def test_a_submit_behind_a_list_of_another_lane_does_not_wait_for_it(path, late):
    """The calling thread holds the interpreter while it makes calls: a wait there may never end."""
    device = device_of()
    store = pair_on(device, "store")
    with executor_on(device, path, limits=Limits(**BLOCKED)) as executor:
        held = Held(device, executor, store)
        back = kvplan.compile(*reversed(store.layouts)).plan(MOVE.dst, [0, 2, 6, 7])
        for layer in range(2):
            here = store.src.of_layer(store.src_bytes, layer)
            here[:, [0, 2, 6, 7]] = here[:, list(MOVE.src)]
        if not late:
            object.__setattr__(executor._backend.resources, "limits", Limits())
        second = executor.submit(back, after=held.transfer)  # returns
        assert held.transfer.unplayed
        assert not second.done()
        held.open()
        second.synchronize(timeout=PATIENCE)
        assert held.transfer.done()
        store.check()


@pytest.mark.parametrize("path", PATHS)
def test_an_urgent_submit_behind_a_list_that_it_conflicts_with_does_not_wait_for_it(path):
    device = device_of()
    pair = pair_on(device, "load")
    with executor_on(device, path, limits=Limits(**BLOCKED)) as executor:
        held = Held(device, executor, pair)
        object.__setattr__(executor._backend.resources, "limits", Limits())
        second = executor.submit(pair.plan(Move(MOVE.src[::-1], MOVE.dst)), priority="high")
        assert held.transfer.unplayed
        held.open()
        second.synchronize(timeout=PATIENCE)
        pair.check()


@pytest.mark.parametrize("path", PATHS)
def test_a_submit_behind_a_list_of_another_executor_does_not_wait_for_it(path):
    device = device_of()
    store = pair_on(device, "store")
    first, second = open_executor(device, path, limits=Limits(**BLOCKED)), open_executor(device, path)
    held = Held(device, first, store)
    back = kvplan.compile(*reversed(store.layouts)).plan(MOVE.dst, [0, 2, 6, 7])
    for layer in range(2):
        here = store.src.of_layer(store.src_bytes, layer)
        here[:, [0, 2, 6, 7]] = here[:, list(MOVE.src)]
    transfer = second.submit(back, after=held.transfer)  # returns
    assert held.transfer.unplayed
    held.open()
    transfer.synchronize(timeout=PATIENCE)
    store.check()
    for executor in (first, second):
        executor.close()


@both_ways
@pytest.mark.parametrize("seed", range(6))
def test_an_event_of_a_caller_counts_as_it_was_recorded_at_the_submit(direction, seed):
    device = Device(seed, eager=False)
    pair = pair_on(device, direction)
    with executor_on(device, "copy_engine", limits=Limits(**LONG)) as executor:
        executor.submit(pair.plan(Move([5], [5]))).synchronize()
        user, other = device.stream(), device.stream()
        gate = device.gate(user)
        event = Event.on(device, user)
        transfer = executor.submit(pair.plan(MOVE), after=event)
        device.record(event.cuda_event, other)  # its owner records it again
        transfer.await_issue()
        device.run()
        assert not transfer.done()
        gate.set()
        transfer.synchronize()
        pair.check()


def test_transfers_that_wait_for_one_another_give_their_loans_back_while_others_follow():
    device = Device(3)
    pair = pair_on(device, "load")
    plan = pair.plan(MOVE)
    with executor_on(device, limits=Limits(**LONG)) as executor, paths_in_turn(PATHS * 100):
        last = executor.submit(plan)
        for _ in range(300):  # another one is always in flight
            following = executor.submit(plan, after=last)
            last.synchronize()
            last = following
        lane = executor._backend.lanes["load"]
        executor._backend.reap()
        assert len(lane.flying) <= 2
        assert len(last._holds) <= 2
        last.synchronize()
        pair.check()


# The end.


@both_ways
@every_path
def test_close_waits_for_lists_that_are_not_played(path, direction):
    device = device_of()
    pair = pair_on(device, direction)
    executor = open_executor(device, path, limits=Limits(**BLOCKED))
    held = Held(device, executor, pair)
    others = [executor.submit(pair.plan(Move([k], [k]))) for k in range(4)]
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    held.open()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert all(one.done() for one in (held.transfer, *others))
    pair.check()
    assert not device.memory
    assert device.made <= device.theirs
    assert is_apart(executor)


@both_ways
def test_close_ends_after_a_list_that_has_failed_with_lists_behind_it(direction):
    device = Device(3)
    pair = pair_on(device, direction)
    with executor_on(device, "copy_engine", limits=Limits(**LONG)) as executor:
        device.fail("cuEventRecord", spare=1, code=719)
        for k in range(6):
            executor.submit(pair.program.plan([k], [k]))
        executor.close()


def test_a_forked_child_neither_asks_nor_waits_for_a_list():
    device = device_of()
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine", limits=Limits(**BLOCKED)) as executor:
        held = Held(device, executor, pair)
        child = os.fork()
        if not child:
            refused = 0
            for ask in (held.transfer.done, held.transfer.await_issue, held.transfer.synchronize,
                        lambda: held.transfer.wait(Stream(1)), lambda: executor.submit(pair.plan(MOVE))):  # fmt: skip
                try:
                    ask()
                except kvplan.TransferError:
                    refused += 1
            os._exit(0 if refused == 5 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.open()
        held.transfer.synchronize()
        pair.check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind a list"])
@pytest.mark.parametrize("path", ["copy_engine", "staged"])
def test_an_executor_goes_on_after_an_interrupt_at_any_point_of_a_long_submit(path, behind):
    total = interrupted(path, 0, behind=behind)
    assert total > 10
    for at in points(total):
        interrupted(path, at, behind=behind)


def interrupted(path: str, at: int, *, behind: bool) -> int:
    """Interrupt a submit, and a wait, at a point; return the number of points."""
    device = Device(at)
    pair = pair_on(device, "load")
    interrupt = Interrupt(at)
    try:
        with executor_on(device, path, limits=Limits(**LONG, **LAYERS)) as executor:
            executor.submit(pair.plan(Move([0], [1])), by_layer=True).synchronize(PATIENCE)
            plan, user, gate = pair.plan(MOVE), device.stream(), None
            if behind:
                gate = device.gate(user)
                executor.submit(pair.plan(Move([7], [7])), after=Stream(user))

            def submit() -> None:
                transfer = executor.submit(plan, by_layer=True)
                transfer.wait_layer(0, Stream(user))
                transfer.done()

            interrupt.within(submit)
            if gate is not None:
                gate.set()
            executor.submit(pair.plan(Move([6], [6])), priority="high").synchronize(PATIENCE)
            executor.submit(pair.plan(MOVE)).synchronize(PATIENCE)

            def ended() -> bool:
                executor._backend.reap()
                return not executor.stats().in_flight

            until(ended)
            device.run()
            pair.check()
    except BaseException as error:
        raise AssertionError(f"interrupted at point {at}, {interrupt.where}") from error
    return interrupt.points

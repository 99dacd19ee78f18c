"""Capture on a simulated GPU: the kernel path becomes part of a graph and is planned again; no other path pretends."""

from __future__ import annotations

import threading

import pytest

import kvplan
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair
from tests.simulated import Device, Graph, Stream
from tests.simulated.executors import (
    MOVE,
    SMALL,
    OnDevice,
    both_ways,
    current_stream,
    executor_on,
    pair_on,
    paths_in_turn,
)


def replay(device: Device, graph: Graph, *pairs: Pair) -> None:
    graph.run(device.random)
    for pair in pairs:
        pair.check()


def capture(device: Device, executor: kvplan.Executor, *plans: kvplan.Plan) -> tuple[Graph, list[kvplan.Transfer]]:
    """A graph of these transfers, side by side."""
    user = Stream(device.stream())
    graph = device.capture(user.cuda_stream)
    made = [executor.submit(plan, after=user) for plan in plans]
    for transfer in made:
        transfer.wait(user)
    device.end_capture()
    return graph, made


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize(
    "limit", [{}, {"launch_rows": 3}, {"launch_groups": 0}, {"launch_groups": 0, "launch_rows": 3}], ids=str
)
def test_a_captured_transfer_moves_at_every_replay_what_it_is_planned_to(direction, limit):
    device = Device(5)
    pair = pair_on(device, direction)
    with executor_on(device, "kernel", limits=Limits(**limit)) as executor:
        plan = pair.program.plan(MOVE.src, MOVE.dst)
        graph, (transfer,) = capture(device, executor, plan)
        device.run()
        pair.check()  # nothing has moved yet
        pair.plan(MOVE)
        for _ in range(2):
            replay(device, graph, pair)
        for ids in ([0, 2], [7], [], [6, 5, 4, 3]):
            transfer.replan(pair.plan(Move(ids, [8 - k for k in ids])))
            replay(device, graph, pair)
        assert repr(transfer).endswith("captured)")


@both_ways
def test_what_was_not_captured_cannot_be_replayed(direction):
    device = Device(5)
    pair = pair_on(device, direction)
    other = pair_on(device, direction, SMALL, Paged(HOST_NOTATIONS["layer-first"], dim=96, padded=True))
    there = pair_on(device, "store" if direction == "load" else "load")
    with executor_on(device, "kernel") as executor:
        graph, (transfer,) = capture(device, executor, pair.plan(MOVE))
        for wrong, why in (
            (pair.program.plan(range(5), range(5)), r"moves \d+ units; what was captured has room for"),
            (other.program.plan([1], [2]), "of another program"),
            (there.program.plan([1], [2]), "was captured, and this plan is a"),
        ):
            with pytest.raises(kvplan.PathError, match=why):
                transfer.replan(wrong)
        with pytest.raises(kvplan.KVPlanError, match="plan is a int"):
            transfer.replan(3)
        replay(device, graph, pair)
        plain = executor.submit(pair.plan(MOVE))
        with pytest.raises(kvplan.PathError, match="captured"):
            plain.replan(pair.program.plan([1], [2]))
        plain.synchronize()
    with pytest.raises(kvplan.TransferError, match="closed"):
        transfer.replan(pair.program.plan([1], [2]))


def test_flat_captures_have_room_and_alignment_of_their_own():
    device = Device(5)
    pair = pair_on(device, "load")
    packed = OnDevice(SMALL.notation, dim=3, align=1)
    odd = pair_on(device, "load", packed, Paged(HOST_NOTATIONS["page-first"], dim=3, align=1))
    with executor_on(device, "kernel", limits=Limits(launch_groups=0)) as executor:
        _, (transfer,) = capture(device, executor, pair.plan(MOVE))
        with pytest.raises(kvplan.PathError, match=r"has \d+ descriptors; what was captured has room for"):
            transfer.replan(pair.program.plan(range(9), [8, 7, 6, 5, 4, 3, 2, 1, 0]))
        with pytest.raises(kvplan.PathError, match=r"aligned to 1 bytes; captured were 16"):
            transfer.replan(odd.program.plan([1], [2]))


def test_a_captured_transfer_comes_after_another_of_its_graph():
    device = Device(5)
    store = pair_on(device, "store")
    back = kvplan.compile(*reversed(store.layouts)).plan(MOVE.dst, [0, 2, 6, 7])
    with executor_on(device, "kernel") as executor:
        plain = executor.submit(store.plan(MOVE))
        user = Stream(device.stream())
        graph = device.capture(user.cuda_stream)
        first = executor.submit(store.program.plan(MOVE.src, MOVE.dst), after=user)
        with current_stream(user.cuda_stream):
            with pytest.raises(kvplan.PathError, match="outside the graph being captured"):
                executor.submit(back, after=plain)
            second = executor.submit(back, after=first)
            second.wait()
        device.end_capture()
        for ask in (second.done, second.synchronize, second.result):
            with pytest.raises(kvplan.TransferError, match="captured into a CUDA graph"):
                ask()
        with pytest.raises(kvplan.KVPlanError, match="give the stream that replays it"):
            executor.submit(back, after=first)
        plain.synchronize()
        for layer in range(2):
            here = store.src.of_layer(store.src_bytes, layer)
            here[:, [0, 2, 6, 7]] = here[:, list(MOVE.src)]
        graph.run(device.random)
        store.check()


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "staged"])
def test_other_paths_refuse_before_anything(direction, path):
    device = Device(5)
    pair = pair_on(device, direction)
    with executor_on(device, path) as executor:
        user = Stream(device.stream())
        graph = device.capture(user.cuda_stream)
        with pytest.raises(
            kvplan.PathError, match=f"path '{path}' cannot be captured into a CUDA graph; path 'kernel'"
        ):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=user)
        assert not graph.works
        assert graph.tails.keys() == {user.cuda_stream}
        device.end_capture()
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


@both_ways
def test_auto_takes_the_kernel_in_a_capture_and_nothing_else_is_held_up(direction):
    device = Device(5)
    pair, other = pair_on(device, direction), pair_on(device, direction, seed=1)
    with executor_on(device) as executor, paths_in_turn(["copy_engine"] * 2):
        graph, (transfer,) = capture(device, executor, pair.program.plan(MOVE.src, MOVE.dst))
        assert transfer.path == "kernel"
        assert executor.submit(other.plan(MOVE)).result().path == "copy_engine"
        happened = threading.Event()
        waiting = executor.submit(other.plan(Move([1], [1])), after=happened)
        pair.plan(MOVE)
        replay(device, graph, pair)
        happened.set()
        waiting.synchronize()
        other.check()


def test_an_empty_plan_is_captured_as_nothing():
    device = Device(5)
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        graph, _ = capture(device, executor, pair.program.plan([], []))
        replay(device, graph, pair)


@both_ways
@pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
def test_a_flat_capture_planned_again_moves_every_byte_whatever_its_width(direction, align):
    device = Device(5)
    cache = OnDevice(DEVICE_NOTATION, dim=20496, align=align, padded=True)
    pair = pair_on(device, direction, cache, Paged(HOST_NOTATIONS["layer-first"], dim=20496, align=align, padded=True))
    with executor_on(device, "kernel", limits=Limits(launch_groups=0)) as executor:
        user = Stream(device.stream())
        graph = device.capture(user.cuda_stream)
        transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=user)
        transfer.wait(user)
        device.end_capture()
        for move in (MOVE, Move([6, 0], [8, 1]), MOVE):
            transfer.replan(pair.plan(move))
            graph.run(device.random)
            assert not device.wrong
            pair.check()

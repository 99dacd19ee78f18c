"""Agents with memory of simulated GPUs: the transport is taken, orders all, and leaves nothing."""

from __future__ import annotations

import json
import os
import threading
from zlib import crc32

import numpy as np
import pytest

import kvplan
from kvplan import Agent, PathError
from tests.agents.cuda_ipc.simulated_ipc import BLOCKS, Both, OnGpu, cache, expandable, two_gpus
from tests.patience import PATIENCE
from tests.simulated_driver import simulated

driver = pytest.fixture(two_gpus)


@pytest.mark.parametrize("path", ["kernel", "copy_engine"])
@pytest.mark.parametrize("owner", [0, 1])
def test_blocks_are_read_and_written_with_notes(driver, path, owner):
    with Both(driver, path, owner) as both:
        assert both.peer.transport == "cuda_ipc"
        before = both.theirs.copy()
        both.peer.submit(both.load.plan([1, 5], [0, 7])).synchronize(PATIENCE)
        np.testing.assert_array_equal(both.mine[:, [0, 7]], before[:, [1, 5]])
        transfer = both.peer.submit(both.store.plan([7], [3]), note=b"stored")
        assert transfer.result().nbytes == 2 * 96
        np.testing.assert_array_equal(both.theirs[:, 3], before[:, 5])
        assert both.notes(1) == [("visitor", b"stored")]
        assert both.owner.notes() == []


@pytest.mark.parametrize("owner", [0, 1])
def test_memory_of_pieces_is_read_and_written(driver, owner):
    """As torch's expandable segments are: it is mapped at other addresses."""
    mine, here = cache(driver, 0, 2)
    with (
        expandable(driver, owner, 1) as (theirs, there),
        kvplan.Executor("cuda:0", kvplan.Policy(path="kernel")) as executor,
        Agent("owner", {"kv": there}, transports=("cuda_ipc",)) as agent,
        Agent("visitor", {}, transports=("cuda_ipc",), executor=executor) as visitor,
    ):
        before, layout = theirs.copy(), visitor.meet(agent.card()).layouts["kv"]
        executor.submit(kvplan.compile(layout, here).plan([1, 5], [0, 7])).synchronize(PATIENCE)
        executor.submit(kvplan.compile(here, layout).plan([7, 0], [2, 3])).synchronize(PATIENCE)
        np.testing.assert_array_equal(mine[:, [0, 7]], before[:, [1, 5]])
        np.testing.assert_array_equal(theirs[:, [2, 3]], before[:, [5, 1]])


def test_notes_come_in_the_order_of_the_submits(driver):
    with Both(driver) as both:
        event = threading.Event()
        for k in range(30):
            after = event if k == 10 else None  # the CPU waits for this one, and for those behind it
            both.peer.submit(both.store.plan([k % BLOCKS], [k % BLOCKS]), note=b"%d" % k, after=after)
            if k == 20:
                event.set()
        assert both.notes(30) == [("visitor", b"%d" % k) for k in range(30)]


def test_a_stream_waits_for_a_layer(driver):
    with Both(driver) as both:
        transfer = both.peer.submit(both.load.plan([1], [2]), by_layer=True)
        stream, seen = driver.stream(), []
        transfer.wait_layer(1, OnGpu(stream, 0))
        driver.put(stream, lambda: seen.append(both.mine[:, 2].copy()))
        transfer.synchronize(PATIENCE)
        driver.finish()
        np.testing.assert_array_equal(seen[0], both.theirs[:, 1])
        np.testing.assert_array_equal(both.mine[:, 2], both.theirs[:, 1])


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_of_the_visitor_and_one_of_the_owner_order_a_transfer(seed):
    with simulated(2, seed) as gpus, Both(gpus) as both:
        compute, new = gpus.stream(1), np.random.default_rng(seed).integers(0, 256, both.theirs.shape, np.uint8)
        gpus.put(compute, lambda: both.theirs.__setitem__(slice(None), new))
        both.owner.publish(OnGpu(compute, 1))
        transfer = both.peer.submit(both.load.plan([1, 5], [0, 7]))
        both.owner.wait_for_visitors(OnGpu(compute, 1))
        gpus.put(compute, lambda: both.theirs.fill(0))
        transfer.synchronize(PATIENCE)
        gpus.finish()
        np.testing.assert_array_equal(both.mine[:, [0, 7]], new[:, [1, 5]])
        assert not both.theirs.any()


def test_a_gpu_that_is_not_visible_is_told_among_the_reasons(driver):
    _, there = cache(driver, 1)
    with Agent("owner", {"kv": there}, transports=("cuda_ipc", "shm")) as owner:
        card = owner.card()
        driver.visible = 1
        with (
            Agent("visitor", {}, transports=("cuda_ipc", "shm")) as visitor,
            pytest.raises(PathError, match=r"(?s)cuda_ipc.*does not see.*CUDA_VISIBLE_DEVICES.*shm.*host memory"),
        ):
            visitor.meet(card)
        driver.visible = 2


def elsewhere(card, pid):
    """The card of an owner in another container, where it has a number."""
    document = json.loads(card)
    del document["sum"]
    document["pid"] = pid
    document["host"]["pids"] += 1
    return json.dumps(document | {"sum": crc32(json.dumps(document, sort_keys=True).encode())}).encode()


def test_an_owner_with_the_same_number_in_another_container_opens_by_pieces_alone(driver):
    """CUDA takes a handle of an equal number for this process's own."""
    _, there = cache(driver, 1)
    transports = ("cuda_ipc", "shm")
    with Agent("visitor", {}, transports=transports) as visitor:
        with Agent("owner", {"kv": there}, transports=transports) as owner:
            with pytest.raises(PathError, match=r"both have the number .*docker run --init.*expandable_segments:True"):
                visitor.meet(elsewhere(owner.card(), os.getpid()))
            visitor.forget(visitor.meet(elsewhere(owner.card(), os.getpid() + 1)))
            visitor.forget(visitor.meet(owner.card()))
        with expandable(driver, 1) as (_, pieces), Agent("owner", {"kv": pieces}, transports=transports) as owner:
            assert visitor.meet(elsewhere(owner.card(), os.getpid())).transport == "cuda_ipc"
            visitor.forget(visitor.peers["owner"])

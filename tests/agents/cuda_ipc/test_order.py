"""Work of the owner and transfers of its visitors wait for each other, on simulated GPUs; also after a death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvplan
from kvplan.agents.cuda_ipc.cuda_ipc_messages import PASSED_WORD, PUBLISHED_WORD
from tests.agents.cuda_ipc.simulated_ipc import (
    assert_nothing_is_left,
    cache,
    devices_that_are_left_alone,
    driven,
    gpus,
    joined,
)
from tests.simulated import Event, Stream
from tests.simulated.executors import executor_on

devices = pytest.fixture(devices_that_are_left_alone)


class Visit(NamedTuple):
    """A visitor on cuda:0 that may read an owner's cache on cuda:1."""

    devices: Any
    theirs: Any
    mine: Any
    program: Any
    executor: Any
    ends: Any
    owned: list[Callable[[], object]]  # called at the end: they destroy what the test has made


@contextmanager
def visit(seed):
    """Let streams advance in random order, so that a missing wait shows as wrong bytes; nothing is left in the end."""
    devices = gpus(seed=seed)
    with driven(devices):
        theirs, there = cache(devices, 1, 1)
        mine, here = cache(devices, 0, 2)
        with executor_on(devices[0], "kernel") as executor, joined(there, "cuda:0") as ends:
            made = Visit(devices, theirs, mine, kvplan.compile(ends.layout, here), executor, ends, [])
            yield made
        for destroy in made.owned:
            destroy()
        assert_nothing_is_left(devices)


@pytest.mark.parametrize("seed", range(10))
def test_a_transfer_waits_for_what_the_owner_published(seed):
    with visit(seed) as (devices, theirs, mine, program, executor, ends, owned):
        compute, user = devices[1].stream(), devices[0].stream()
        new = np.random.default_rng(seed + 9).integers(0, 256, theirs.shape, np.uint8)
        devices[1].put(compute, lambda: theirs.__setitem__(slice(None), new))
        ends.offer.publish(OnGpu(compute, 1))
        mark = np.zeros(1)
        devices[0].put(user, lambda: mark.__setitem__(0, 1))
        event = Event.on(devices[0], user)
        for after in (None, Stream(user), event, executor.submit(program.plan([0], [0]))):
            given = ends.opened.before(None, after)
            executor.submit(program.plan([1, 5], [0, 7]), after=given).synchronize()
            np.testing.assert_array_equal(mine[:, [0, 7]], new[:, [1, 5]])
        assert ends.opened.before(None, None) is None  # all that was published has passed
        devices[0].run()
        owned += [
            partial(devices[1].destroy_stream, compute),
            partial(devices[0].destroy_stream, user),
            partial(devices[0].destroy_event, event.cuda_event),
        ]


class OnGpu:
    """A stream of torch."""

    def __init__(self, handle: int, ordinal: int) -> None:
        self.cuda_stream, self.device_index = handle, ordinal


def test_what_the_owner_published_is_waited_for_on_the_cpu_where_the_caller_s_object_is(devices):
    theirs, there = cache(devices, 1, 1)
    with joined(there, "cuda:0") as ends:
        compute, event = devices[1].stream(), threading.Event()
        devices[1].put(compute, lambda: theirs.fill(3))
        ends.offer.publish(OnGpu(compute, 1))
        devices[0].eager = False
        later = threading.Timer(0.05, devices[0].run)
        later.start()
        assert ends.opened.before(None, event) is event
        later.join()
        assert theirs.min() == theirs.max() == 3


@pytest.mark.parametrize("seed", range(10))
def test_the_owner_s_stream_waits_for_the_visitor_s_transfers(seed):
    with visit(seed) as (devices, theirs, mine, program, executor, ends, _):
        before = theirs.copy()
        compute = devices[1].stream()
        ends.offer.wait_for_visitors(OnGpu(compute, 1))  # no visitor has submitted
        pull = executor.submit(program.plan([1, 5], [0, 7]))
        ends.after(pull, b"", urgent=False)
        ends.offer.wait_for_visitors(OnGpu(compute, 1))
        devices[1].put(compute, lambda: theirs.fill(0))  # the owner's next blocks
        devices[0].run()
        pull.synchronize()
        np.testing.assert_array_equal(mine[:, [0, 7]], before[:, [1, 5]])
        assert not theirs.any()


def test_streams_of_other_gpus_are_refused(devices):
    _, there = cache(devices, 1)
    with joined(there) as ends:
        for call in (ends.offer.publish, ends.offer.wait_for_visitors):
            with pytest.raises(kvplan.KVPlanError, match="stream is a str"):
                call("stream")
            with pytest.raises(kvplan.KVPlanError, match="the stream is of cuda:0; give one of cuda:1"):
                call(OnGpu(7, 0))


@pytest.mark.parametrize("seed", range(10))
def test_work_of_all_streams_that_were_published_is_waited_for(seed):
    with visit(seed) as (devices, theirs, mine, program, executor, ends, _):
        slow, fast = devices[1].stream(), devices[1].stream()
        devices[1].put(slow, lambda: theirs[:, 1].fill(7))
        ends.offer.publish(OnGpu(slow, 1))
        devices[1].put(fast, lambda: theirs[:, 5].fill(8))
        ends.offer.publish(OnGpu(fast, 1))
        executor.submit(program.plan([1, 5], [0, 7]), after=ends.opened.before(None, None)).synchronize()
        assert (mine[:, 0] == 7).all()
        assert (mine[:, 7] == 8).all()


def test_who_comes_later_waits_for_what_was_published_before(devices):
    _, there = cache(devices, 1, 1)
    with joined(there, "cuda:0") as ends:
        compute = devices[1].stream()
        gate = devices[1].gate(compute)
        ends.offer.publish(OnGpu(compute, 1))
        served = ends.offer.serve({}, lambda message: None)
        assert served.words.load(PUBLISHED_WORD) == 1
        assert served.words.load(PASSED_WORD) == 0
        gate.set()
        devices[0].run()
        assert served.words.load(PASSED_WORD) == 1
        served.close()


def test_streams_that_wait_for_a_visitor_go_on_when_it_has_died_and_its_page_stays_until_then(devices):
    _, there = cache(devices, 1, 1)
    _, here = cache(devices, 0, 2)
    with executor_on(devices[0], "kernel") as executor, joined(there, "cuda:0") as ends:
        user, compute, seen = devices[0].stream(), devices[1].stream(), []
        gate = devices[0].gate(user)
        pull = executor.submit(kvplan.compile(ends.layout, here).plan([1], [2]), after=Stream(user))
        ends.after(pull, b"", urgent=False)
        ends.offer.wait_for_visitors(OnGpu(compute, 1))
        devices[1].put(compute, lambda: seen.append(1))
        devices[0].run()
        assert not seen
        assert len(devices[0].driver.registered) == 2
        ends.served.close()
        assert len(devices[0].driver.registered) == 2, "a stream still reads the page"
        devices[0].run()
        assert seen
        gate.set()
        pull.synchronize()


def test_transfers_that_wait_for_an_owner_that_has_died_go_on(devices):
    _, there = cache(devices, 1, 1)
    _, here = cache(devices, 0, 2)
    with executor_on(devices[0], "kernel") as executor, joined(there, "cuda:0") as ends:
        compute = devices[1].stream()
        gate = devices[1].gate(compute)
        ends.offer.publish(OnGpu(compute, 1))
        plan = kvplan.compile(ends.layout, here).plan([1], [2])
        pull = executor.submit(plan, after=ends.opened.before(None, None))
        devices[0].run()
        assert not pull.done()
        ends.opened.owner_gone()
        devices[0].run()
        pull.synchronize()
        assert ends.opened.before(None, None) is None
        gate.set()
        devices[0].run()


def test_a_stream_that_is_captured_is_refused(devices):
    _, there = cache(devices, 1)
    with joined(there, "cuda:0") as ends:
        compute = devices[1].stream()
        devices[1].capture(compute)
        for call in (ends.offer.publish, ends.offer.wait_for_visitors):
            with pytest.raises(kvplan.KVPlanError, match="is being captured into a CUDA graph"):
                call(OnGpu(compute, 1))
        devices[1].graph = None


def test_threads_that_submit_at_once_keep_their_own_after(devices, monkeypatch):
    """They share one event: a record of one must not come between the record and the wait of another."""
    _, there = cache(devices, 1, 1)
    device = devices[0]
    with joined(there, "cuda:0") as ends:
        compute, slow, fast = devices[1].stream(), device.stream(), device.stream()
        gates = devices[1].gate(compute), device.gate(slow)
        ends.offer.publish(OnGpu(compute, 1))
        begun, record, given = threading.Event(), device.record, []

        def late(event, stream):
            record(event, stream)
            if stream == slow:
                begun.set()
                time.sleep(0.05)

        monkeypatch.setattr(device, "record", late)
        thread = threading.Thread(target=lambda: given.append(ends.opened.before(None, Stream(slow))))
        thread.start()
        begun.wait()
        ends.opened.before(None, Stream(fast))
        thread.join()
        gates[0].set()
        seen = []
        device.put(given[0].cuda_stream, lambda: seen.append(1))
        device.run()
        assert not seen, "it waits for the slow stream"
        gates[1].set()
        device.run()
        assert seen

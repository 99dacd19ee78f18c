"""Agents of two processes with GPU memory, at their ends: closed, forgotten, or killed with transfers in flight."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import kvplan
from kvplan import TransferError
from tests.agents.processes import PATIENCE, shared_pages
from tests.gpu.processes.agent_worker import BLOCKS, PAGED, content, other
from tests.gpu.processes.mappings import mappings
from tests.gpu.processes.visitor import Visitor, closed_gate, each_owner, memories, until

pytestmark = [pytest.mark.gpu, each_owner]
READING, WRITING = "reading from 'other' failed", "writing to 'other' failed"
RACING = 16  # transfers in flight at a time


def is_refused(me):
    """Whether the visitor has noticed that its owner is gone."""
    try:
        me.peer.send(b"")
    except TransferError:
        return True
    return False


def test_an_owner_that_dies_is_told_by_every_transfer(owner):
    with other(owner) as them, Visitor(them) as me:
        me.warm_up()
        with closed_gate() as gate:
            loads = [me.peer.submit(me.load.plan([k], [k]), after=gate.stream) for k in range(8)]
            stores = [me.peer.submit(me.store.plan([k], [k]), after=gate.stream) for k in range(8)]
            them.kill()
            until(lambda: is_refused(me))
            assert not all(each.done() for each in loads + stores)  # the gate still holds what the GPU has
            gate.open()
            for each in loads:
                with pytest.raises(TransferError, match=READING):
                    each.synchronize(PATIENCE)
            for each in stores:
                with pytest.raises(TransferError, match=WRITING):
                    each.synchronize(PATIENCE)
        with pytest.raises(TransferError, match="no transfer with 'other'"):
            me.peer.submit(me.load.plan([0], [0]))
        gc.collect()
    assert mappings() == 0
    assert float(torch.ones(4, device="cuda:0").sum()) == 4  # the context is whole


@memories
def test_transfers_that_race_with_the_owner_s_death_are_right_or_fail(owner, memory):
    """Some end before the process is gone: a GPU's process needs a while to end. Those must be right."""
    expected = content(1, "cuda:0", PAGED)
    with other(owner, **memory) as them, Visitor(them) as me:
        me.warm_up()
        killer = threading.Timer(0.02, them.kill)
        killer.start()
        failed = False
        while not failed:
            me.cache.zero_()
            torch.cuda.synchronize()
            loads = []
            with suppress(TransferError):
                loads.extend(me.peer.submit(me.load.plan([k], [BLOCKS - 1 - k])) for k in range(RACING))
            failed = len(loads) < RACING
            for k, each in enumerate(loads):
                try:
                    each.synchronize(PATIENCE)
                except TransferError as error:
                    assert READING in str(error)  # noqa: PT017  # it may also succeed
                    failed = True
                else:
                    assert torch.equal(me.cache[BLOCKS - 1 - k], expected[k]), "a wrong block was called done"
        killer.join(PATIENCE)
        until(lambda: is_refused(me))
    assert mappings() == 0
    assert float(torch.ones(4, device="cuda:0").sum()) == 4


def test_an_owner_that_dies_before_the_work_that_it_published(owner):
    with other(owner) as them, Visitor(them) as me:
        me.warm_up()
        them.publish_behind_a_gate(21)
        load = me.peer.submit(me.load.plan([0], [0]))
        assert not load.done()
        them.kill()
        with pytest.raises(TransferError, match=READING):
            load.synchronize(PATIENCE)


def test_an_owner_s_stream_goes_on_when_a_visitor_has_died(owner):
    with other(0, "visited") as them, other(owner, "dying") as dying:
        dying.meet_and_pull_behind_a_gate(them.card())
        them.overwrite_behind_visitors(51)
        assert them.busy()
        dying.kill()
        assert them.holds(51)


def test_an_owner_closes_once_its_visitors_have_gone_or_died(owner):
    with other(owner) as them, Visitor(them) as me:
        me.warm_up()
        with closed_gate() as gate:
            load = me.peer.submit(me.load.plan([0], [0]), after=gate.stream)
            with pytest.raises(AssertionError, match=r"TransferError: .*visitor"):
                them.close(0.2)
            assert not load.done()
            gate.open()
            load.synchronize(PATIENCE)
        them.close(30.0)
        with pytest.raises(TransferError, match="closes"):
            me.peer.submit(me.load.plan([0], [0]))
        assert mappings() == 0


@memories
def test_meeting_again_and_again_leaves_nothing(owner, memory):
    """The driver is asked whether it still maps the address: figures of free memory are those of all processes."""

    def mine():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), shared_pages()

    with other(owner, **memory) as them, Visitor(them) as me:

        def round_trip():
            assert (me.mapped(), mappings()) == (True, 1)
            me.agent.forget(me.peer)
            assert (me.mapped(), mappings()) == (False, 0)
            me.peer = me.agent.meet(them.card())
            load = kvplan.compile(me.peer.layouts["kv"], me.here)
            me.peer.submit(load.plan([1], [1]), note=b"x").synchronize(PATIENCE)

        for _ in range(3):
            round_trip()
        them.notes()
        here, there = mine(), them.left()
        for _ in range(20):
            round_trip()
        them.notes()
        until(lambda: mine() == here)
        until(lambda: them.left() == there)
        assert torch.equal(me.cache[1], content(1, "cuda:0", PAGED)[1])

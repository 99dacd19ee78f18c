"""One pool, many real processes: they make it at once, write and read it in two topologies, and are killed."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
from itertools import count
from multiprocessing.connection import Connection, wait

import numpy as np
import pytest

import kvplan
from kvplan.memory.shared import path_of, share
from tests.memory.shared_workers import (
    BLOCKS,
    HEADS,
    LAYERS,
    Read,
    Topology,
    Write,
    cache_of,
    content,
    die_making,
    hold,
    pool_of,
    race,
    rank,
)
from tests.patience import PATIENCE
from tests.profiles import PROFILE

pytestmark = pytest.mark.slow

WRITERS = [Topology(LAYERS, range(start, start + 2)) for start in range(0, 8, 2)]
READERS = [Topology(range(start, start + 2), HEADS) for start in range(0, 4, 2)]
TRANSFERS, KILLS = (20_000, 12) if PROFILE == "deep" else (4_000, 4)
spawn = multiprocessing.get_context("spawn")
_numbers = count()


@pytest.fixture
def name():
    made = f"kvplan-processes-{os.getpid()}-{next(_numbers)}"
    yield made
    assert not path_of(made).exists(), "a pool was left"
    path_of(made).unlink(missing_ok=True)


class Child:
    """A process and the pipe to it."""

    def __init__(self, target, *arguments) -> None:
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self):
        assert self.pipe.poll(PATIENCE), "no answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0
        self.pipe.close()


class Rank(Child):
    """A rank of one topology, ready for orders."""

    def __init__(self, name: str, ranks: list[Topology], number: int) -> None:
        self.topology = ranks[number]
        super().__init__(rank, name, ranks, number)
        self.left = 0

    def ready(self) -> None:
        assert self.answer() == ""

    def order(self, order: Write | Read) -> None:
        self.pipe.send(order)
        self.left = len(order.todo)


def finish(ranks: list[Rank], victim: Rank | None = None, after: int = 0) -> int:
    """Gather what ranks say until all is done; kill one after so many of its transfers. Transfers that were told of."""
    told = 0
    while busy := {each.pipe: each for each in ranks if each.left}:
        ready: list[Connection] = wait(list(busy), PATIENCE)
        assert ready, "no answer"
        for pipe in ready:
            each = busy[pipe]
            assert pipe.recv() == ""
            told += 1
            each.left -= 1
            if each is victim and not (after := after - 1):
                each.kill()
                each.left = 0
    return told


def test_writers_and_readers_of_two_topologies_and_writers_that_are_killed(name):
    chance = random.Random(0)
    pool = pool_of(name, cache_of(Topology(LAYERS, HEADS))[1])
    held = np.zeros((BLOCKS, *content(0, 0).shape), np.uint8)  # what the pool must hold: layer, kv, token, head, dim
    seeds: dict[int, int] = {}  # of the blocks that are whole

    def compare(written=(), torn: Topology | None = None):
        for block in written:
            held[block] = content(block, seeds[block])
        found = pool.tensors.transpose(0, 1, 2, 4, 3, 5)
        differ = (found != held).any(axis=(1, 2, 3, 5))  # block, head
        if torn:  # of a writer that was killed nothing is said, within what it was to write
            differ[np.ix_(list(written), list(torn.heads))] = False
        assert not differ.any(), f"blocks and heads {np.argwhere(differ).tolist()} are wrong"

    writers, readers = ([Rank(name, side, k) for k in range(len(side))] for side in (WRITERS, READERS))
    for each in (*writers, *readers):
        each.ready()
    compare()
    moved, turn, kills = 0, 0, 0
    while moved < TRANSFERS or kills < KILLS:
        turn += 1
        written = chance.sample(range(BLOCKS), 16)
        todo = [(block, turn) for block in written]
        known = [(block, seed) for block, seed in seeds.items() if block not in written]
        for reader in readers:  # while others are written
            reader.order(Read(known))
        for writer in writers:
            writer.order(Write(todo))
        victim = chance.choice(writers) if turn % 10 == 5 else None
        moved += finish([*writers, *readers], victim, after=chance.randrange(1, 12))
        seeds |= dict(todo)
        compare(written, victim and victim.topology)
        if victim:
            kills += 1
            number = writers.index(victim)
            heir = writers[number] = Rank(name, WRITERS, number)
            heir.ready()
            heir.order(Write(todo))
            moved += finish([heir])
            compare(written)
        for reader in readers:
            reader.order(Read(todo))
        moved += finish(readers)
    for each in (*writers, *readers):
        each.end()
    assert (moved >= TRANSFERS, kills >= KILLS) == (True, True)
    compare()
    assert path_of(name).exists()


def test_eight_processes_make_use_and_leave_pools_at_once(name):
    barrier = spawn.Barrier(8)
    children = [Child(race, name, number, barrier) for number in range(8)]
    answers = [child.answer() for child in children]
    for child in children:
        child.process.join(PATIENCE)
    assert [said for said, _ in answers] == [""] * 8
    for turn in zip(*(had for _, had in answers), strict=True):
        (winner,) = {got for got in turn if isinstance(got, int)}
        texts = [f"'format 1 | of parity {parity}'" for parity in (winner, 1 - winner)]
        for number, got in enumerate(turn):
            if number % 2 == winner:
                assert got == winner
            else:
                assert f"there it is {texts[0]}; here it is {texts[1]}" in got


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_process_that_is_killed_while_it_makes_a_pool_is_in_nobody_s_way(name, calls):
    child = Child(die_making, name, calls)
    assert child.answer() == "now"
    pool = share(name, "mine", [1 << 20])  # waits, if the other one is still dying
    assert not pool.tensors[0].any()
    child.process.join(PATIENCE)
    assert child.process.exitcode == -signal.SIGKILL
    assert path_of(name).stat().st_size == (1 << 20) + mmap.PAGESIZE


def test_when_all_users_were_killed_the_name_is_free_for_any_pool(name):
    children = [Child(hold, name) for _ in range(3)]
    assert [child.answer() for child in children] == ["up"] * 3
    with pytest.raises(kvplan.LayoutError, match="in use as another pool"):
        share(name, "another", [100])
    for child in children:
        child.kill()
    assert path_of(name).read_bytes().count(b"\7") == len(LAYERS) * 2 * BLOCKS * 4 * len(HEADS) * 16
    assert not pool_of(name, cache_of(Topology(LAYERS, HEADS))[1]).tensors.any()
    assert share(name, "another", [100]).tensors[0].nbytes == 100
    assert not path_of(name).exists()

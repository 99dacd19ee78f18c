"""One pool, many real processes: they make it at once, come and go, end in every way, and are killed."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvplan
from kvplan.memory.shared import path_of, share
from tests.memory.shared_workers import child, die_making, hold, pool_of, race, spawn
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_eight_processes_make_use_and_leave_pools_at_once(name):
    barrier = spawn.Barrier(8)
    with ExitStack() as stack:
        children = [stack.enter_context(child(race, name, number, barrier)) for number in range(8)]
        answers = [answer() for _, _, answer in children]
        for process, _, _ in children:
            process.join(PATIENCE)
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
    with child(die_making, name, calls) as (process, _, answer):
        assert answer() == "now"
        pool = share(name, "mine", [1 << 20])  # waits, if the other one is still dying
        assert not pool.tensors[0].any()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
    assert path_of(name).stat().st_size == (1 << 20) + mmap.PAGESIZE


def test_a_pool_outlives_users_that_are_killed_and_its_name_is_free_after_the_last(name):
    with child(hold, name) as (first, _, told), child(hold, name) as (second, _, too):
        told(), too()
        with pytest.raises(kvplan.LayoutError, match="in use as another pool"):
            share(name, "another", [100])
        first.kill()
        first.join()
        assert (pool_of(name).tensors == 7).all()
        second.kill()
        second.join()
    assert path_of(name).read_bytes().count(b"\7") == 8 * 64
    assert not pool_of(name).tensors.any()
    assert share(name, "another", [100]).tensors[0].nbytes == 100
    assert not path_of(name).exists()


SCRIPT = """
import multiprocessing, os, signal, sys
from kvplan.memory.shared import share
name, what = sys.argv[1:]
def use(name):
    pool = share(name, "mine", [100])
    assert pool.tensors[0].nbytes == 100
if what == "exit":
    kept = share(name, "mine", [100])
if what == "child":
    child = multiprocessing.get_context("fork").Process(target=use, args=[name])
    child.start()
    child.join()
    sys.exit(child.exitcode)
if what == "fork":
    kept = share(name, "mine", [100])
    if os.fork() == 0:
        kept.tensors[0][0] = 9
        sys.exit()
    os.wait()
    assert os.path.exists("/dev/shm/" + name), "the child unlinked the parent's"
    assert kept.tensors[0][0] == 9
    assert share(name, "mine", [100]).tensors[0][0] == 9
if what == "orphan":
    kept = share(name, "mine", [100])
    if os.fork() == 0:
        print("up", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def script(name, what, **more):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, name, what], cwd=ROOT, text=True, **more)


@pytest.mark.parametrize("what", ["exit", "child", "fork"])
def test_a_process_that_ends_leaves_nothing(name, what):
    assert script(name, what).wait(PATIENCE) == 0
    assert not path_of(name).exists()


def test_a_child_that_outlives_a_killed_process_keeps_nobody_out(name):
    process = script(name, "orphan", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "up\n"
        assert process.wait(PATIENCE) < 0
        assert path_of(name).exists()
        assert share(name, "another", [5000]).memory.nbytes == 3 * mmap.PAGESIZE
    finally:
        process.stdin.close()
        process.stdout.close()

"""Pools that processes share by name, while others come and go between two steps, and at their ends."""

from __future__ import annotations

import fcntl
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvplan.memory.shared import path_of, share
from tests.memory.shared_pools import Lock
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]

# Others come and go between two steps: what they do is done at one call of flock.


def test_who_makes_it_is_waited_for(path):
    lock = Lock(path, fcntl.LOCK_EX)  # as one that has begun
    made = []
    thread = threading.Thread(target=lambda: made.append(share(path, "mine", [100])))
    thread.start()
    lock.release()  # and was killed
    thread.join(60)
    assert made[0].tensors[0].nbytes == 100


def test_removing_a_pool_in_use_leaves_its_users_their_memory(path):
    old = share(path, "mine", [100])
    path.unlink()
    new = share(path, "mine", [100])
    old.tensors[0][...] = 1
    assert not new.tensors[0].any()
    del old
    assert path.exists(), "the successor's file is not its predecessor's to unlink"


# Ends of processes.


SCRIPT = """
import multiprocessing, os, signal, sys, time
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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["exit", "child", "fork"])
def test_a_process_that_ends_leaves_nothing(name, what):
    assert script(name, what).wait(PATIENCE) == 0
    assert not path_of(name).exists()


@pytest.mark.slow
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

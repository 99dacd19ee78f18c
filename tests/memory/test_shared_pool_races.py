"""Pools that processes share by name, while others come and go between two steps, and at their ends."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvplan
from kvplan.memory import shared
from kvplan.memory.shared import path_of, share
from tests.memory.shared_pools import Lock
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]

# Others come and go between two steps: what they do is done at one call of flock.


def at_flock(monkeypatch, when, act):
    """Do something once, just before the first lock of that kind is asked for."""
    real, todo = fcntl.flock, [act]

    def flock(fd, how):
        if how == when and todo:
            todo.pop()()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    return todo


ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB
TOGETHER = fcntl.LOCK_SH | fcntl.LOCK_NB


@pytest.mark.parametrize("when", [ALONE, TOGETHER])
@pytest.mark.parametrize("successor", [True, False])
def test_the_file_goes_between_opening_and_locking(path, monkeypatch, when, successor):
    others = []

    def leave():
        path.unlink()
        if successor:
            others.append(share(path, "mine", [100]))

    todo = at_flock(monkeypatch, when, leave)
    pool = share(path, "mine", [100])
    assert not todo
    pool.tensors[0][50] = 5
    assert [other.tensors[0][50] for other in others] == [5] * successor


def test_another_pool_is_made_between_two_locks(path, monkeypatch):
    others = []

    def replace():
        path.unlink()
        others.append(share(path, "theirs", [100]))

    at_flock(monkeypatch, TOGETHER, replace)
    with pytest.raises(kvplan.LayoutError, match=r"there it is 'format 1 \| theirs'; here it is 'format 1 \| mine'"):
        share(path, "mine", [100])
    assert path.exists()


def test_a_user_that_was_refused_unlinks_if_the_last_one_left_meanwhile(path, monkeypatch):
    others = [share(path, "theirs", [100])]
    # The other one leaves while this one holds its lock, and so finds itself not alone.
    monkeypatch.setattr(shared._Use, "_header", lambda self, page: (others.clear(), (b"whole.\n", "theirs"))[1])
    with pytest.raises(kvplan.LayoutError, match="in use as another pool"):
        share(path, "mine", [100])
    assert not path.exists()


def test_who_makes_it_is_waited_for(path):
    lock = Lock(path, fcntl.LOCK_EX)  # as one that has begun
    made = []
    thread = threading.Thread(target=lambda: made.append(share(path, "mine", [100])))
    thread.start()
    lock.release()  # and was killed
    thread.join(60)
    assert made[0].tensors[0].nbytes == 100


def test_a_half_made_pool_that_somebody_holds_is_asked_for_again_for_a_while(path, monkeypatch):
    path.write_bytes(b"kvplan.pool\nmaking\n")
    lock = Lock(path, fcntl.LOCK_SH)  # as another that waits for who was killed
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 4:
            lock.release()

    monkeypatch.setattr(shared.time, "sleep", sleep)
    assert share(path, "mine", [100]).tensors[0].nbytes == 100
    assert pauses[:4] == [0, 0.001, 0.002, 0.003]
    path.write_bytes(b"kvplan.pool\nmaking\n")
    lock = Lock(path, fcntl.LOCK_SH)
    monkeypatch.setattr(shared, "ATTEMPTS", 5)
    pauses[:] = [0] * 10
    with pytest.raises(
        kvplan.HostMemoryError, match=r"another process keeps '.*pool' locked and does not finish it; remove it"
    ):
        share(path, "mine", [100])
    lock.release()


def test_a_lock_that_a_peer_never_gives_back_is_waited_for_only_so_long(path, monkeypatch):
    lock = Lock(path, fcntl.LOCK_EX)
    pauses = []
    monkeypatch.setattr(shared.time, "sleep", pauses.append)
    monkeypatch.setattr(shared, "ATTEMPTS", 30)
    with pytest.raises(kvplan.HostMemoryError, match=r"another process keeps '.*pool' locked"):
        share(path, "mine", [100])
    assert len(pauses) == 30
    lock.release()


def test_who_takes_long_to_make_it_is_waited_for_while_the_file_grows(path, monkeypatch):
    lock = Lock(path, fcntl.LOCK_EX)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        os.truncate(path, 4096 * len(pauses))
        if len(pauses) == 40:
            os.truncate(path, 0)
            lock.release()

    monkeypatch.setattr(shared.time, "sleep", sleep)
    monkeypatch.setattr(shared, "ATTEMPTS", 5)
    assert share(path, "mine", [100]).tensors[0].nbytes == 100
    assert len(pauses) >= 40


def test_a_geometry_of_junk_is_shown_short(path):
    lock = Lock(path, fcntl.LOCK_SH)
    path.write_bytes(b"kvplan.pool\nwhole.\n" + b"\x1b[31m" * 500 + b"\n")
    with pytest.raises(kvplan.LayoutError, match="in use as another pool") as caught:
        share(path, "mine", [100])
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()
    lock.release()


def test_a_file_that_is_replaced_by_hand_is_not_mapped(path, monkeypatch):
    named = shared._Use._named

    def removed(self):
        found = named(self)
        path.unlink(missing_ok=True)
        path.write_bytes(b"")
        return found

    monkeypatch.setattr(shared._Use, "_named", removed)
    with pytest.raises(kvplan.HostMemoryError, match="was replaced by another file while it was opened"):
        share(path, "mine", [100])
    assert path.exists(), "the other file is not ours to unlink"


def test_removing_a_pool_in_use_leaves_its_users_their_memory(path):
    old = share(path, "mine", [100])
    path.unlink()
    new = share(path, "mine", [100])
    old.tensors[0][...] = 1
    assert not new.tensors[0].any()
    del old
    assert path.exists(), "the successor's file is not its predecessor's to unlink"


# Ends of processes.


def test_at_exit_pools_are_left_and_their_memory_stays(path):
    pool = share(path, "mine", [100])
    shared._leave_all()
    assert not path.exists()
    pool.tensors[0][99] = 4
    assert pool.memory[mmap.PAGESIZE + 99] == 4


def test_the_child_of_a_fork_has_no_use_of_its_own(path):
    pool = share(path, "mine", [100])
    shared._forked()  # as in a child: the locks are the parent's, which here has gone
    assert path.exists()
    other = share(path, "another", [100])
    pool.tensors[0][...] = 1
    assert not other.tensors[0].any()
    del pool
    assert path.exists()


def test_children_that_multiprocessing_forks_are_told_to_leave(monkeypatch):
    told = []
    finalize = SimpleNamespace(Finalize=lambda *arguments, **more: told.append((arguments, more)))
    for module in (None, finalize):
        monkeypatch.setitem(sys.modules, "multiprocessing.util", module)
        shared._hook_exit.__wrapped__(os.getpid())
    assert told == [((None, shared._leave_all), {"exitpriority": 0})]


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

"""Pickles of layouts over shared pools that are not there any more, or not this process's to use: loaded as records."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kvplan
from kvplan.memory import shared
from kvplan.memory.shared import path_of, share
from tests.memory.pickled_pools import again, pool_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_of_users_that_were_killed_the_pool_is_not_taken_up_and_not_unlinked(name):
    script = (
        "import sys, os, pickle, signal; from tests.memory.pickled_pools import pool_of\n"
        "pool = pool_of(sys.argv[1]); pool.tensors[...] = 7\n"
        "sys.stdout.buffer.write(pickle.dumps(pool)); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    made = subprocess.run([sys.executable, "-c", script, name], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert made.returncode < 0
    before = path_of(name).read_bytes()
    assert pickle.loads(made.stdout).addresses == "dump"
    assert path_of(name).read_bytes() == before
    assert before.count(b"\7") == 8 * 64
    path_of(name).unlink()


def left(path):
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def nobody(path, pool):
    del pool[:]


def left_by_killed_users(path, pool):
    content = path.read_bytes()
    del pool[:]
    path.write_bytes(content)


def another_geometry(path, pool):
    del pool[:]
    pool.append(share(path, "another", [8 * 64]))


def made_anew(path, pool):
    del pool[:]
    pool.append(pool_of(path))


def another_token(path, pool):
    with path.open("r+b") as file:
        at = path.read_bytes().index(b"part kv\n") + 8
        file.seek(at)
        file.write(b"0" * 32)


def no_token(path, pool):
    with path.open("r+b") as file:
        at = path.read_bytes().index(b"part kv\n") + 8
        file.seek(at)
        file.write(b"\n" * 32)


def cut(path, pool):
    os.truncate(path, 4096)


def half_made(path, pool):
    with path.open("r+b") as file:
        file.seek(12)
        file.write(b"making")


def link(path, pool):
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def folder(path, pool):
    path.unlink()
    path.mkdir()


def pipe(path, pool):
    path.unlink()
    os.mkfifo(path)


GONE = (
    nobody, left_by_killed_users, another_geometry, made_anew, another_token, no_token, cut, half_made, link,
    folder, pipe,
)  # fmt: skip


@pytest.mark.parametrize("change", GONE, ids=lambda change: change.__name__)
def test_a_pool_that_is_not_there_any_more_is_not_mapped_made_or_unlinked(tmp_path, monkeypatch, change):
    monkeypatch.setattr(shared, "ATTEMPTS", 5)
    monkeypatch.setattr(shared.time, "sleep", lambda seconds: None)
    path = tmp_path / "pool"
    pool = [pool_of(path)]
    pickled = pickle.dumps(pool[0])
    change(path, pool)
    gc.collect()
    shared._mapped.clear()
    before, names = left(path), sorted(tmp_path.iterdir())
    loaded = pickle.loads(pickled)
    assert (loaded.addresses, loaded.regions[0].pool.path) == ("dump", str(path))
    assert (left(path), sorted(tmp_path.iterdir())) == (before, names)
    assert len(shared._uses) == len(pool)
    if change is another_token:
        assert again(pool_of(path)).addresses == "memory"


def test_another_user_s_pool_is_not_mapped(name, monkeypatch):
    pool = pool_of(name)
    pickled = pickle.dumps(pool)
    monkeypatch.setattr(os, "geteuid", lambda: path_of(name).stat().st_uid + 1)
    assert pickle.loads(pickled).addresses == "dump"
    assert path_of(name).exists()


def test_a_lock_that_is_never_given_back_is_waited_for_only_so_long(name, monkeypatch):
    pool = pool_of(name)
    pickled = pickle.dumps(pool)
    pauses, real = [], fcntl.flock
    monkeypatch.setattr(shared.time, "sleep", pauses.append)
    monkeypatch.setattr(shared, "ATTEMPTS", 30)

    def busy(fd, how):
        if how & fcntl.LOCK_SH:
            raise BlockingIOError
        real(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", busy)
        assert pickle.loads(pickled).addresses == "dump"
    assert len(pauses) == 30
    assert pickle.loads(pickled).addresses == "memory"


@pytest.mark.parametrize("when", ["asked", "locked"])
def test_who_loads_unlinks_a_pool_whose_last_user_leaves_meanwhile(name, monkeypatch, when):
    pool = [pool_of(name)]
    pickled = pickle.dumps(pool[0])
    asked, header = shared.in_use, shared._Use._header
    if when == "asked":
        monkeypatch.setattr(shared, "in_use", lambda fd: (asked(fd), pool.clear(), shared._mapped.clear())[0])
        assert pickle.loads(pickled).addresses == "dump"
    else:
        monkeypatch.setattr(shared._Use, "_header", lambda self, page: (pool.clear(), header(self, page))[1])
        loaded = pickle.loads(pickled)
        assert loaded.addresses == "memory", "it was a user before the other one left"
        assert path_of(name).exists()
        del loaded
    gc.collect()
    assert not path_of(name).exists()


def test_programs_of_a_plan_move_nothing_where_a_pool_went_between_two_layouts(name, monkeypatch):
    pool, other = pool_of(name), pool_of(f"{name}-2")
    pickled = pickle.dumps(kvplan.compile(pool, other).plan([0], [1]))
    real, asked = shared.attach, []

    def attach(*wanted):
        asked.append(wanted)
        return real(*wanted) if len(asked) > 1 else None

    monkeypatch.setattr(shared, "attach", attach)
    plan = pickle.loads(pickled)
    with kvplan.Executor() as executor, pytest.raises(kvplan.LayoutError, match="nothing can be moved"):
        executor.submit(plan)

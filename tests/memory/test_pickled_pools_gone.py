"""Pickles of layouts over shared pools that are not there any more, or not this process's to use: loaded as records."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

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


def cut(path, pool):
    os.truncate(path, 4096)


GONE = (
    nobody, left_by_killed_users, another_geometry, made_anew, another_token, cut,
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

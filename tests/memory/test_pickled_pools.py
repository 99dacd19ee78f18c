"""Pickles of layouts over pools that processes share by name: they are mapped where, and while, the pool is in use."""

from __future__ import annotations

import gc
import os
import pickle

import numpy as np
import pytest

import kvplan
from kvplan.memory import shared
from kvplan.memory.shared import path_of, share
from tests.memory.shared_workers import child, hold, pool_of, rows, take
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture
def elsewhere(monkeypatch):
    """Load as another process does, which has no mapping of the pool yet."""

    def load(value):
        pickled = pickle.dumps(value)
        shared._mapped.clear()
        return pickle.loads(pickled)

    return load


def test_another_process_moves_bytes_both_ways_through_what_was_pickled(name):
    pools = pool_of(name), pool_of(f"{name}-2")
    for k, pool in enumerate(pools):
        pool.tensors[...] = np.arange(8, dtype=np.uint8)[:, None] + 10 * k
    program = kvplan.compile(*pools)
    with child(take, pickle.dumps((pools[0], program, program.plan([4, 5], [1, 2])))) as (process, pipe, answer):
        assert answer() == ("memory", "memory", False, [1] * 64)
        assert pools[0].tensors[:, 9].tolist() == [0, 1, 2, 5, 4, 5, 6, 7]
        assert pools[1].tensors[:, 9].tolist() == [10, 4, 5, 13, 14, 15, 0, 17]
        paths = [path_of(name), path_of(f"{name}-2")]
        del pools, pool, program
        gc.collect()
        assert [path.exists() for path in paths] == [True, True], "the child uses them"
        pipe.send(None)
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert [path.exists() for path in paths] == [False, False]


def test_the_same_process_has_one_memory(name):
    pool = pool_of(name)
    loaded = pickle.loads(pickle.dumps(pool))
    assert (loaded, loaded.addresses, loaded.tensors) == (pool, "memory", None)
    assert [r.address for r in loaded.regions] == [r.address for r in pool.regions]
    with pytest.raises(kvplan.OverlapError):
        kvplan.compile(pool, loaded).plan([0], [0])
    del pool
    gc.collect()
    assert path_of(name).exists(), "what was loaded is a user"
    assert pickle.loads(pickle.dumps(loaded)).addresses == "memory"
    del loaded
    gc.collect()
    assert not path_of(name).exists()


@pytest.mark.parametrize("notation", ["block layer dim", "layer: block dim", "block layer: dim"])
@pytest.mark.parametrize("what", ["layouts", "program", "plan", "slice", "joined", "rank", "groups", "twice"])
def test_everything_that_is_pickled_moves_the_right_bytes_at_other_addresses(name, elsewhere, notation, what):
    src = pool_of(name, notation, layers=(0, 1))
    dst = pool_of(f"{name}-2", "layer block dim", layers=(0, 1))
    content = np.arange(2 * 8 * 64, dtype=np.uint16).astype(np.uint8).reshape(2, 8, 64)
    cache = rows((0, 1))
    cache.tensors[...] = content
    program = kvplan.compile(src, dst)
    layers = (1,) if what == "slice" else (0, 1)
    with kvplan.Executor() as executor:
        executor.submit(kvplan.compile(cache, src).plan(range(8), range(8))).synchronize()
        loaded = {
            "layouts": lambda: kvplan.compile(*elsewhere((src, dst))).plan([0, 5], [1, 2]),
            "program": lambda: elsewhere(program).plan([0, 5], [1, 2]),
            "plan": lambda: elsewhere(program.plan([0, 5], [1, 2])),
            "slice": lambda: elsewhere(
                kvplan.compile(src.slice(layers=[1]), dst.slice(layers=[1])).plan([0, 5], [1, 2])
            ),
            "joined": lambda: elsewhere(kvplan.join([program.plan([0], [1]), program.plan([5], [2])])),
            "rank": lambda: elsewhere(kvplan.reshard(src, dst))[0, 0].plan([0, 5], [1, 2]),
            "groups": lambda: elsewhere(kvplan.Groups([program])).plan([[0, 5]], [[1, 2]]),
            "twice": lambda: elsewhere(elsewhere(program.plan([0, 5], [1, 2]))),
        }[what]()
        pairs = [layout for pair in loaded.layouts for layout in pair]
        assert {layout.addresses for layout in pairs} == {"memory"}
        old = {region.address for layout in (src, dst) for region in layout.regions}
        assert not old & {region.address for layout in pairs for region in layout.regions}
        executor.submit(loaded).synchronize()
    wanted = np.zeros((2, 8, 64), np.uint8)
    for layer in layers:
        wanted[layer, [1, 2]] = content[layer, [0, 5]]
    np.testing.assert_array_equal(dst.tensors, wanted)


# A pool that is not there any more, or not the one that was pickled.


def test_a_pool_of_users_that_were_killed_is_not_taken_up_and_goes(name):
    with child(hold, name) as (process, _, answer):
        pickled = answer()
        process.kill()
        process.join()
    assert path_of(name).exists()
    assert pickle.loads(pickled).addresses == "dump"
    assert not path_of(name).exists(), "who finds that nobody uses it unlinks it"


def nobody(path, pool):
    del pool[:]


def another_geometry(path, pool):
    del pool[:]
    pool.append(share(path, "another", [8 * 64]))


def made_anew(path, pool):
    del pool[:]
    pool.append(pool_of(path))


def another_token(path, pool):
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"part kv\n") + 8)
        file.write(b"0" * 32)


def cut(path, pool):
    os.truncate(path, 4096)


@pytest.mark.parametrize("change", [nobody, another_geometry, made_anew, another_token, cut])
def test_a_pool_that_is_not_the_one_any_more_is_not_mapped_made_or_unlinked(path, change):
    pool = [pool_of(path)]
    pickled = pickle.dumps(pool[0])
    change(path, pool)
    gc.collect()
    shared._mapped.clear()
    before = path.read_bytes() if path.exists() else None
    loaded = pickle.loads(pickled)
    assert (loaded.addresses, loaded.regions[0].pool.path) == ("dump", str(path))
    assert (path.read_bytes() if path.exists() else None) == before

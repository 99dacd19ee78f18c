"""The host executor: real transfer semantics, and bytes that arrive whole."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.execute.host import memcpy, tasks
from kvplan.plan import jit
from tests.execute.host_processes import EXITS, WATCH, Broken, pair, python
from tests.patience import PATIENCE, once, takes_no_more
from tests.profiles import examples


def test_a_transfer_s_life():
    src, dst, program = pair()
    gate = threading.Event()
    with kvplan.Executor() as executor:
        transfer = executor.submit(program.plan([1, 2], [5, 6]), after=gate)
        assert not transfer.done()
        assert "in flight" in repr(transfer)
        with pytest.raises(TransferError, match=r"has not finished within 0\.01 seconds"):
            transfer.synchronize(timeout=0.01)
        assert (dst == 0).all()
        gate.set()
        transfer.wait(None)
        assert transfer.done()
        assert "done" in repr(transfer)
        result = transfer.result()
    assert result[:1] + result[2:] == (512, "host", 2, 1)
    assert result.seconds >= 0
    assert (dst[[5, 6]] == src[[1, 2]]).all()
    assert not dst[[0, 1, 2, 3, 4, 7]].any()


def test_transfers_run_in_the_order_of_their_submits():
    src, dst, program = pair(num_blocks=64)
    gate = threading.Event()
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as executor:
        flying = [executor.submit(program.plan([0], [9]), after=gate)]
        flying += [executor.submit(program.plan([k], [9])) for k in range(1, 64)]
        assert not any(transfer.done() for transfer in flying)
        gate.set()
        assert sum(transfer.result().nbytes for transfer in flying) == 64 * 256
    assert (dst[9] == src[63]).all()


def test_close_drains_and_may_be_called_twice():
    src, dst, program = pair()
    gate = threading.Event()
    executor = kvplan.Executor()
    flying = [executor.submit(program.plan([k], [k]), after=gate) for k in range(16)]
    once(lambda: takes_no_more(executor), gate.set)
    executor.close()
    assert all(transfer.done() for transfer in flying)
    assert (dst == src).all()
    executor.close()


def test_a_transfer_waits_for_another_executor_s():
    src, _, program = pair()
    _, last, onward = pair()
    onward = kvplan.compile(program.dst, onward.dst)
    gate = threading.Event()
    with kvplan.Executor() as one, kvplan.Executor() as two:
        first = one.submit(program.plan([3], [4]), after=gate)
        second = two.submit(onward.plan([4], [5]), after=first)
        gate.set()
        second.synchronize()
    assert (last[5] == src[3]).all()


def test_a_failure_belongs_to_its_transfer():
    src, dst, program = pair()
    with kvplan.Executor() as executor:
        failed = executor.submit(program.plan([1], [1]), after=Broken())
        behind = executor.submit(program.plan([2], [2]), after=failed)
        fine = executor.submit(program.plan([3], [3]))
        for transfer in (failed, behind):
            with pytest.raises(TransferError, match="the stream is gone"):
                transfer.result()
            assert transfer.done()
        assert "failed" in repr(failed)
        fine.synchronize()
    assert not dst[[1, 2]].any()
    assert (dst[3] == src[3]).all()


def test_memory_lives_until_its_transfer_is_done():
    src = np.ones((8, 4, 64), np.uint8)
    dst = np.zeros((8, 4, 64), np.uint8)
    alive = weakref.ref(src)
    gate = threading.Event()
    with kvplan.Executor() as executor:
        layouts = [KVLayout.from_tensors("block token dim", t) for t in (src, dst)]
        transfer = executor.submit(kvplan.compile(*layouts).plan([1], [2]), after=gate)
        del src, layouts
        gc.collect()
        assert alive() is not None
        gate.set()
        transfer.synchronize()
        assert (dst[2] == 1).all()
        del transfer
        other = [KVLayout.from_tensors("block dim", part) for part in (dst[:4, 0], dst[4:, 0])]
        executor.submit(kvplan.compile(*other).plan([0], [0])).synchronize()
        gc.collect()
        assert alive() is None


def test_many_threads_submit_at_once():
    src, dst, program = pair(num_blocks=400)
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as executor:

        def work(first):
            for k in range(first, first + 100):
                executor.submit(program.plan([k], [399 - k])).synchronize()

        threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (dst == src[::-1]).all()


def test_large_transfers_are_shared_out_and_arrive_whole():
    rng = np.random.default_rng(1)
    src = [rng.integers(0, 256, (2, 512, 16, 2, 128), np.uint8) for _ in range(6)]
    a = KVLayout.from_tensors("layer: kv block token head dim", src)
    for notation, tokens in (("block layer kv token head dim", 16), ("block layer kv head token dim", 32)):
        pool = kvplan.allocate(notation, like=a, num_blocks=512 * 16 // tokens, block_tokens=tokens)
        back = [np.zeros_like(t) for t in src]
        b = KVLayout.from_tensors("layer: kv block token head dim", back)
        ids = rng.permutation(512)
        host_ids = rng.permutation(pool.num_blocks)
        with kvplan.Executor(policy=kvplan.Policy(threads=2)) as executor:
            there = executor.submit(kvplan.compile(a, pool).plan(ids, host_ids)).result()
            executor.submit(kvplan.compile(pool, b).plan(host_ids, ids)).synchronize()
        assert there.nbytes == a.nbytes >= tasks.STREAMING_NBYTES
        assert there.launches > 1
        for one, other in zip(src, back, strict=True):
            np.testing.assert_array_equal(one, other)


def test_runs_longer_than_a_task_are_cut():
    src = np.random.default_rng(2).integers(0, 256, (3, 9 << 20), np.uint8)
    dst = np.zeros_like(src)
    program = kvplan.compile(*(KVLayout.from_tensors("block dim", t) for t in (src, dst)))
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as executor:
        result = executor.submit(program.plan([0, 2], [2, 0])).result()
    assert (result.descriptors, result.nbytes) == (6, 18 << 20)
    assert (dst[2] == src[0]).all()
    assert (dst[0] == src[2]).all()
    assert not dst[1].any()


@examples(250)
@given(
    nbytes=st.integers(1, 3000), src_at=st.integers(0, 130), dst_at=st.integers(0, 130), streaming=st.booleans(),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_streaming_copies_are_the_plain_ones(nbytes, src_at, dst_at, streaming, seed):
    src = np.random.default_rng(seed).integers(0, 256, 4096, np.uint8)
    dst = np.full(4096, 0xEE, np.uint8)
    one = np.zeros(1, np.int64)
    units = np.array([[src.ctypes.data], [dst.ctypes.data]])
    memcpy.copy_units(units, one + src_at, one + dst_at, one + nbytes, 0, 1, streaming)
    expected = np.full(4096, 0xEE, np.uint8)
    expected[dst_at : dst_at + nbytes] = src[src_at : src_at + nbytes]
    np.testing.assert_array_equal(dst, expected)
    again = np.full(4096, 0xEE, np.uint8)
    memcpy.copy_flat(units[0] + src_at, one + again.ctypes.data + dst_at, one + nbytes, 0, 1, streaming)
    np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize("after", [asyncio.Event(), asyncio.Condition()])
def test_what_must_be_awaited_is_refused(after):
    _, dst, program = pair()
    with kvplan.Executor() as executor:
        with pytest.raises(kvplan.KVPlanError, match=r"asyncio\.locks\.\w+, which must be awaited"):
            executor.submit(program.plan([1], [2]), after=after)
        with pytest.raises(kvplan.KVPlanError, match=r"after is a builtins\.int; give a stream"):
            executor.submit(program.plan([1], [2]), after=3)
    assert not dst.any()


@pytest.mark.parametrize("policy", ["auto", "", 2, kvplan.Policy])
def test_a_policy_is_a_policy(policy):
    with pytest.raises(kvplan.PathError, match=r"give a kvplan\.Policy, such as Policy\(path='auto'\), or None"):
        kvplan.Executor(policy=policy)


@pytest.mark.slow
def test_the_loops_are_loaded_before_the_copying_is_timed(tmp_path):
    code = """
executor.prepare()
assert "kvplan.execute.host.memcpy" in sys.modules
from kvplan.execute.host import memcpy
assert memcpy.copy_units.signatures and memcpy.copy_flat.signatures
executor.submit(program.plan(range(64), range(64))).synchronize()
long = kvplan.compile(*(kvplan.KVLayout.from_tensors("block dim", t.reshape(4, -1)) for t in (src, dst)))
executor.submit(long.plan(range(4), range(4))).synchronize()
assert len(compiled) == 4 and compiled[::2] == compiled[1::2], compiled
"""
    assert python(EXITS + WATCH + code, "2", NUMBA_CACHE_DIR=str(tmp_path)) == (0, "at exit True\n", "")


@pytest.mark.slow
def test_a_first_transfer_at_once_is_timed_without_compiling(tmp_path):
    code = """
executor.submit(program.plan([0], [0])).synchronize()
[before, after] = compiled
assert before == after and before[0], compiled
executor.submit(program.plan(range(64), range(64))).synchronize()
"""
    assert python(EXITS + WATCH + code, "2", NUMBA_CACHE_DIR=str(tmp_path)) == (0, "at exit True\n", "")


def test_making_an_executor_waits_for_no_compiler(monkeypatch):
    src, dst, program = pair()
    gate = threading.Event()
    monkeypatch.setattr(memcpy, "load", gate.wait)
    executor = kvplan.Executor()
    transfer = executor.submit(program.plan([1], [2]))
    assert not transfer.done()
    gate.set()
    executor.close()
    assert (dst[2] == src[1]).all()


def test_loops_that_cannot_be_loaded_are_the_transfers_failures(monkeypatch):
    _, _, program = pair()

    def broken(*_, **__):
        raise OSError("no compiler")

    for name in ("load", "copy_units"):
        monkeypatch.setattr(memcpy, name, broken)
    with kvplan.Executor() as executor, pytest.raises(TransferError, match="no compiler"):
        executor.submit(program.plan([1], [2])).result()


def test_without_helpers_the_runner_copies_alone(monkeypatch):
    src, dst = np.random.default_rng(0).integers(0, 256, (64, 1 << 20), np.uint8), np.zeros((64, 1 << 20), np.uint8)
    program = kvplan.compile(*(KVLayout.from_tensors("block dim", t) for t in (src, dst)))
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("kvplan-copy"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with kvplan.Executor(policy=kvplan.Policy(threads=4)) as executor:
        assert executor.submit(program.plan(range(64), range(64))).result().launches > 1
    assert (dst == src).all()


def test_a_task_that_fails_fails_its_transfer_when_all_have_ended(monkeypatch):
    _, _, program = pair()
    ended, failed, gate = [], threading.Event(), threading.Event()

    def broken():
        failed.set()
        raise OSError("no such page")

    def slow():
        assert gate.wait(PATIENCE)
        ended.append(1)

    with kvplan.Executor(policy=kvplan.Policy(threads=3)) as executor:
        monkeypatch.setattr(tasks, "tasks_of", lambda plan: ([slow, broken, slow, slow], 4))
        transfer = executor.submit(program.plan([1], [2]))
        assert failed.wait(PATIENCE)
        with pytest.raises(TransferError, match="has not finished"):
            transfer.synchronize(0.05)
        gate.set()
        with pytest.raises(TransferError, match="no such page"):
            transfer.result()
        assert len(ended) == 3
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("kvplan-copy") >= 2
        monkeypatch.undo()
        executor.submit(program.plan([1], [2])).synchronize()


def test_a_place_where_numba_cannot_cache_still_compiles(monkeypatch):
    from numba.core import caching

    def loop(n):
        return n + 1

    assert jit.compiled(loop).py_func is loop
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    made = jit.compiled(loop)
    assert (made(2), made.py_func, made.targetoptions["nogil"]) == (3, loop, True)

    def broken(**_):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(jit, "njit", broken)
    with pytest.raises(RuntimeError, match="out of registers"):
        jit.compiled(loop)


@pytest.mark.slow
def test_plans_and_transfers_where_numba_cannot_cache():
    code = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
"""
    rest = "executor.submit(program.plan(range(64), range(64))).synchronize()"
    assert python(code + EXITS + rest, "1") == (0, "at exit True\n", "")

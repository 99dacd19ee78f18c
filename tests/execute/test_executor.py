"""The host executor: real transfer semantics, and bytes that arrive whole."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.execute import memcpy
from tests.execute.host_processes import EXITS, Broken, pair, python
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
    memcpy.copy(units, one + src_at, one + dst_at, one + nbytes, 0, 1, streaming)
    expected = np.full(4096, 0xEE, np.uint8)
    expected[dst_at : dst_at + nbytes] = src[src_at : src_at + nbytes]
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.slow
def test_plans_and_transfers_where_numba_cannot_cache():
    code = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
"""
    rest = "executor.submit(program.plan(range(64), range(64))).synchronize()"
    assert python(code + EXITS + rest, "1") == (0, "at exit True\n", "")


def test_python_without_the_gil_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(kvplan.PathError, match="runs without the GIL"):
        kvplan.Executor()

"""What is prepared: the first transfers compile nothing and upload nothing; and preparing moves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplan
from kvplan.engines.ahead import prepare
from kvplan.execute.kernel_path import MAX_GROUPS
from tests.simulated import Device
from tests.simulated.executors import PATHS, Drawn, executor_on, favouring, pair_on
from tests.strategies import cases

LAYOUT = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
PLAN = kvplan.compile(LAYOUT, LAYOUT).plan([0], [1])
WAYS = [(path, direction) for path in PATHS for direction in ("load", "store", "device")
        if (path, direction) != ("staged", "device")]  # fmt: skip


def made(executor: kvplan.Executor) -> tuple[set[object], int]:
    """Kernels that were compiled, and how many run tables were uploaded."""
    tables = executor._backend.tables
    return set(tables._functions), sum(len(known) for known in tables._known.values())


@pytest.mark.parametrize(("path", "direction"), WAYS)
@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 2**32), named=st.booleans())
def test_a_transfer_finds_all_that_it_needs(path, direction, case, seed, named):
    device = Device(seed)
    drawn = Drawn(case, device, direction)
    one = drawn.program.plan([0], [0])
    roots = drawn.src.roots + drawn.dst.roots
    before = [root.copy() for root in roots]
    profile = None if named else favouring(path)
    with executor_on(device, path if named else "auto", profile) as executor:
        executor.prepare(one)
        device.run()
        for root, was in zip(roots, before, strict=True):
            np.testing.assert_array_equal(root, was)
        assert executor.stats().transfers == 0
        ready = made(executor)
        executor.submit(drawn.plan).synchronize()
        drawn.check()
        if len(one.parts) <= MAX_GROUPS:  # beyond that, kernels are made by the descriptors of each plan
            assert made(executor) == ready


def test_auto_is_ready_for_every_path_that_it_may_take():
    device = Device()
    pair = pair_on(device, "store")
    with executor_on(device) as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert {key[0] for known in executor._backend.tables._known.values() for key in known} == {
            "direct", ("ring", False)
        }  # fmt: skip


def test_a_named_path_is_all_that_is_made_ready():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine") as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert made(executor) == (set(), 0)
    with executor_on(device, "kernel") as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert {key[0] for known in executor._backend.tables._known.values() for key in known} == {"direct"}


def test_tables_are_there_before_anything_can_take_their_memory():
    """The program is dropped at once: what its run table had is given to others, and no upload may be on its way."""
    device = Device(eager=False)
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert not any(device.streams.values())
        assert not any(table.fresh for known in executor._backend.tables._known.values() for table in known.values())


def test_what_a_submit_would_refuse_is_refused_now():
    device = Device()
    pageable = pair_on(device, "load", pin=False).program.plan([0], [0])
    with executor_on(device, "kernel") as executor:
        with pytest.raises(kvplan.HostMemoryError, match="path 'kernel' reaches pinned memory only"):
            executor.prepare(pageable)
        with pytest.raises(kvplan.PathError, match="'host' plan"):
            executor.prepare(PLAN)
        with pytest.raises(kvplan.KVPlanError, match="plan is a int; prepare takes what"):
            executor.prepare(3)
    with pytest.raises(kvplan.TransferError, match="the executor is closed"):
        executor.prepare(PLAN)
    with kvplan.Executor() as executor, pytest.raises(kvplan.PathError, match="path 'host'"):
        executor.prepare(pageable)
    with pytest.raises(kvplan.TransferError, match="the executor is closed"):
        executor.prepare()


def test_pageable_memory_and_empty_plans_need_nothing():
    device = Device()
    with executor_on(device) as executor:
        executor.prepare()
        executor.prepare(pair_on(device, "load", pin=False).program.plan([0], [0]))
        executor.prepare(pair_on(device, "load").program.plan([], []))
        assert made(executor) == (set(), 0)


def test_an_engine_starts_whatever_is_refused(caplog):
    device = Device()
    program = pair_on(device, "load", pin=False).program
    with executor_on(device, "staged") as executor:
        prepare(executor, [program])
    assert "transfers will be refused, or will wait at first: path 'staged' reaches pinned" in caplog.text


def test_loops_that_were_loaded_are_compiled_for_all_that_comes():
    script = Path(__file__).parent / "loaded_loops.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled: nothing\n"

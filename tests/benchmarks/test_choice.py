"""The cases between which the benchmark of choices measures: they have the runs that they name, and move every byte."""

from __future__ import annotations

import pytest

import kvplan
from benchmarks import choice
from benchmarks.choice import PAIRS, Case
from kvplan.measure.workload import DIRECTIONS, Buffers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_case_has_the_runs_that_it_names_and_moves_every_byte(pair, direction, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(choice, "POOL_NBYTES", 1 << 18)
    buffers = Buffers(1 << 21, "cpu", host_nbytes=1 << 22)
    for run_nbytes, blocks in ((128, 3), (1024, 4)):
        case = Case(pair, direction, run_nbytes, blocks)
        src, dst = case.layouts(buffers)
        plan = case.plan(src, dst)
        assert (plan.nbytes, plan.units) == (case.nbytes, blocks)
        assert kvplan.compile(src, dst).run_nbytes == (run_nbytes, run_nbytes)
        assert kvplan.verify(src, dst).ok

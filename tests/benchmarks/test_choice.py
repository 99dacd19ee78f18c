"""The cases between which the benchmark of choices measures: they move every byte, and a wrong byte is seen."""

from __future__ import annotations

import pytest

import kvplan
from benchmarks import choice_pairs
from benchmarks.choice_pairs import PAIRS, Case, Memory, work
from kvplan.measure.workload import DIRECTIONS

pytestmark = [pytest.mark.slow, pytest.mark.slow]


@pytest.fixture
def memory(monkeypatch) -> Memory:
    monkeypatch.setattr(choice_pairs, "POOL_NBYTES", 1 << 18)
    return Memory("cpu", 1 << 21)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_case_has_the_runs_that_it_names_and_moves_every_byte(pair, direction, memory):
    with kvplan.Executor() as executor:
        for run_nbytes, blocks in ((128, 3), (1024, 4)):
            case = Case(pair, direction, run_nbytes, blocks)
            moved = work(memory, case)
            assert (moved.plan.nbytes, moved.plan.units) == (case.nbytes, blocks)
            assert moved.program.run_nbytes == (run_nbytes, run_nbytes)
            moved.verify("host", lambda moved=moved: executor.submit(moved.plan).synchronize())


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("pair", PAIRS)
def test_one_wrong_byte_is_seen(pair, at, memory):
    with kvplan.Executor() as executor:
        moved = work(memory, Case(pair, "store", 256, 2))

        def broken() -> None:
            executor.submit(moved.plan).synchronize()
            moved.dst.flat[at] += 1

        with pytest.raises(kvplan.TransferError, match="other: 1 bytes of the destination are wrong after Case"):
            moved.verify("other", broken)

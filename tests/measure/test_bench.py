"""A bench of the CPU: bytes come before times, and what is not measured is listed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvplan.measure import baselines
from kvplan.measure.bench import Run
from kvplan.measure.grid import Bench, paths_of
from kvplan.measure.rows import Missing
from kvplan.measure.workload import DIRECTIONS, HOSTS

TINY = {"sizes": (512, 4096), "counts": (16, 64), "seconds": 600.0, "most_nbytes": 256 << 10}


def test_all_of_the_cpu_is_measured():
    shares = []
    run = Run(Bench("cpu", **TINY), lambda share, what: shares.append((share, what)))
    found = list(run.rows())
    asked = itertools.product(DIRECTIONS, HOSTS, TINY["sizes"], TINY["counts"], paths_of("cpu"))
    assert Counter((one.direction, one.host, one.run_nbytes, one.runs, one.path) for one in found) == Counter(asked)
    for one in found:
        assert one.verified
        assert one.broken == ""
        assert one.gbps == pytest.approx(one.nbytes / one.seconds / 1e9)
        assert one.samples >= 3
        assert (one.beside, one.slowdown, one.programs) == ("idle", None, None)
    of_memcpy = {(one.direction, one.host, one.run_nbytes, one.runs): one.gbps for one in found
                 if one.path == baselines.MEMCPY}  # fmt: skip
    for one in found:
        assert one.share == pytest.approx(one.gbps / of_memcpy[one.direction, one.host, one.run_nbytes, one.runs])
    assert run.missing == []
    assert [share for share, _ in shares] == sorted(share for share, _ in shares)
    assert shares[0] == (0.0, "memory")
    assert shares[-1] == (1.0, "done")


def test_what_does_not_fit_is_listed():
    asked = Bench("cpu", sizes=(512, 64 << 10), counts=(16,), directions=("load",), hosts=("scattered",),
                  paths=("host",), most_nbytes=64 << 10)  # fmt: skip
    run = Run(asked)
    assert [one.run_nbytes for one in run.rows()] == [512]
    assert run.missing == [Missing("64 KiB x 16", "more than 64 KiB")]


@pytest.mark.parametrize("ticks", [0, 1, 3, 100])
def test_a_spent_budget_lists_what_was_not_measured(ticks):
    """The clock goes on by a second whenever it is read."""
    clock = itertools.count().__next__
    asked = Bench("cpu", **(TINY | {"paths": ("host",), "seconds": ticks + 0.5}))
    run = Run(asked, clock=lambda: float(clock()))
    found = list(run.rows())
    assert len(found) == min(ticks, 16)
    assert len(run.missing) == 16 - len(found)
    assert all(one.why == f"{ticks + 0.5:g} seconds were over" for one in run.missing)
    there = {f"{one.direction}, {one.host}" for one in found}
    assert len(there) == min(len(found), 4)

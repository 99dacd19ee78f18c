"""A bench of the CPU, alone and with a second process: bytes come before times, and what is not measured is listed."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

import kvplan
from kvplan.cost.policy import HOST_ROUTES
from kvplan.measure import bench, processes
from kvplan.measure.bench import ONE, Bench, Run, paths_of, usual
from kvplan.measure.processes import TWO, Remote
from kvplan.measure.rig import Timing, timed
from kvplan.measure.rows import Missing
from kvplan.measure.workload import HOSTS, MEMCPY, Buffers, Geometry, work

TINY = {"sizes": (512, 4096), "counts": (16, 64), "seconds": 600.0, "most_nbytes": 256 << 10}
BETWEEN = usual("cpu", "process") | {"sizes": (512, 2048), "counts": (64,), "most_nbytes": 1 << 20, "seconds": 600.0}
BOTH = [(direction, host) for direction in HOST_ROUTES for host in HOSTS]


@pytest.fixture(autouse=True)
def few_notes(monkeypatch):
    monkeypatch.setattr(processes, "NOTES", 10)
    monkeypatch.setattr(processes, "WARM_NOTES", 2)
    monkeypatch.setattr(bench, "PEER_BLOCK_RUNS", 16)


def measured(asked, ways):
    """The rows of a run, once all of them are there and agree with themselves."""
    shares = []
    run = Run(asked, lambda share, what: shares.append(share))
    rows = [row for row in run.rows() if row.path in ways]
    counts = Bench.counts_of(asked, 512) if asked.peer else asked.counts
    each = itertools.product(asked.directions, asked.hosts, asked.sizes, counts, ways)
    assert Counter((row.direction, row.host, row.run_nbytes, row.runs, row.path) for row in rows) == Counter(each)
    for row in rows:
        assert (row.verified, row.broken, row.beside, row.slowdown, row.programs) == (True, "", "idle", None, None)
        assert row.gbps == pytest.approx(row.nbytes / row.seconds / 1e9)
        assert row.samples >= 3
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    return run, rows


def test_all_of_the_cpu_is_measured():
    run, rows = measured(Bench("cpu", **TINY), paths_of("cpu"))
    of_memcpy = {row.geometry: row.gbps for row in rows if row.path == MEMCPY}
    assert [row.share for row in rows] == pytest.approx([row.gbps / of_memcpy[row.geometry] for row in rows])
    assert run.missing == []


def test_what_does_not_fit_is_listed():
    run = Run(Bench("cpu", sizes=(512, 64 << 10), counts=(16,), directions=("load",), hosts=("scattered",),
                    paths=("host",), most_nbytes=64 << 10))  # fmt: skip
    assert [one.run_nbytes for one in run.rows()] == [512]
    assert run.missing == [Missing("64 KiB x 16", "more than 64 KiB")]


@pytest.mark.parametrize("ticks", [0, 3, 100])
def test_a_spent_budget_lists_what_was_not_measured(ticks):
    """The clock goes on by a second whenever it is read."""
    clock = itertools.count().__next__
    run = Run(Bench("cpu", **(TINY | {"paths": ("host",), "seconds": ticks + 0.5})), clock=lambda: float(clock()))
    found = list(run.rows())
    assert (len(found), len(run.missing)) == (min(ticks, 16), 16 - min(ticks, 16))
    assert {one.why for one in run.missing} <= {f"{ticks + 0.5:g} seconds were over"}
    assert len({(one.direction, one.host) for one in found}) == min(len(found), 4)


def test_all_of_two_processes_is_measured():
    run, _ = measured(Bench("cpu", **BETWEEN | {"hosts": HOSTS}), (TWO, ONE, MEMCPY))
    times = run.processes
    assert (times["transport"], times["block_nbytes"], len(times["meet"])) == ("shm", 16 * 2048, 5)
    assert times["seen"]["samples"] == times["submit"]["samples"] == 10
    assert 0 < times["seen"]["median"] <= times["seen"]["tenth"] <= times["seen"]["hundredth"]


@pytest.mark.parametrize(("direction", "lost"), [("push", "read"), ("pull", "write")])
def test_bytes_that_do_not_arrive_are_told(monkeypatch, direction, lost):
    """The other process's pool is not what it should be: a write of the comparison is lost."""
    monkeypatch.setattr(Remote, lost, lambda remote: None)
    run = Run(Bench("cpu", **BETWEEN | {"directions": (direction,)}))
    found = {one.path: one for one in run.rows() if one.run_nbytes == 512}
    assert "not every byte" in found[TWO].broken
    assert (found[TWO].verified, found[ONE].broken) == (False, "")


@pytest.mark.parametrize(("direction", "host"), BOTH)
@pytest.mark.parametrize(("run_nbytes", "runs", "block_runs"), [(512, 64, 16), (8, 4, 2), (8192, 128, 4)])
def test_a_wrong_byte_is_found(direction, host, run_nbytes, runs, block_runs, executor):
    """Works of both directions share their buffers: what one has inverted, the next does not take for data."""
    shared = Buffers(1 << 20, "cpu", 3 << 20)
    for k, (way, there) in enumerate([*BOTH, (direction, host)]):
        moved = work(shared, Geometry(way, there, run_nbytes, runs, block_runs), k)
        moved.verify("whole", lambda plan=moved.plan: executor.submit(plan).synchronize())

    def almost() -> None:
        executor.submit(moved.plan).synchronize()
        ctypes.c_uint8.from_address(int(moved.plan.descriptors().dst[0]) + 3).value ^= 1

    for name, move, wrong in (("almost", almost, 1), ("nothing", lambda: None, runs)):
        with pytest.raises(kvplan.TransferError, match=rf"^{name}: not every byte .* arrived: {wrong} of {runs} runs"):
            moved.verify(name, move)


class Clock:
    """Time that passes when a transfer takes some: to issue it one microsecond."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def __call__(self) -> float:
        return self.now

    def passes(self, us: float) -> None:
        self.now += us * 1e-6

    def way(self, name: str, us: float):
        seconds = itertools.count(1)

        def begin():
            assert not gc.isenabled(), "a collection may fall into what is timed"
            self.log.append(name)
            self.passes(1)
            return SimpleNamespace(synchronize=lambda: self.passes(us),
                                   result=lambda: SimpleNamespace(seconds=next(seconds) * 1e-6))  # fmt: skip

        return begin


def test_ways_take_turns_as_often_and_as_long_as_asked():
    clock = Clock()
    made = timed({"a": clock.way("a", 1e6)}, seconds=1e-9, warm_ups=2, clock=clock)
    assert len(clock.log) == 2 + 3  # three samples, however long they take
    # The seconds of its transfers are 1, 2, 3 us; the warm-ups are not asked for theirs.
    assert made["a"] == Timing(pytest.approx(2e-6), pytest.approx(1 + 1e-6), pytest.approx(1e-6), 3)
    assert gc.isenabled()
    ways = {"long": clock.way("long", 99), "short": clock.way("short", 9)}
    made = timed(ways, seconds=999.5e-6, most=20, warm_ups=0, clock=clock)
    assert {name: one.samples for name, one in made.items()} == {"long": 10, "short": 20}  # of 100 us, and of 10
    clock.log.clear()
    timed({name: clock.way(name, 10) for name in "abc"}, seconds=1.0, most=30, warm_ups=2, clock=clock)
    rounds = [tuple(clock.log[k : k + 3]) for k in range(6, len(clock.log), 3)]
    assert (clock.log[:6], len(rounds)) == (list("aabbcc"), 30)
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 3, "none always comes behind the same one"

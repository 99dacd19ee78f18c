"""A bench: bytes come before times, and what is not measured is listed. On the CPU, and on a GPU that it acts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvplan.cost.model import Candidate
from kvplan.errors import PathError, TransferError
from kvplan.execute.executor import Executor
from kvplan.measure import baselines, bench, flights
from kvplan.measure.bench import Run
from kvplan.measure.compute import Window
from kvplan.measure.grid import KINDS, Bench, paths_of, usual
from kvplan.measure.rows import Ceilings, Missing
from kvplan.measure.workload import DIRECTIONS, HOSTS, Buffers

torch = pytest.importorskip("torch")

TINY = {"sizes": (512, 4096), "counts": (16, 64), "seconds": 600.0, "most_nbytes": 256 << 10}
GPU = "cuda:0"


# What is measured: on the CPU.


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
        assert one.share == pytest.approx(one.gbps / run.ceilings.load)
        assert one.samples >= 3
        assert (one.beside, one.slowdown, one.programs, one.predicted) == ("idle", None, None, None)
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


def replaced(monkeypatch, maker):
    """The baselines of the CPU are this one."""
    monkeypatch.setattr(bench.baselines, "makers", lambda device: {baselines.MEMCPY: maker})
    few = {"sizes": (512,), "counts": (16,), "directions": ("load",), "hosts": ("contiguous",)}
    return Run(Bench("cpu", paths=(baselines.MEMCPY, "host"), **few, most_nbytes=64 << 10))


def test_wrong_bytes_are_caught_before_they_are_timed(monkeypatch):
    moves = []

    def maker(moved):
        def move():
            moves.append(1)
            baselines._indexing_on_cpu(moved).begin()
            moved.dst.parts[0][int(moved.dst_ids[0]) if not moved.dst.paged else 0] += 1

        return baselines.verified(baselines.MEMCPY, moved, lambda: flights.AtOnce(moved.plan.nbytes, move))

    wrong, right = list(replaced(monkeypatch, maker).rows())
    assert len(moves) == 1
    assert (wrong.path, wrong.verified, wrong.gbps, wrong.seconds, wrong.samples) == (
        baselines.MEMCPY, False, None, None, 0,
    )  # fmt: skip
    assert wrong.broken.startswith("numpy memcpy: not every byte of ")
    assert right.path == "host"
    assert right.gbps > 0


def test_a_baseline_that_refuses_is_listed(monkeypatch):
    def maker(moved):
        raise PathError("it is not for these")

    run = replaced(monkeypatch, maker)
    assert [one.path for one in run.rows()] == ["host"]
    assert run.missing == [Missing("numpy memcpy: load, contiguous, 512 B x 16", "it is not for these")]


def test_a_transfer_that_fails_while_it_is_timed_is_told(monkeypatch):
    def maker(moved):
        calls = itertools.count()

        def begin():
            if next(calls):
                raise TransferError("the\n link is gone")
            return flights.AtOnce(8, lambda: None)

        return baselines.Baseline(begin, lambda: begin().synchronize())

    found = list(replaced(monkeypatch, maker).rows())
    assert [(one.gbps, one.broken) for one in found] == [(None, "the link is gone")] * 2


def test_figures_beyond_a_hard_ceiling_are_no_numbers(monkeypatch):
    monkeypatch.setattr(bench, "_ceilings", lambda buffers: Ceilings(1e-6, 1e-6))
    run = Run(Bench("cpu", **(TINY | {"counts": (16,)})))
    for one in run.rows():
        assert one.gbps is None
        assert one.verified
        assert "GB/s is faster than the link's 0.0 GB/s" in one.broken


# What is measured: on a GPU, acted by the CPU.


class Acted:
    """An executor of a GPU that copies on the CPU."""

    made: list[Acted] = []  # noqa: RUF012

    def __init__(self, device, policy):
        self.device, self.policy = device, policy
        self._executor = Executor("cpu")
        Acted.made.append(self)

    def submit(self, plan):
        if self.policy.path == "copy_engine":
            raise PathError("it is refused")
        return self._executor.submit(plan)

    def candidates(self, plan):
        return [Candidate("staged", 1.0, 2.0), Candidate("kernel", 3.0, 4.0), Candidate("copy_engine_2d", refused="no")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._executor.close()


@pytest.fixture
def acted(monkeypatch):
    """``acted(window)``: all of a GPU is the CPU; windows are this one."""
    Acted.made.clear()
    makers = baselines.makers("cpu")

    def patched(seen):
        def window(compute, begin, **_):
            flight = begin()
            flight.synchronize()
            assert flight.done()
            assert flight.result().seconds >= 0
            if isinstance(seen, Exception):
                raise seen
            return seen

        monkeypatch.setattr(bench, "Executor", Acted)
        monkeypatch.setattr(bench.ceilings, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(bench, "Buffers", lambda nbytes, device, peer: Buffers(nbytes, "cpu"))
        monkeypatch.setattr(bench, "_ceilings", lambda buffers: Ceilings(1e9, 1e9))
        monkeypatch.setattr(bench, "compute_of", lambda device, kind: kind)
        monkeypatch.setattr(bench, "window", window)
        monkeypatch.setattr(
            bench.baselines, "makers",
            lambda device: {baselines.BATCH: makers[baselines.INDEXING], baselines.LOOP: makers[baselines.MEMCPY],
                            baselines.INDEXING: makers[baselines.INDEXING]},
        )  # fmt: skip
        return Run(Bench(GPU, sizes=(512,), counts=(16,), hosts=("scattered",), beside=KINDS, seconds=600.0,
                         most_nbytes=1 << 20))  # fmt: skip

    return patched


@pytest.mark.slow
def test_the_frontier_and_predictions(acted):
    run = acted(Window((0.5, 0.25, 0.75), (1.0, 1.0), (1.5, 1.5), dry=False))
    found = list(run.rows())
    predicted = {(one.direction, one.beside, one.label): one.predicted for one in found}
    fixed = {"copy_engine_2d": None, "staged": 2.0} | dict.fromkeys(baselines.names(GPU))
    assert predicted == {
        **{(way, "idle", path): None for way in DIRECTIONS for path in (*baselines.names(GPU), "copy_engine_2d")},
        **{(way, "idle", path): 1.0 for way in DIRECTIONS for path in ("auto", "staged")},
        **{(way, "idle", "kernel"): 3.0 for way in DIRECTIONS},
        **{(way, "decode", f"kernel, {programs}"): 4.0 for way in DIRECTIONS for programs in (1, 2, 4, 8)},
        ("load", "prefill", "kernel, 4"): 4.0,
        ("store", "prefill", "kernel, 2"): 4.0,
        **{(way, kind, path): wall for way in DIRECTIONS for kind in KINDS for path, wall in fixed.items()},
    }
    for one in found:
        assert one.verified
        assert one.broken == ""
        if one.beside == "idle":
            assert one.programs == (8 if one.path == "kernel" else None)
        else:
            assert (one.seconds, one.wall, one.cpu, one.samples, one.slowdown) == (0.5, 0.5, None, 3, 1.5)
            assert one.gbps == pytest.approx(one.nbytes / 0.5 / 1e9)
            assert (one.host, one.run_nbytes, one.runs) == ("scattered", 8192, 128)
    policies = {(one.policy.path, one.policy.max_programs, one.policy.overlap) for one in Acted.made}
    assert {("kernel", programs, "decode") for programs in (1, 2, 4, 8)} <= policies
    refused = [one for one in run.missing if one.why == "it is refused"]
    assert len(refused) == len(run.missing) == 2 + 4


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "routes"), [("cuda:1", ("push", "pull")), ("cuda:0", ("device",))])
def test_between_gpus(peer, routes, acted, monkeypatch):
    """The pool is a peer's; compute runs on either GPU; NCCL is refused where there is none."""
    cpu_line = pytest.importorskip("tests.measure.cpu_line")
    acted(Window((0.5,), (1.0,), (1.5,), dry=False))
    monkeypatch.setattr(bench.peer_baselines, "Pair", cpu_line.on_the_cpu(monkeypatch))
    monkeypatch.setattr(bench.peer_baselines, "MOST_COPIES", 200)
    monkeypatch.setattr(bench, "_peer_ceilings", lambda buffers, asked: Ceilings(push=1e9, pull=1e9, device=1e9))
    computed = []
    monkeypatch.setattr(bench, "compute_of", lambda device, kind: computed.append((device, kind)))
    asked = usual(GPU, peer) | {"sizes": (512,), "hosts": ("scattered",), "seconds": 600.0, "most_nbytes": 4 << 20}
    run = Run(Bench(GPU, **asked))
    found = list(run.rows())
    assert {one.broken for one in found} == {""}
    where = ["device", "peer"][: len(routes)]
    labels = {(one.direction, one.beside, one.beside_on, one.label, one.programs) for one in found}
    kernels = {None, 4, 8, 16}
    assert {label for label in labels if label[3].startswith("kernel") and label[1] == "decode"} == {
        (way, "decode", on, f"kernel, {few}" if few else "kernel", few)
        for way in routes for on in where for few in kernels
    }  # fmt: skip
    idle = {"push": 132, "pull": 16, "device": 1056}
    assert {label for label in labels if label[3] == "kernel" and label[1] != "decode"} == {
        (way, kind, on, "kernel", None if kind == "prefill" else idle[way])
        for way in routes for kind, on in (("idle", "device"), *(("prefill", on) for on in where))
    }  # fmt: skip
    assert {one.runs for one in found if one.beside == "idle"} == {160, 8160}
    assert {(one.run_nbytes, one.runs) for one in found if one.beside != "idle"} == {(8192, 480)}
    assert set(computed) == {({"device": GPU, "peer": peer}[on], kind) for on in where for kind in KINDS}
    why = {one.why for one in run.missing}
    assert "it makes a copy for each run, and 8,160 runs are more than 200" in why
    assert any("libnccl" in one for one in why) == (peer != GPU)
    # The policy tells what the GPU of the executor computes, and it is idle while its peer computes.
    overlaps = {one.policy.overlap for one in Acted.made if one.policy.max_programs}
    assert overlaps == ({"decode"} if peer == GPU else {"decode", "idle"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (Window((1e-12,), (1.0,), (1.5,), dry=False), "is faster than the link's"),
        (RuntimeError("a transfer has not ended"), "a transfer has not ended"),
    ],
)
def test_what_is_broken_beside_compute_has_no_figures(acted, seen, said):
    for one in acted(seen).rows():
        assert (one.beside == "idle") == (one.broken == "")
        if one.broken:
            assert said in one.broken
            assert (one.gbps, one.slowdown) == (None, None)


@pytest.mark.slow
def test_windows_that_ran_dry_are_tried_again_and_listed(acted):
    run = acted(Window((0.5,), (1.0,), (1.5,), dry=True))
    assert {one.beside for one in run.rows()} == {"idle"}
    dry = [one for one in run.missing if one.why == bench.DRY]
    # The frontier's four, or one kernel; and two paths and three baselines.
    assert len(dry) == 2 * (4 + 2 + 3) + 2 * (1 + 2 + 3)


def test_a_window_is_tried_again(monkeypatch):
    wet, dry = (Window((0.5,), (1.0,), (1.5,), dry=dry) for dry in (False, True))
    left = [dry, wet, dry]
    monkeypatch.setattr(bench, "window", lambda compute, begin, **_: left.pop(0))
    assert bench._window(None, lambda: flights.AtOnce(8, lambda: None)) == wet
    assert left == [dry]


def test_a_budget_that_ends_beside_compute(acted):
    run = acted(Window((0.5,), (1.0,), (1.5,), dry=False))
    # Read at the start, before each task, and before each path beside compute.
    times = iter([0.0] * 6 + [1e9] * 99)
    run.clock = lambda: next(times)
    found = list(run.rows())
    assert [one.label for one in found if one.beside != "idle"] == ["copy_engine_2d"]
    assert {one.why for one in run.missing} == {"it is refused", "600 seconds were over"}
    assert "kernel, 1, load, scattered, 8 KiB x 128, beside decode" in {one.what for one in run.missing}


def test_ceilings_between_gpus_are_those_of_the_routes_asked_for(monkeypatch):
    found = {"push": 395.0, "pull": 394.0}
    monkeypatch.setattr(bench.ceilings, "measure", lambda buffers: found)
    one_way = Bench(GPU, peer="cuda:1", directions=("pull",))
    assert bench._peer_ceilings(None, one_way) == Ceilings(pull=394.0)
    found = {"device": 2060.0, "memory": 4120.0}
    within = Bench(GPU, peer=GPU, directions=("device",))
    assert bench._peer_ceilings(None, within) == Ceilings(device=2060.0, what="memory", hard=False)

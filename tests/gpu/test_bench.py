"""A tiny bench of a real GPU: every path and baseline, alone and beside compute; whatever the times are."""

from __future__ import annotations

import itertools

import pytest

from kvplan.errors import PathError
from kvplan.measure import baselines, flights
from kvplan.measure.bench import Run
from kvplan.measure.grid import Bench, paths_of
from kvplan.measure.workload import DIRECTIONS, HOSTS, Buffers, Geometry, work

DEVICE = "cuda:0"

pytestmark = pytest.mark.gpu


def test_every_path_and_baseline_alone_and_beside_decode():
    asked = Bench(DEVICE, sizes=(4096, 64 << 10), counts=(64,), beside=("decode",), seconds=300.0, most_nbytes=8 << 20)
    run = Run(asked)
    found = list(run.rows())
    assert [row for row in found if not row.verified] == []
    there = {(row.direction, row.host, row.run_nbytes, row.path) for row in found if row.beside == "idle"}
    expected = set(itertools.product(DIRECTIONS, HOSTS, asked.sizes, paths_of(DEVICE)))
    assert there <= expected
    assert not any(one.why.endswith("seconds were over") for one in run.missing)
    # What refuses says so, and is listed: a driver without batches, say; and beside what compute was not kept going.
    beside = {(row.direction, row.label) for row in found if row.beside == "decode"}
    labels = [f"kernel, {programs}" for programs in (1, 2, 4, 8)]
    labels += [path for path in paths_of(DEVICE) if path not in ("auto", "kernel")]
    assert len(there) + len(beside) + len(run.missing) == len(expected) + 2 * len(labels)
    assert beside <= set(itertools.product(DIRECTIONS, labels))
    for row in found:
        assert row.broken or row.gbps > 0
        assert row.beside == "idle" or row.broken or row.slowdown > 0
    for path in ("auto", "kernel", "staged", "copy_engine"):
        assert all(row.predicted > 0 for row in found if row.path == path and not row.broken)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("host", HOSTS)
def test_baselines_move_every_byte_of_many_runs(direction, host):
    """More descriptors than a batch takes in one call."""
    buffers = Buffers(32 << 20, DEVICE, 64 << 20)
    many = work(buffers, Geometry(direction, host, 512, 40_000, 40))
    few = work(buffers, Geometry(direction, host, 8192, 960, 40))
    for name, maker in baselines.makers(DEVICE).items():
        for moved in (many, few):
            try:
                baseline = maker(moved)
            except PathError as error:
                assert name == baselines.BATCH or (moved is many and "more than 8,192" in str(error))  # noqa: PT017
                continue
            baseline.verify()
            result = baseline.begin().result()
            assert result.nbytes == moved.plan.nbytes
            assert result.seconds > 0


def test_baselines_by_a_thread_of_their_own():
    moved = work(Buffers(8 << 20, DEVICE), Geometry("load", "contiguous", 4096, 640, 64))
    with flights.Aside() as aside:
        for maker in baselines.makers(DEVICE).values():
            baseline = maker(moved)
            moved.verify("aside", lambda baseline=baseline: aside.begin(baseline.begin).synchronize())

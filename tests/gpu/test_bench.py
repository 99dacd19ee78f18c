"""A tiny bench of a real GPU: every path and baseline, alone and beside compute; whatever the times are."""

from __future__ import annotations

import itertools

import pytest

from kvplan.measure.bench import Bench, Run, paths_of
from kvplan.measure.workload import DIRECTIONS, HOSTS

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

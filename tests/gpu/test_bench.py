"""A tiny bench of a real GPU: every path and baseline, alone and beside compute; whatever the times are."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvplan.measure import baselines
from kvplan.measure.bench import Run
from kvplan.measure.grid import Bench, paths_of, routes_of, usual
from kvplan.measure.rig import Line
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


PEERS = [DEVICE, pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU"))]


@pytest.mark.parametrize("peer", PEERS)
def test_between_gpus_every_path_and_baseline_alone_and_beside_decode(peer):
    asked = usual(DEVICE, peer) | {"sizes": (512, 8192), "beside": ("decode",), "seconds": 300.0,
                                   "most_nbytes": 16 << 20}  # fmt: skip
    run = Run(Bench(DEVICE, **asked))
    found = list(run.rows())
    assert [(row.label, row.broken) for row in found if not row.verified] == []
    there = {(row.direction, row.path) for row in found if row.beside == "idle"}
    assert there <= set(itertools.product(asked["directions"], paths_of(DEVICE, peer)))
    always = ("auto", "kernel", baselines.COPY, baselines.INDEXING)
    assert there >= set(itertools.product(asked["directions"], always))
    beside = {(row.direction, row.beside_on, row.label) for row in found if row.beside != "idle"}
    wanted = set(itertools.product(asked["directions"], asked["beside_on"], ("kernel", "kernel, 16", baselines.COPY)))
    missing = {one.what for one in run.missing}
    assert wanted <= beside or any("beside decode" in one for one in missing), "compute was not kept going"


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("host", HOSTS)
def test_baselines_between_gpus_move_every_byte(peer, host):
    buffers = Buffers(32 << 20, DEVICE, 64 << 20, peer=peer)
    line = Line(DEVICE, peer)
    for route in routes_of(DEVICE, peer):
        moved = work(buffers, Geometry(route, host, 512, 40_000, 40))
        for name, maker in baselines.makers(line, peer).items():
            baseline = maker(moved)
            for _ in range(3):
                baseline.verify()
            result = baseline.begin().result()
            assert result.nbytes == moved.plan.nbytes, name
            assert result.seconds > moved.plan.nbytes / 5e12

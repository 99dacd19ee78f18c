"""The benchmark of vLLM's worker without a GPU: its jobs and limits, and that a wrong byte is seen."""

from __future__ import annotations

import doctest
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import readme
from benchmarks.gpu import required, vllm_jobs, vllm_rows
from benchmarks.gpu.sizes import KIB
from benchmarks.gpu.vllm_jobs import JOBS, MODELS, MOST_NBYTES, SMOKE_JOBS, Model, times_vllm
from benchmarks.gpu.vllm_rows import COPY, OURS, Peer, Sample, Work, packed, rows_alone, rows_beside
from kvplan.measure.flights import AtOnce
from kvplan.measure.workload import DIRECTIONS
from tests.benchmarks.stepped_gpu import Steps

pytestmark = [pytest.mark.slow, pytest.mark.slow]

VLLM, NONE = Peer("vLLM 0.33.0", is_vllm=True), Peer("a descriptor a page", is_vllm=False)
SMALL = Model("small", 80, 8 * KIB, (16,), (16,))


def test_examples_are_true():
    assert [doctest.testmod(module).failed for module in (vllm_jobs, vllm_rows, readme)] == [0, 0, 0]


def test_the_jobs_are_those_of_the_requirement():
    asked = {(4, 36, 2048), (8, 80, 1024), (16, 80, 1024), (64, 32, 512), (8, 80, 16)}
    alone = {(one.page_nbytes // KIB, one.layers, blocks) for one in MODELS for blocks in one.blocks}
    assert asked <= alone
    assert asked <= {(one.page_nbytes // KIB, one.layers, blocks) for one in MODELS for blocks in one.beside}
    assert {min(one.blocks) for one in MODELS} == {16}
    assert max(max(one.blocks) for one in MODELS) == 4096
    assert max(one.nbytes(max(one.blocks)) for one in MODELS) <= MOST_NBYTES
    assert all(set(one.beside) <= set(one.blocks) for one in (*JOBS.models, *SMOKE_JOBS.models))


def test_what_is_asked_of_every_page():
    alone = {page: tuple(times_vllm(way, page * KIB) for way in DIRECTIONS) for page in (4, 8, 16, 32, 64, 72)}
    assert alone == {4: (1.3, 5.0), 8: (1.3, 2.7), 16: (None, 1.9), 32: (None, None), 64: (1.2, 1.2), 72: (1.2, 1.2)}
    beside = {page: tuple(times_vllm(way, page * KIB, "decode") for way in DIRECTIONS) for page in (4, 8, 16)}
    assert beside == {4: (2.0, None), 8: (2.0, None), 16: (None, None)}


def alone_at(ours_ms, cpu_ms, *, direction="load", peer=VLLM, theirs_ms=1.0):
    medians = {OURS: Sample(ours_ms / 1e3, 5e-5, cpu_ms / 1e3, 0.0), peer.name: Sample(theirs_ms / 1e3, 0, 1e-3, 0.0)}
    return list(rows_alone(Work(SMALL, direction, 16, 55.0), peer, medians, {"path": ["kernel"]}))


def test_a_small_job_has_a_row_of_speed_of_time_and_of_cpu():
    speed, whole, cpu = alone_at(0.25, 0.10)
    assert speed.ours == pytest.approx(16 * 80 * 8192 / 0.25e-3 / 1e9)
    assert speed.what == "load, 16 x 8 KiB, 10 MB"
    assert speed.limit == pytest.approx(1.3 * speed.beside["vLLM 0.33.0"])
    assert speed.beside[COPY] == 55.0
    assert speed.detail["path"] == ["kernel"]
    assert (whole.ours, whole.limit, whole.unit) == (0.25, 0.26, "ms")
    assert (cpu.ours, cpu.limit) == pytest.approx((0.10, 0.1 + 0.03 * 0.25))
    assert [row.ok for row in (speed, whole, cpu)] == [True, True, True]


@pytest.mark.parametrize(
    ("ours_ms", "cpu_ms", "direction", "ok"),
    [
        (0.27, 0.1, "load", (True, False, True)),
        (0.25, 0.11, "load", (True, True, False)),
        (0.80, 0.11, "load", (False, False, True)),  # 1.25 times vLLM
        (0.40, 0.11, "store", (False, False, True)),  # 2.5 times vLLM
        (0.25, 0.10, "store", (True, True, True)),
    ],
)
def test_limits_that_are_missed(ours_ms, cpu_ms, direction, ok):
    assert tuple(row.ok for row in alone_at(ours_ms, cpu_ms, direction=direction)) == ok


def test_without_vllm_no_speed_is_held():
    speed, whole, cpu = alone_at(0.25, 0.2, peer=NONE)
    assert (speed.ok, whole.ok, cpu.ok) == (None, True, False)
    assert set(speed.beside) == {"a descriptor a page", COPY}


def found(ours, theirs, **detail):
    return {
        name: SimpleNamespace(gbps=gbps, slowdown=1.05, detail=detail if name == OURS else {})
        for name, gbps in ((OURS, ours), (VLLM.name, theirs), (COPY, 54.0))
    }


def in_both_layouts(default_ms, blhnc_ms, theirs_ms, theirs_blhnc_ms):
    each = {OURS: default_ms, packed(OURS): blhnc_ms, VLLM.name: theirs_ms, packed(VLLM.name): theirs_blhnc_ms}
    medians = {name: Sample(ms / 1e3, 5e-5, ms / 1e4, 0.0) for name, ms in each.items()}
    return list(rows_alone(Work(SMALL, "load", 16, 55.0), VLLM, medians, {"path": ["kernel"]}))


def test_rows_of_both_layouts_name_the_best_that_vllm_s_user_can_set():
    speed, whole, cpu, packed_speed, packed_cpu, best = in_both_layouts(0.50, 0.40, 1.0, 0.60)
    assert [row.what for row in (packed_speed, packed_cpu)] == [f"{speed.what}, BLHNC", f"{speed.what}, BLHNC: CPU"]
    nbytes = 16 * 80 * 8192
    theirs = {VLLM.name: nbytes / 1e6, packed(VLLM.name): nbytes / 0.6e6}
    assert speed.beside == packed_speed.beside == pytest.approx(theirs | {COPY: 55.0})
    assert speed.limit == pytest.approx(1.3 * theirs[VLLM.name]), "limits are of vLLM's default layout"
    assert (packed_speed.limit, packed_cpu.limit) == (None, None)
    assert whole.beside == pytest.approx({VLLM.name: 1.0, packed(VLLM.name): 0.6})
    assert cpu.beside == pytest.approx({VLLM.name: 0.1, packed(VLLM.name): 0.06})
    assert packed_speed.detail["peer_ms"]["wall"] == pytest.approx(0.6)
    assert (best.what, best.ours) == (f"{speed.what}: over the best of {VLLM.name}", pytest.approx(1.5))
    assert (best.detail["ours"], best.detail["best"]) == (packed(OURS), packed(VLLM.name))
    assert best.detail["times"] == pytest.approx({OURS: 1.2, packed(OURS): 1.5})


def test_no_best_is_made_of_impossible_figures():
    rows = in_both_layouts(0.50, 0.01, 1.0, 0.60)
    assert not [row for row in rows if "over the best" in row.what]
    assert len([row for row in rows if "BROKEN" in row.what]) == 1


def test_the_best_of_vllm_s_layouts_is_the_baseline_in_tables():
    row = {"unit": "GB/s", "ours": 50.0, "beside": {"vLLM": 40.0}}
    assert readme._line("words", row, "vLLM") == "| words | 50 GB/s | vLLM: 40 GB/s | 1.25 |", "of an old result file"
    row["beside"]["vLLM, BLHNC"] = 48.0
    assert readme._line("words", row, "vLLM") == "| words | 50 GB/s | vLLM, BLHNC: 48 GB/s | 1.04 |"
    slow = {"unit": "ms", "ours": 1.0, "beside": {"vLLM": 1.5, "vLLM, BLHNC": 2.0}}
    assert readme._line("words", slow, "vLLM") == "| words | 1 ms | vLLM: 1.5 ms | 1.50 |"


def test_the_table_of_the_docs_shows_both_layouts_if_they_are_recorded():
    both = readme.vllm_table()
    assert "The baseline is the best of vLLM's layouts." in both
    assert "| Llama-8B: load, 512 x 64 KiB, 1.1 GB, BLHNC | 52 GB/s | vLLM 0.33.0, BLHNC: 53.3 GB/s | 0.98 |" in both
    assert "| Llama-70B TP 8: load, 16 x 8 KiB, 10 MB, BLHNC: CPU |" in both
    older = readme.vllm_table(readme.VLLM_RESULT.with_name("gpu-nvidia-h100-80gb-hbm3-vllm-worker.json"))
    assert "BLHNC" not in older
    assert "| Llama-8B: load, 512 x 64 KiB, 1.1 GB | 49.3 GB/s | vLLM 0.33.0: 37.4 GB/s | 1.32 |" in older


def test_beside_decode_a_load_must_be_twice_as_fast():
    work = Work(SMALL, "load", 16, 55.0)
    speed, slower = rows_beside(work, VLLM, "decode", found(41.0, 21.0))
    assert (speed.what, speed.limit, speed.ok) == ("load beside decode, 16 x 8 KiB, 10 MB", 42.0, False)
    assert (slower.what, slower.ours, slower.ok) == (f"{speed.what}: compute slower", 1.05, None)
    assert [row.ok for row in rows_beside(work, VLLM, "prefill", found(41.0, 21.0))] == [None, None]


def test_compute_that_ran_empty_marks_both_rows():
    rows = list(rows_beside(Work(SMALL, "load", 16, 55.0), VLLM, "decode", found(50.0, 20.0, broken="ran empty")))
    assert all(required.missed(row) for row in rows)


# ---- whole runs, on CPU memory ----


def test_a_smoke_run_moves_every_job_and_saves_its_rows(tmp_path, capsys):
    pytest.importorskip("torch", reason="the benchmark's tensors are torch's")
    from benchmarks.gpu import vllm_worker

    made = tmp_path / "made.json"
    assert vllm_worker.main(["--smoke", "--device", "cpu", "--output", str(made)]) == 0
    rows = json.loads(made.read_text())["rows"]
    assert {row["group"] for row in rows} == {model.name for model in SMOKE_JOBS.models}
    assert len(rows) == sum(len(model.blocks) * 2 * 5 for model in SMOKE_JOBS.models)
    best = [row for row in rows if "over the best of" in row["what"]]
    assert len(best) == len(rows) // 5
    for row in best:
        times = row["detail"]["times"]
        assert row["ours"] == pytest.approx(max(times.values()))
        assert set(times) == {OURS, packed(OURS)}
        assert len(row["detail"]["gbps"]) == 4
    speeds = [row for row in rows if row not in best]
    assert all(row["detail"]["path"] == ["host"] for row in speeds)
    assert all(row["detail"]["paths"] == {OURS: ["host"], packed(OURS): ["host"]} for row in speeds)
    assert all(len(row["beside"]) == 2 for row in speeds), "each layout of the other worker"
    assert all(row["limit"] is None for row in rows if "BLHNC" in row["what"])
    assert "not measured" not in capsys.readouterr().err


def test_a_run_beside_compute_has_its_ceilings_first(monkeypatch):
    pytest.importorskip("torch", reason="the benchmark's tensors are torch's")
    import torch

    from benchmarks.gpu import alone, beside_compute, rig, vllm_worker
    from benchmarks.gpu.sizes import SMOKE
    from benchmarks.gpu.vllm_caches import Setup

    large = rig.Way(SMOKE.large_nbytes, lambda: AtOnce(SMOKE.large_nbytes, lambda: None))
    monkeypatch.setattr(alone, "one_large_copy", lambda *_: large)
    monkeypatch.setattr(beside_compute, "compute_of", lambda *_: Steps())
    gpu = SimpleNamespace(scale=SMOKE, device=torch.device("cpu"))
    gpu.speeds = partial(rig.Rig.speeds, gpu)
    setup = Setup(SMOKE_JOBS, gpu)
    ceilings = [row.what for row in vllm_worker.ceilings(setup)]
    assert ceilings[:2] == ["one large copy, load, 8.4 MB", "one large copy, store, 8.4 MB"]
    assert ceilings[2:] == [f"one large copy, {way} beside {kind}" for kind in ("decode", "prefill")
                            for way in DIRECTIONS]  # fmt: skip
    rows = list(vllm_worker.jobs(setup, Model("tiny", 3, 64, (5,), (5,))))
    best = f": over the best of {setup.peer.name}"
    assert [row.what for row in rows] == [
        *(f"{way}, 5 x 64 B, 960 B{more}" for way in DIRECTIONS
          for more in ("", ": CPU", ", BLHNC", ", BLHNC: CPU", best)),
        *(f"{way} beside {kind}, 5 x 64 B, 960 B{more}" for kind in ("decode", "prefill") for way in DIRECTIONS
          for more in ("", ": compute slower", ", BLHNC", ", BLHNC: compute slower", best)),
    ]  # fmt: skip
    assert all(row.detail["transfers"] >= SMOKE.transfers for row in rows
               if "beside" in row.what and best not in row.what)  # fmt: skip


@pytest.fixture
def caches():
    pytest.importorskip("torch", reason="the benchmark's tensors are torch's")
    from benchmarks.gpu import vllm_caches

    made = vllm_caches.Caches(vllm_caches.Setup(SMOKE_JOBS), Model("tiny", 3, 64, (5, 12), ()))
    yield made
    made.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_workers_move_every_byte(caches, direction):
    assert list(caches.workers) == [OURS, caches.setup.peer.name, packed(OURS), packed(caches.setup.peer.name)]
    for name in caches.workers:
        for specs in caches.specs(5):
            caches.verify(name, direction, specs)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fault", ["left out", "elsewhere"])
@pytest.mark.parametrize("layout", ["default", "BLHNC"])
def test_a_wrong_byte_is_seen(caches, direction, fault, layout):
    name = caches.setup.peer.name if layout == "default" else packed(caches.setup.peer.name)
    worker = caches.workers[name]
    whole = worker._enqueue

    def wrong(columns, order):
        if fault == "left out":
            columns.size[3] -= 1
        else:
            columns.dst[[2, 4]] = columns.dst[[4, 2]]
        return whole(columns, order)

    worker._enqueue = wrong
    with pytest.raises(RuntimeError, match=f"not every byte of {direction} of 5 blocks is right"):
        caches.verify(name, direction, caches.specs(5)[0])


def test_a_job_that_failed_is_no_measurement(caches):
    from benchmarks.gpu.vllm_caches import finish

    specs = caches.specs(5)[0]
    specs.host.block_ids[0] = 99
    with pytest.raises(RuntimeError, match="success=False"):
        finish(caches.begin(OURS, "store", specs))


def test_jobs_are_of_different_blocks(caches):
    jobs = caches.specs(12)
    assert len({tuple(specs.blocks) for specs in jobs}) == len(jobs)
    assert all(sorted(specs.chunks) == list(range(12)) for specs in jobs)
    assert all(np.array_equal(specs.device.block_ids, specs.blocks) for specs in jobs)

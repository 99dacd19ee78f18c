"""The GPU's benchmarks without a GPU: sizes, limits, tables, and the parts that measure; nothing here is timed."""

from __future__ import annotations

import ctypes
import doctest
import json
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import environment, required, sizes
from benchmarks.gpu.driver import batch_bytes
from benchmarks.gpu.sizes import FULL, KIB, SMOKE
from benchmarks.record import Row, table
from kvplan.measure import compute
from kvplan.measure.flights import AtOnce
from kvplan.measure.workload import DIRECTIONS, Buffers, Geometry, between, work
from tests.benchmarks.stepped_gpu import Steps

pytestmark = [pytest.mark.slow, pytest.mark.slow]


@pytest.mark.parametrize("module", [sizes, required], ids=lambda module: module.__name__)
def test_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


def test_importing_needs_neither_torch_nor_a_gpu():
    code = ("import sys, benchmarks.gpu.__main__; "
            "assert not {'torch', 'triton', 'numba'} & set(sys.modules), sorted(sys.modules)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_full_sizes_are_those_of_the_requirement():
    assert (FULL.block_nbytes, FULL.medium_nbytes, FULL.large_nbytes) == (1_310_720, 335_544_320, 1_342_177_280)
    assert FULL.kernel_runs == tuple(size * KIB // 2 for size in (1, 2, 4, 8, 16, 32, 64, 128))
    assert {blocks * FULL.block_nbytes for blocks in FULL.small} == {1_310_720, 5_242_880, 20_971_520, 83_886_080}


@pytest.mark.parametrize("scale", [FULL, SMOKE], ids=["full", "smoke"])
def test_every_size_fits_the_buffers_and_is_whole(scale):
    for run_nbytes in (*scale.kernel_runs, *scale.pitched_runs, *scale.engine_runs):
        shape = sizes.shape_of(run_nbytes)
        assert np.prod(shape) * sizes.ITEMSIZE == run_nbytes
        assert shape.tokens >= 16
        for nbytes in (scale.medium_nbytes, scale.large_nbytes):
            made = scale.blocks(nbytes, run_nbytes) * scale.planes * run_nbytes
            assert made == nbytes or (made <= scale.large_nbytes and run_nbytes > 64 * KIB)
    assert max(*scale.small, *(blocks for blocks, _ in scale.submits), scale.medium) <= scale.large


def test_what_the_kernel_s_loads_must_reach():
    asked = {(size, programs): required.kernel_share(size, programs)
             for size in FULL.kernel_runs for programs in FULL.programs}  # fmt: skip
    assert {at: share for at, share in asked.items() if share} == {
        (512, 12): 0.90, (KIB, 8): 0.97, (2 * KIB, 4): 0.97,
        **{(size * KIB, 2): 0.97 for size in (4, 8, 16, 32, 64)},
    }  # fmt: skip


def test_a_speed_is_held_against_the_first_number_beside_it():
    row = required.speed_row("staged", "load", 53.0, {"one large copy": 55.0, "other": 4.0}, link=55.0, share=0.97)
    assert (row.limit, row.rule, row.ok) == (0.97 * 55.0, "0.97 x one large copy", False)
    assert required.missed(row)
    assert not required.missed(required.speed_row("staged", "load", 1.0, {}, link=55.0))


def test_a_speed_above_the_link_counts_as_broken():
    row = required.speed_row("staged", "load", 60.0, {"one large copy": 55.0}, link=55.0, share=0.97)
    assert (row.limit, row.ok) == (None, None)
    assert "BROKEN" in table([row])
    assert required.missed(row)


def test_a_baseline_above_the_link_counts_as_broken_too():
    row = required.speed_row("staged", "load", 50.0, {"one large copy": 55.0, "baseline": 99.0}, link=55.0, share=0.9)
    assert "99.0 GB/s is above the link's 55.0" in row.detail["broken"]


def test_a_staged_submit_may_take_a_share_of_the_transfer():
    assert required.staged_submit_us(24e-3) == pytest.approx(820)


def test_ceilings_are_always_measured_and_first():
    assert command.arguments_of([]).run == list(command.GROUPS)
    assert command.arguments_of(["beside", "ceilings", "--budget", "9"]).run == ["ceilings", "beside"]
    with pytest.raises(SystemExit) as left:
        command.arguments_of(["nothing"])
    assert left.value.code == 2


def measured(name, count):
    def group(_):
        for k in range(count):
            yield Row(name, f"row {k}", "GB/s", 50.0, {"one large copy": 55.0}, detail={"slowdowns": [1.0]})

    return group


def broken(_):
    yield Row("broken", "row 0", "us", 1.0)
    raise RuntimeError("no such path")


def test_groups_fail_alone_and_are_reported_one_by_one(capsys):
    reports = []
    result = command.run({"ceilings": measured("ceilings", 1), "broken": broken, "small": measured("small", 2)}, None,
                         budget=1e9, report=lambda rows, failed: reports.append((len(rows), dict(failed))))  # fmt: skip
    assert [count for count, _ in reports] == [1, 2, 4]
    assert result.failed == {"broken": "RuntimeError: no such path"}
    printed = capsys.readouterr()
    assert "small" in printed.out
    assert "Traceback" in printed.err


def test_nothing_is_measured_without_ceilings():
    def none(_):
        raise RuntimeError("no memory")
        yield

    result = command.run({"ceilings": none, "small": measured("small", 2)}, None, budget=1, report=lambda *_: None)
    assert result.rows == []
    assert set(result.failed) == {"ceilings"}


def test_a_spent_budget_cuts_groups_short():
    groups = {"ceilings": measured("ceilings", 3), "staged": measured("staged", 3), "small": measured("small", 3)}
    result = command.run(groups, None, budget=0.0, report=lambda *_: None)
    assert [row.group for row in result.rows] == ["ceilings"] * 3 + ["staged", "small"]
    assert "the budget of 0 s is spent" in result.failed["staged"]


def test_what_nvidia_smi_says():
    told = environment.read_smi("580.1, 5, [N/A], 16, 1980, 2619, 700.00\n")
    assert told == {"driver": "580.1", "pcie_generation": "5", "pcie_width": "16", "sm_mhz": "1980",
                    "memory_mhz": "2619", "watts_most": "700.00"}  # fmt: skip
    assert environment.read_smi("") == {}


def test_a_document_says_what_made_it():
    rows = list(measured("small", 1)(None))
    made = environment.gpu_document(rows, scale=SMOKE, started={"load": []}, about={"name": "H"}, failed={"a": "b"})
    assert json.loads(json.dumps(made))["machine"]["gpu"] == {"name": "H"}
    assert {"kvplan", "numpy", "numba"} <= set(made["versions"])
    assert made["failed"] == {"a": "b"}
    assert environment.default_path("NVIDIA H100 80GB HBM3", ()).name == "gpu-nvidia-h100-80gb-hbm3.json"
    assert environment.default_path("NVIDIA H200", ["small"]).name == "gpu-nvidia-h200-small.json"


def test_attributes_of_a_batch_are_24_bytes():
    assert ctypes.sizeof(batch_bytes.Attributes) == 24


def test_a_window_counts_iterations_alone_and_wholly_beside_transfers():
    steps, begun = Steps(), []

    def begin():
        left = [5]
        begun.append(steps.passed)
        return SimpleNamespace(done=lambda: left.append(left.pop() - 1) or left[0] <= 0)

    found = compute.window(steps, begin, warm=3, alone=4, transfers=3, seconds=0.0)
    assert len(found.transfers) == len(begun) == 3
    assert len(found.alone) == 4
    assert found.beside
    assert found.alone == tuple(float(k + 2) for k in range(3, 7))
    assert min(found.beside) > max(found.alone) + 1  # the iteration that ran at the first call is neither
    assert not found.dry
    assert found.slowdown > 1


def test_a_queue_that_ran_empty_is_noticed():
    steps = Steps()
    feeder = compute.Feeder(steps, ahead=2)
    feeder.top_up()
    assert not feeder.dry
    steps.drain()
    feeder.top_up()
    assert feeder.dry
    assert feeder.finished == 2
    assert steps.gpu_work == 4


@pytest.fixture
def pages(monkeypatch):
    """``pages(direction, count)``: blocks of a pool of kvplan.allocate and a cache of a tensor a layer, on the CPU."""
    pytest.importorskip("torch")
    from benchmarks.gpu import rig

    monkeypatch.setattr(rig, "RUN_NBYTES", 512)
    host, device = rig.pool_and_cache(3, 10, "cpu")
    assert (len(host.parts), len(device.parts)) == (1, 3)

    def work(direction, count, seed=0):
        return between(host, device, Geometry(direction, "contiguous", 512, 6 * count, 6), "cpu", seed)

    return work


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 7])
def test_what_is_compared_is_what_a_plan_moves(direction, count, pages, executor):
    import torch

    moved = pages(direction, count)
    src_ids, dst_ids = (torch.from_numpy(ids) for ids in (moved.src_ids, moved.dst_ids))
    for part in moved.dst.parts:
        part.zero_()
    executor.submit(moved.plan).synchronize()
    assert torch.equal(moved.dst.select(dst_ids, 6), moved.src.select(src_ids, 6))
    assert bool(moved.src.select(src_ids, 6).all())
    others = sorted(set(range(10)) - set(dst_ids.tolist()))
    assert not bool(moved.dst.select(torch.tensor(others), 6).any())
    moved.verify("host", lambda: executor.submit(moved.plan).synchronize())
    with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
        moved.verify("nothing", lambda: None)


@pytest.mark.parametrize("host", ["scattered", "contiguous"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_front_of_the_buffers_has_no_other_blocks_than_those_moved(direction, host, executor):
    pytest.importorskip("torch")
    moved = work(Buffers(1 << 20, "cpu").front(7 * 6 * 512), Geometry(direction, host, 512, 7 * 6, 6))
    assert (moved.src.layout.num_blocks, moved.dst.layout.num_blocks) == (7, 7)
    moved.verify("host", lambda: executor.submit(moved.plan).synchronize())


def test_plans_of_one_pair_share_a_program(pages):
    first, second = pages("load", 4), pages("load", 4, seed=1)
    assert first.program is second.program
    assert first.src_ids.tolist() != second.src_ids.tolist()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_torch_indexing_moves_what_the_plan_moves(direction, pages, monkeypatch):
    torch = pytest.importorskip("torch")
    from kvplan.measure import baselines

    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(baselines, "Enqueued", lambda line, nbytes, issue: AtOnce(nbytes, issue))
    line = SimpleNamespace(
        staging=lambda nbytes: [torch.empty(nbytes // 8, dtype=torch.int64) for _ in range(2)],
        stream=SimpleNamespace(synchronize=lambda: None),
    )
    baselines.indexing(line, pages(direction, 4)).verify()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("name", "wide"), [("contiguous", True), ("one_at_a_time", False)])
def test_kernels_compile_with_words_of_the_stated_width(name, wide):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.gpu import kernels

    source = triton.JITFunction(getattr(kernels, name).fn)
    counts = {"contiguous": kernels.CEILING_WORDS, "one_at_a_time": kernels.BASELINE_WORDS}
    warps = {"contiguous": kernels.CEILING_WARPS, "one_at_a_time": kernels.BASELINE_WARPS}
    kinds = {arg: "i32" if arg == "count" else "constexpr" if arg == "WORDS" else "*i64" for arg in source.arg_names}
    aligned = [k for k, arg in enumerate(source.arg_names) if kinds[arg] == "*i64" or (wide and arg == "count")]
    made = triton.compile(ASTSource(source, kinds, {"WORDS": counts[name]},
                                    {(k,): [["tt.divisibility", 16]] for k in aligned}),
                          target=GPUTarget("cuda", 90, 32), options={"num_warps": warps[name]})  # fmt: skip
    words = set(re.findall(r"st\.global\.(\S+)", made.asm["ptx"]))
    assert words == ({"v2.b64"} if wide else {"b64"})


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setenv(environment.CONNECTIONS, "8")  # and is put back
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("has one")
    assert command.main(["--smoke"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_every_group_is_where_the_command_looks_for_it():
    pytest.importorskip("torch")
    from importlib import import_module

    for name, module in command.GROUPS.items():
        assert callable(getattr(import_module(f"benchmarks.gpu.{module}"), name))
    assert kvplan.Policy


def test_loads_by_layer_become_rows_that_hold_their_limits(monkeypatch):
    pytest.importorskip("torch")
    from benchmarks.gpu import latency

    times, kept = {"quiet": 100.0, "kept": 119.0}, []

    def by_layer(executor, plan, *, kept_us=kept, **more):
        kept_us.append(more.get("kept", 0.0))
        return latency.Load(400.0, 2.0, 50.0, times["kept" if more.get("kept") else "quiet"])

    monkeypatch.setattr(latency, "by_layer", by_layer)
    rows = list(latency._interpreter(None, [None] * (latency.WARM_UPS + 5), "4 layers"))
    computes, keeps, submit, *_ = rows
    assert (keeps.ours, keeps.limit, keeps.ok) == (119.0, pytest.approx(120.0), True)
    assert computes.ok
    assert (submit.ours, submit.limit, submit.ok) == (400.0, 500.0, True)
    assert set(kept) == {0.0, 200.0}  # the interpreter is kept for longer than a load takes
    times["kept"] = 121.0
    assert [row.ok for row in latency._interpreter(None, [None] * 9, "4 layers")][1] is False


def test_plans_by_layer_move_every_layer_of_other_blocks(executor):
    pytest.importorskip("torch")
    from benchmarks.gpu import latency

    plans = latency.plans_by_layer(3, 64, 5, 2, "cpu")
    assert [plan.nbytes for plan in plans] == [3 * 64 * 5] * 2
    assert plans[0].layers == (0, 1, 2)
    for plan in plans:
        executor.submit(plan).synchronize()


def test_a_thread_that_computes_ends():
    pytest.importorskip("torch")
    from benchmarks.gpu import latency

    before = set(threading.enumerate())
    with latency.computing(busy=True):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before

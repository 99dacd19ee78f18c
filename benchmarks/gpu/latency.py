"""CPU time of a submit, the time of small transfers, and loads beside a thread that keeps the interpreter."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

import kvplan
from benchmarks.gpu.alone import COPY
from benchmarks.gpu.required import (
    KEPT_RATIO,
    LATENCY_BLOCKS,
    LATENCY_US,
    SMALL_BLOCKS,
    SMALL_SHARE,
    SUBMIT_KERNEL_US,
    SUBMIT_LAYERS_US,
    staged_submit_us,
)
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.cuda.call_list import CallList
from kvplan.cuda.device import NOT_READY
from kvplan.errors import PathError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.measure.baselines import BATCH, batch_call
from kvplan.measure.timing import no_collection
from kvplan.measure.workload import DIRECTIONS, Work

SMALL_PATHS = ("auto", "staged", "kernel")
BARE = "the driver's calls alone"
WARM_UPS = 3


def works_of(rig: Rig, direction: str, blocks: int, times: int) -> list[Work]:
    """Transfers of as many blocks each, of other ids."""
    return [rig.pages(direction, blocks, seed) for seed in range(1, times + 1)]


def submit(rig: Rig) -> Iterator[Row]:
    """Microseconds of the call of submit, with the GPU idle before; every plan has new ids."""
    for path in ("kernel", "staged"):
        with rig.executor(path) as executor:
            for blocks, repeats in rig.scale.submits:
                for direction in DIRECTIONS:
                    works = works_of(rig, direction, blocks, WARM_UPS + repeats)
                    rig.ours(executor, works[0], path)
                    yield _submit(rig, path, executor, works)


def _submit(rig: Rig, path: str, executor: Any, works: Sequence[Work]) -> Row:
    calls, moves = [], []
    with no_collection():
        for work in works:
            torch.cuda.synchronize()
            start = time.perf_counter()
            transfer = executor.submit(work.plan)
            calls.append(time.perf_counter() - start)
            transfer.synchronize()
            moves.append(transfer.result().seconds)
    calls, moves = sorted(calls[WARM_UPS:]), moves[WARM_UPS:]
    moved = statistics.median(moves)
    direction, count = works[0].plan.direction, works[0].plan.units
    if path == "kernel":
        limit, rule = SUBMIT_KERNEL_US, f"{SUBMIT_KERNEL_US:g} us"
    else:
        limit, rule = staged_submit_us(moved), "100 us + 3 % of the transfer"
    detail = {"most_us": calls[-1] * 1e6, "transfer_us": moved * 1e6, "samples": len(calls)}
    what = f"{path}, {direction}, {count:,} block{'s' * (count > 1)}, {spell(works[0].plan.nbytes)}"
    return Row("submit", what, "us", statistics.median(calls) * 1e6, _batch_call(rig, works[0]), limit, rule,
               detail=detail)  # fmt: skip


def _batch_call(rig: Rig, work: Work) -> dict[str, float]:
    """The same time of the baseline's calls, whose descriptors are ready beforehand."""
    try:
        issue, calls = batch_call(rig.lines[work.geometry.direction], work.plan), []
    except PathError:
        return {}
    for _ in range(WARM_UPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        issue()
        calls.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return {BATCH: statistics.median(calls) * 1e6}


def small(rig: Rig) -> Iterator[Row]:
    """Few blocks: time on the GPU from first to last event, and until the host sees it done."""
    for path in SMALL_PATHS:
        with rig.executor(path) as executor:
            for blocks in rig.scale.small:
                for direction in DIRECTIONS:
                    works = works_of(rig, direction, blocks, WARM_UPS + rig.scale.small_repeats)
                    rig.ours(executor, works[0], path)
                    yield from _small(rig, path, executor, works)


def _small(rig: Rig, path: str, executor: Any, works: Sequence[Work]) -> Iterator[Row]:
    """The limits are for ``auto``, which may take any path; the detail names the path."""
    direction, nbytes = works[0].plan.direction, works[0].plan.nbytes
    gpu, seen, taken = [], [], set()
    with no_collection():
        for work in works:
            torch.cuda.synchronize()
            start = time.perf_counter()
            transfer = executor.submit(work.plan)
            while not transfer.done():
                if transfer.queued:
                    time.sleep(0)  # a thread of the executor needs the interpreter; in a sandbox this takes 60 us
            seen.append((time.perf_counter() - start) * 1e6)
            result = transfer.result()
            gpu.append(result.seconds * 1e6)
            taken.add(result.path)
    link = nbytes / rig.ceilings.copy[direction] / 1e3
    beside = {f"bytes / {COPY}": link}
    what, blocks, detail = f"{direction}, {spell(nbytes)}, {path}", works[0].plan.units, {"taken": sorted(taken)}
    held = path == "auto" and blocks == SMALL_BLOCKS
    ours = statistics.median(gpu[WARM_UPS:])
    if ours * 1.03 < link:
        detail["broken"] = "faster than the link"
    yield Row("small", f"{what}: GPU", "us", ours, beside, SMALL_SHARE * link if held else None,
              f"{SMALL_SHARE} x bytes / link" if held else "", detail=detail)  # fmt: skip
    held = path == "auto" and blocks == LATENCY_BLOCKS
    if path == "kernel":
        beside = beside | {BARE: _bare(executor, works)}
    yield Row("small", f"{what}: seen by the host", "us", statistics.median(seen[WARM_UPS:]), beside,
              LATENCY_US if held else None, f"{LATENCY_US:g} us" if held else "", detail=detail)  # fmt: skip


def _bare(executor: Any, works: Sequence[Work]) -> float:
    """Median microseconds of the same launches without a submit: headers are written before, and kept.

    Two events, the launch between them, and a loop that asks for the second event: no executor can take less.
    """
    backend, plan = executor._backend, works[0].plan
    resources, path, lane = backend.resources, backend.paths["kernel"], backend.lanes[plan.direction]
    device, query, seen = resources.device, resources.device.driver.cuEventQuery, []
    for work in works:
        transfer = DeviceTransfer(work.plan, resources, backend.callbacks, "kernel")
        with device.current():
            calls = CallList()
            path.write(transfer, path.prepare(transfer, work.plan, lane), calls)
            begin, end = transfer.event(), transfer.event()
            torch.cuda.synchronize()
            start = time.perf_counter()
            device.record(begin, lane.kernel)
            transfer.play(calls)
            device.record(end, lane.kernel)
            while query(end) == NOT_READY:
                pass
            seen.append((time.perf_counter() - start) * 1e6)
        transfer.give_back()
    return statistics.median(seen[WARM_UPS:])


# Loads by layer beside a thread that keeps the interpreter.

_KEEPS = ctypes.PyDLL(None)  # calls through it keep the interpreter: no bytecode runs in any thread meanwhile
QUIET, COMPUTES, KEEPS = "quiet", "a thread computes in Python", "a C call keeps the interpreter"


class Load(NamedTuple):
    """Microseconds of one load by layer.

    Attributes:
        submit: of the call of submit.
        wait: of a call of wait_layer; the mean over all layers.
        first: from the call of submit until the first group of layers has arrived; 0 if nobody looked.
        end: from the record of an event, right before the submit, until the transfer's end on the GPU.
    """

    submit: float
    wait: float
    first: float
    end: float


def interpreter(rig: Rig) -> Iterator[Row]:
    """Loads by layer on the staged path, alone and beside a thread that keeps the interpreter.

    Events of the GPU measure them, because no thread can read the host's clock in the meantime.
    """
    for layers, page, blocks in rig.scale.engines:
        with rig.executor("staged") as executor:
            plans = plans_by_layer(layers, page, blocks, WARM_UPS + rig.scale.engine_repeats, str(rig.device))
            executor.prepare(plans[0], by_layer=True)
            yield from _interpreter(executor, plans, f"{layers} layers x {spell(page)}, {blocks} blocks")


def plans_by_layer(layers: int, page: int, blocks: int, times: int, device: str) -> list[kvplan.Plan]:
    """Loads of other blocks each, from a pool that holds all layers of a block together, to a tensor a layer."""
    like = [torch.empty((2 * blocks, page), dtype=torch.uint8, device=device) for _ in range(layers)]
    cache = kvplan.KVLayout.from_tensors("layer: block dim", like)
    pool = torch.empty((2 * blocks, layers, page), dtype=torch.uint8, pin_memory=device != "cpu")
    program = kvplan.compile(kvplan.KVLayout.from_tensors("block layer dim", pool), cache)
    rng = np.random.default_rng(1)
    return [program.plan(*(rng.permutation(2 * blocks)[:blocks] for _ in range(2))) for _ in range(times)]


@contextmanager
def computing(*, busy: bool) -> Iterator[None]:
    """A thread that computes in Python without pause, if ``busy``."""
    over = False

    def compute() -> None:
        count = 0
        while not over:
            count += 1

    thread = threading.Thread(target=compute, daemon=True)
    if busy:
        thread.start()
    try:
        yield
    finally:
        over = True
        if busy:
            thread.join()


def _interpreter(executor: Any, plans: Sequence[kvplan.Plan], what: str) -> Iterator[Row]:
    loads: dict[str, list[Load]] = {QUIET: [], COMPUTES: [], KEEPS: []}
    longest = 0.0
    with no_collection():
        for case, found in loads.items():
            with computing(busy=case == COMPUTES):
                for plan in plans:
                    found.append(by_layer(executor, plan, kept=longest if case == KEEPS else 0.0))
            if case == QUIET:
                longest = 2 * max(load.end for load in found)
    quiet, *others = ((name, found[WARM_UPS:]) for name, found in loads.items())
    alone = statistics.median(load.end for load in quiet[1])
    for name, found in others:
        ours = statistics.median(load.end for load in found)
        detail = {"most_us": max(load.end for load in found), "submit_us": _quantiles(found, "submit"),
                  "wait_layer_us": _quantiles(found, "wait")}  # fmt: skip
        yield Row("interpreter", f"{what}: {name}", "us", ours, {QUIET: alone}, KEPT_RATIO * alone,
                  f"{KEPT_RATIO} x {QUIET}", detail=detail)  # fmt: skip
    submits = _quantiles(quiet[1], "submit")
    yield Row("interpreter", f"{what}: submit by layer", "us", submits["p50"], {}, SUBMIT_LAYERS_US,
              f"{SUBMIT_LAYERS_US:g} us", detail=submits)  # fmt: skip
    waits = _quantiles(quiet[1], "wait")
    yield Row("interpreter", f"{what}: wait_layer", "us", waits["p50"], detail=waits)
    firsts = _quantiles(quiet[1], "first")
    yield Row("interpreter", f"{what}: from submit until the first layers", "us", firsts["p50"], detail=firsts)


def by_layer(executor: Any, plan: kvplan.Plan, *, kept: float = 0.0) -> Load:
    """Load once; if ``kept``, this thread keeps the interpreter so many microseconds right after the submit."""
    # kvplan's own event times the begin, too: to record an event of torch gives the interpreter up, for 5 ms at times.
    device, stream = executor._backend.resources.device, torch.cuda.current_stream()
    begin = device.event()
    torch.cuda.synchronize()
    device.record(begin, stream.cuda_stream)
    start = time.perf_counter()
    transfer = executor.submit(plan, by_layer=True)
    submitted = time.perf_counter()
    end, marks, first = transfer._end, transfer._marks, 0.0
    if kept:
        _KEEPS.usleep(int(kept))
    else:
        query = device.driver.cuEventQuery
        transfer._await_rows(marks[0].rows)
        while query(marks[0].event) == NOT_READY:
            pass
        first = time.perf_counter() - start
    asked = time.perf_counter()
    for layer in plan.layers:
        transfer.wait_layer(layer, stream)
    waited = time.perf_counter() - asked
    transfer.await_issue()
    torch.cuda.synchronize()
    # kvplan's own event times the end, whenever a thread of the host looks.
    passed = device.seconds(begin, end)
    device.driver.cuEventDestroy_v2(begin)
    transfer.synchronize()
    return Load(*(1e6 * each for each in (submitted - start, waited / len(plan.layers), first, passed)))


def _quantiles(loads: Sequence[Load], name: str) -> dict[str, float]:
    values = sorted(getattr(load, name) for load in loads)
    return {"p50": values[len(values) // 2], "p90": values[len(values) * 9 // 10]}

"""``python -m benchmarks.gpu.vllm_worker``: kvplan's worker of vLLM's CPU offloading against vLLM's own, whole jobs.

Both move the same blocks between the same caches and the same host rows, and are asked by ``get_finished`` until they
say so. Each runs over the caches in vLLM's default layout, and over those in BLHNC, which a user of vLLM can choose:
every row of ours names vLLM's best. Needs vLLM 0.33's Python on the path; without it, ours stands beside one
descriptor a page.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import vllm_peer
from benchmarks.gpu.__main__ import CEILINGS, conclude, run
from benchmarks.gpu.environment import CONNECTIONS, MOST_CONNECTIONS, default_path, gpu, gpu_document, told_by_smi
from benchmarks.gpu.sizes import FULL, SMOKE, spell
from benchmarks.gpu.vllm_caches import DIFFERENT, Caches, Setup, finish
from benchmarks.gpu.vllm_jobs import JOBS, SMOKE_JOBS, SPUN_NBYTES, JobScale, Model
from benchmarks.gpu.vllm_peer import Specs
from benchmarks.gpu.vllm_rows import COPY, OURS, Sample, Work, packed, rows_alone, rows_beside
from benchmarks.record import Row, machine, save
from kvplan.measure.timing import no_collection
from kvplan.measure.workload import DIRECTIONS

WARM_UPS = 3


def ceilings(setup: Setup) -> Iterator[Row]:
    """One large copy each way, alone and beside compute; other groups are held against it."""
    if setup.rig is None:
        return
    from benchmarks.gpu.alone import one_large_copy

    found = setup.rig.speeds({direction: one_large_copy(setup.rig, direction) for direction in DIRECTIONS})
    for direction, speed in found.items():
        setup.copy[direction] = speed.gbps
        yield Row(CEILINGS, f"{COPY}, {direction}, {spell(speed.nbytes)}", "GB/s", speed.gbps,
                  detail={"wall_gbps": speed.wall_gbps})  # fmt: skip
    for kind in setup.scale.rounds:
        for direction in DIRECTIONS:
            made = setup.copy_beside(kind, direction)
            detail = made.detail | {"slowdown": made.slowdown}
            yield Row(CEILINGS, f"{COPY}, {direction} beside {kind}", "GB/s", made.gbps, detail=detail)


def sample(caches: Caches, name: str, direction: str, specs: Specs) -> Sample:
    """One job, nothing else running."""
    pause = caches.model.nbytes(len(specs.blocks)) > SPUN_NBYTES
    caches.setup.synchronize()
    process, thread = time.process_time(), time.thread_time()
    start = time.perf_counter()
    job = caches.begin(name, direction, specs)
    call = time.perf_counter() - start
    answer = finish(job, pause=pause)
    wall = time.perf_counter() - start
    others = max(0.0, (time.process_time() - process) - (time.thread_time() - thread))
    return Sample(wall, call, call + answer + others, others)


def alone(caches: Caches, direction: str, blocks: int) -> Iterator[Row]:
    """All workers in turn, once every byte was seen to arrive."""
    setup, model, specs = caches.setup, caches.model, caches.specs(blocks)
    for name in caches.workers:
        caches.verify(name, direction, specs[0])
    work = Work(model, direction, blocks, setup.copy[direction])
    repeats = setup.scale.repeats if work.nbytes <= SPUN_NBYTES else setup.scale.large_repeats
    taken: dict[str, list[Sample]] = {name: [] for name in caches.workers}
    ours, others = (OURS, packed(OURS)), (setup.peer.name, packed(setup.peer.name))
    before = {name: caches.paths(name) for name in ours}
    with no_collection():
        for turn in range(WARM_UPS + repeats):
            for name, samples in taken.items():
                samples.append(sample(caches, name, direction, specs[turn % DIFFERENT]))
    counted = {name: samples[WARM_UPS:] for name, samples in taken.items()}
    medians = {name: Sample(*map(statistics.median, zip(*samples, strict=True))) for name, samples in counted.items()}
    taken_by = {
        name: sorted(path for path, times in caches.paths(name).items() if times > before[name].get(path, 0))
        for name in ours
    }
    detail = {
        "path": taken_by[OURS],
        "paths": taken_by,
        "peer_by": caches.peer_by(direction),
        "peers_by": {name: caches.peer_by(direction, name) for name in others},
        "samples": repeats,
        "slowest_ms": {name: max(one.wall for one in samples) * 1e3 for name, samples in counted.items()},
    }
    yield from rows_alone(work, setup.peer, medians, detail)


def beside(caches: Caches, blocks: int) -> Iterator[Row]:
    """All workers beside compute, in turn; and one large copy, once a run."""
    from benchmarks.gpu.beside_compute import BesideCompute, measure

    setup, model, specs = caches.setup, caches.model, caches.specs(blocks)
    for kind, rounds in setup.scale.rounds.items():
        for direction in DIRECTIONS:
            work, turns = Work(model, direction, blocks, setup.copy[direction]), count()
            begins = {name: lambda n=name, d=direction, t=turns: caches.begin(n, d, specs[next(t) % DIFFERENT])
                      for name in caches.workers}  # fmt: skip
            compute = setup.compute(kind)
            windows = [{name: measure(setup.rig.scale, compute, begin) for name, begin in begins.items()}
                       for _ in range(rounds)]  # fmt: skip
            found = {name: BesideCompute.of([one[name] for one in windows], work.nbytes) for name in begins}
            yield from rows_beside(work, setup.peer, kind, found | {COPY: setup.copy_beside(kind, direction)})


@contextmanager
def opened(setup: Setup, model: Model) -> Iterator[Caches]:
    """A model's caches; memory is free again afterwards."""
    caches = Caches(setup, model)
    try:
        yield caches
    finally:
        setup.synchronize()
        caches.close()


def jobs(setup: Setup, model: Model) -> Iterator[Row]:
    """All jobs of one model: alone, then beside compute."""
    with opened(setup, model) as caches:
        for blocks in model.blocks:
            for direction in DIRECTIONS:
                yield from alone(caches, direction, blocks)
        for blocks in model.beside if setup.rig is not None else ():
            yield from beside(caches, blocks)


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.vllm_worker", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny jobs: shows that it runs, and nothing else")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the host path, to try it out")
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results, none for --smoke")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no case after so long")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not or a model failed, 2 for usage or no GPU."""
    chosen = arguments_of(arguments)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
    started, scale = machine(), SMOKE_JOBS if chosen.smoke else JOBS
    about: dict[str, Any] = {}
    if chosen.device == "cpu":
        setup = Setup(scale)
    elif not torch.cuda.is_available():
        print("no CUDA device: these benchmarks need one", file=sys.stderr)
        return 2
    else:
        setup, about = _on_gpu(scale, SMOKE if chosen.smoke else FULL), gpu()
    about["beside"] = (
        setup.vllm.told if setup.vllm else f"vLLM is not installed: {vllm_peer.BATCH}; no limit of times vLLM"
    )
    print(f"{about}\n", flush=True)
    output = chosen.output or (
        None if chosen.smoke or chosen.device == "cpu" else default_path(about["name"], ["vllm", "worker"])
    )

    def report(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
        if chosen.device != "cpu" and not failed and {row.group for row in rows} == {CEILINGS}:
            about.update(told_by_smi())  # an idle link and idle clocks are slower than they are in use
        if output is not None:
            save(output, gpu_document(rows, scale=scale, started=started, about=about, failed=failed))

    groups = {CEILINGS: ceilings, **{model.name: partial(jobs, model=model) for model in scale.models}}
    return conclude(run(groups, setup, budget=chosen.budget, report=report), output, smoke=chosen.smoke)


def _on_gpu(scale: JobScale, sizes: Any) -> Setup:
    from benchmarks.gpu.rig import Rig
    from kvplan.measure.flights import Line

    rig = Rig(sizes)
    # An engine's compute runs on a stream of its own; the jobs wait for what it has been given: nothing, here.
    torch.cuda.set_stream(Line("cuda:0").stream)
    vllm = vllm_peer.load(vllm_peer.on_current_stream(rig.lines["load"]))
    if vllm is not None and not vllm.worker.HAS_TRITON:
        raise RuntimeError("vLLM finds no Triton for its loads here: it would be measured by its fallback")
    return Setup(scale, rig, vllm)


if __name__ == "__main__":
    sys.exit(main())

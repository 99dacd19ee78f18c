"""Time an engine's decode steps after kernels beside its graphs: ``python -m benchmarks.engines.kernel_priority``.

One whole vLLM engine decodes 16 requests in full CUDA graphs. Before each measure, kernels run on another stream while it
decodes: torch's, or those of kvplan's loads and stores. In the measure itself, nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.engine import Setup, environment, start
from benchmarks.engines.measures import tokens
from benchmarks.engines.shapes import FULL, SHAPES
from benchmarks.engines.ways import NO_OFFLOADING, way_of
from benchmarks.gpu.environment import gpu, versions
from benchmarks.record import machine

SHAPE, REQUESTS, PROMPT, WARM, STEPS, REST = "gqa1", 16, 200, 30, 60, 20
KERNELS = 20  # of torch, per step
BLOCKS, LAYERS, PAGE = 64, 160, 4096
# Who launches kernels beside the engine, in this order: each kind twice, so that a lasting effect shows.
CASES = ("nothing", "torch normal", "torch high", "kvplan normal", "kvplan high") * 2


class Decoding:
    """An engine that decodes."""

    def __init__(self) -> None:
        os.environ.update(environment(way_of(NO_OFFLOADING), SHAPES[SHAPE], FULL))
        self.llm = start(Setup(SHAPE, NO_OFFLOADING, FULL, "cuda", "decode"))
        import torch
        from vllm import SamplingParams

        self.torch, self.engine, self.number = torch, self.llm.llm_engine, 0
        self.sampling = SamplingParams(temperature=0, max_tokens=WARM + STEPS + REST, ignore_eos=True)
        self.numbers = torch.zeros(1024, device="cuda")

    def pace(self, beside: Callable[[], object] | None = None) -> float:
        """Return the median time of a decode step, in ms; ``beside`` is called after each step."""
        for _ in range(REQUESTS):
            self.number += 1
            prompt = {"prompt_token_ids": tokens(0, self.number, PROMPT)}
            self.engine.add_request(str(self.number), prompt, self.sampling)
        for _ in range(WARM):
            self.engine.step()
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
            if beside is not None:
                beside()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.torch.cuda.synchronize()
        return 1e3 * statistics.median(times)

    def run(self, case: str) -> dict[str, Any]:
        """Let kernels run beside decoding, and return the pace then and afterwards."""
        kind, _, priority = case.partition(" ")
        found = {"case": case}
        if kind == "torch":
            stream = self.torch.cuda.Stream(priority=-1 if priority == "high" else 0)

            def launch() -> None:
                with self.torch.cuda.stream(stream):
                    for _ in range(KERNELS):
                        self.numbers.add_(1)

            found["beside"] = self.pace(launch)
        elif kind == "kvplan":
            found["beside"] = self.moved(priority)
        return found | {"afterwards": self.pace()}

    def moved(self, priority: str) -> float:
        """Return the pace while kvplan's kernels load and store."""
        import kvplan

        pool = self.torch.zeros(BLOCKS, LAYERS, PAGE, dtype=self.torch.uint8).pin_memory()
        cache = self.torch.zeros(LAYERS, BLOCKS, PAGE, dtype=self.torch.uint8, device="cuda")
        host = kvplan.KVLayout.from_tensors("block layer dim", pool)
        gpu_layout = kvplan.KVLayout.from_tensors("layer block dim", cache)
        half = range(BLOCKS // 2)
        plans = [kvplan.compile(*pair).plan(half, half) for pair in ((host, gpu_layout), (gpu_layout, host))]
        flying: list[Any] = []
        with kvplan.Executor("cuda:0", kvplan.Policy(path="kernel"), kernel_priority=priority) as executor:

            def move() -> None:
                if all(transfer.done() for transfer in flying):
                    flying[:] = [executor.submit(plan) for plan in plans]

            return self.pace(move)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the result")
    asked = parser.parse_args(given)
    engine = Decoding()
    engine.pace()
    results = []
    for case in CASES:
        found = {name: value if isinstance(value, str) else round(value, 3) for name, value in engine.run(case).items()}
        results.append(found)
        print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    if asked.output is not None:
        document = {"machine": machine() | {"gpu": gpu()}, "versions": versions(("vllm", "torch", "triton")),
                    "shape": SHAPES[SHAPE].title, "requests": REQUESTS, "unit": "ms", "results": results}  # fmt: skip
        asked.output.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of an engine may outlive it


if __name__ == "__main__":
    main()

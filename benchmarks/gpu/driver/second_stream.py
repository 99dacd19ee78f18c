"""Time graph kernels after other streams have launched kernels: ``python -m benchmarks.gpu.driver.second_stream``.

A CUDA graph of 1,000 small kernels is replayed before and after each event of a case. A case is a process of its own,
because the effect stays until the process ends. Only torch and the driver are used, except where kvplan loads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import gpu, versions
from benchmarks.record import machine

KERNELS, REPLAYS, ELEMENTS = 1000, 40, 1 << 16
NBYTES = 1 << 22  # of a copy
# By case: events in their order. ``captured`` is the stream of the graph's capture. The graph replays on the default
# stream, and after "replay captured" on the stream of its capture, as in vLLM.
CASES: dict[str, tuple[str, ...]] = {
    "the stream of the capture launches 100": ("captured 100",),
    "one other stream launches 100, and then the stream of the capture": ("second 100", "captured 100"),
    "a second stream launches 1, 4, 20": ("captured 100", "second 1", "second 4", "second 20"),
    "a second stream launches 20, and waits after each": ("captured 100", "second 20 apart"),
    "a second stream of high priority launches 100": ("captured 100", "urgent 100"),
    "a second stream copies 100 times to and from the host": ("captured 100", "copies 100"),
    "a second stream launches 100, and is idle for 3,000 replays": ("captured 100", "second 100", "idle 3000"),
    "kvplan loads beside the graph, on streams of its own": ("captured 100", "kvplan own"),
    "kvplan loads beside the graph, on the stream of the capture": ("captured 100", "kvplan captured"),
    "a second stream launches 100, and another process opens the GPU": ("captured 100", "second 100", "process 1"),
    "the graph has its own stream, and the default stream launches 100": ("replay captured", "default 100"),
    "the graph has its own stream, and kvplan loads beside it on the default stream": (
        "replay captured",
        "kvplan default",
    ),
}


class Process:
    """The streams and the graph of one case."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.numbers, self.others = (torch.zeros(ELEMENTS, device="cuda") for _ in range(2))
        self.streams = {"captured": torch.cuda.Stream(), "second": torch.cuda.Stream(),
                        "urgent": torch.cuda.Stream(priority=-1), "default": torch.cuda.default_stream()}  # fmt: skip
        self.replays_on = self.streams["default"]
        self.graph = torch.cuda.CUDAGraph()
        self.numbers.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.streams["captured"]):
            for _ in range(KERNELS):
                self.numbers.add_(1)

    def pace(self, replays: int = REPLAYS, beside: Callable[[], object] = lambda: None) -> float:
        """Return the median time per kernel of the graph, in us."""
        found = []
        for _ in range(replays):
            begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            beside()
            with self.torch.cuda.stream(self.replays_on):
                begin.record()
                self.graph.replay()
                end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / KERNELS)
        return statistics.median(found)

    def do(self, event: str) -> None:
        """Let one event of a case happen."""
        kind, count, *how = event.split()
        if kind == "kvplan":
            self.load(self.streams.get(count))
        elif kind == "replay":
            self.replays_on = self.streams[count]
        elif kind == "process":
            self.open_elsewhere()
        elif kind == "idle":
            self.pace(int(count))
        elif kind == "copies":
            host, device = (self.torch.zeros(NBYTES, dtype=self.torch.uint8) for _ in range(2))
            host, device = host.pin_memory(), device.cuda()
            with self.torch.cuda.stream(self.streams["second"]):
                for _ in range(int(count)):
                    device.copy_(host, non_blocking=True)
                    host.copy_(device, non_blocking=True)
        else:
            with self.torch.cuda.stream(self.streams[kind]):
                for _ in range(int(count)):
                    self.others.add_(1)
                    if how:
                        self.torch.cuda.synchronize()
        self.torch.cuda.synchronize()

    def open_elsewhere(self) -> None:
        """Let another process open the GPU; it ends with this one."""
        code = "import sys, torch; torch.zeros(1, device='cuda'); print(flush=True); sys.stdin.read()"
        self.other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        assert self.other.stdout is not None
        self.other.stdout.readline()

    def load(self, stream: Any) -> None:
        """Load blocks with kvplan's kernel while the graph is replayed."""
        import kvplan

        torch = self.torch
        cache = torch.zeros(32, 64, 2, 4096, dtype=torch.uint8, device="cuda")
        pool = torch.zeros(64, 32, 2, 4096, dtype=torch.uint8).pin_memory()
        program = kvplan.compile(*(kvplan.KVLayout.from_tensors(notation, tensor) for notation, tensor in (
            ("block layer kv dim", pool), ("layer block kv dim", cache))))  # fmt: skip
        blocks = list(range(64))
        policy = kvplan.Policy(path="kernel", overlap="decode")
        with kvplan.Executor("cuda:0", policy, kernel_stream=stream) as executor:
            self.pace(20, lambda: executor.submit(program.plan(blocks, blocks)))


def run(case: str) -> dict[str, Any]:
    """Return the paces of a case: before everything, and after each event."""
    process = Process()
    found = {"before": process.pace()}
    for event in CASES[case]:
        process.do(event)
        found[event] = process.pace()
    return {name: round(pace, 3) for name, pace in found.items()}


def main(given: Sequence[str] | None = None) -> int:
    """All cases, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), help="only this one, in this process")
    parser.add_argument("--output", type=Path, help="file for the result")
    asked = parser.parse_args(given)
    if asked.case is not None:
        print(json.dumps(run(asked.case)))
        return 0
    results = []
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.gpu.driver.second_stream", "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        found = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-400:]}
        results.append({"case": case, "us": found})
        print(f"{case}: {', '.join(f'{event} {pace}' for event, pace in found.items())}", flush=True)
    if asked.output is not None:
        document = {"machine": machine() | {"gpu": gpu()}, "versions": versions(("torch",)), "kernels": KERNELS,
                    "results": results}  # fmt: skip
        asked.output.write_text(json.dumps(document, indent=1) + "\n")
    return int(any("failed" in one["us"] for one in results))


if __name__ == "__main__":
    sys.exit(main())

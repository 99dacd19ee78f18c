"""A baseline as engines ship it: 12 programs of a Triton kernel take descriptors one at a time, in words of 8 bytes."""

from __future__ import annotations

import torch

from kvplan.measure.baselines import Baseline, issued
from kvplan.measure.rig import Line
from kvplan.measure.workload import Work

NAME = "12 programs, 8-byte words"


def twelve_programs(line: Line, work: Work) -> Baseline:
    """The descriptors lie on the GPU beforehand and cost nothing here."""
    from benchmarks.gpu import kernels

    src, dst, size = (torch.tensor(column, device=line.name) for column in work.plan.descriptors())

    def issue() -> None:
        with torch.cuda.stream(line.stream):
            kernels.one_at_a_time[(12,)](src, dst, size, size.numel(), WORDS=kernels.BASELINE_WORDS,
                                         num_warps=kernels.BASELINE_WARPS)  # fmt: skip

    return issued(NAME, line, work, issue)

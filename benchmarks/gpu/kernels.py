"""Triton kernels that kvplan is compared with: a ceiling of the SMs, and a baseline as engines ship it."""

import torch
import triton
import triton.language as tl

from kvplan.measure.rig import Line
from kvplan.measure.workload import Baseline, Work, issued

CEILING_WORDS = 4096  # 8-byte words that a program of the ceiling copies at a time: 32 KiB
CEILING_WARPS = 32
BASELINE_WORDS = 1024  # 8-byte words that a program of the baseline copies at a time: 8 KiB
BASELINE_WARPS = 8
PROGRAMS = "12 programs, 8-byte words"


@triton.jit
def contiguous(src, dst, count, WORDS: tl.constexpr):
    """Copy 8-byte words from one buffer to another; neighbours are joined to words of 16 bytes.

    Nothing is masked: ``count``, in words, is a multiple of WORDS.
    """
    lane = tl.arange(0, WORDS)
    for first in range(tl.program_id(0) * WORDS, count, tl.num_programs(0) * WORDS):
        tl.store(dst + first + lane, tl.load(src + first + lane))


@triton.jit(do_not_specialize=["count"])
def one_at_a_time(src, dst, nbytes, count, WORDS: tl.constexpr):
    """Copy descriptors one after another, each by one program, in words of 8 bytes.

    ``src``, ``dst`` and ``nbytes`` are int64 columns in GPU memory; every size is a multiple of 8.
    """
    lane = tl.arange(0, WORDS)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(src + row).to(tl.pointer_type(tl.int64))
        target = tl.load(dst + row).to(tl.pointer_type(tl.int64))
        words = tl.load(nbytes + row) // 8
        for first in range(0, words, WORDS):
            at = first + lane
            tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


def twelve_programs(line: Line, work: Work) -> Baseline:
    """12 programs take descriptors one at a time, as engines ship it; these lie on the GPU beforehand, at no cost."""
    src, dst, size = (torch.tensor(column, device=line.name) for column in work.plan.descriptors())

    def issue() -> None:
        with torch.cuda.stream(line.stream):
            one_at_a_time[(12,)](src, dst, size, size.numel(), WORDS=BASELINE_WORDS, num_warps=BASELINE_WARPS)

    return issued(PROGRAMS, line, work, issue)

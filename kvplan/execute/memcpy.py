"""The copy loop over raw addresses, compiled by numba.

Runs of small transfers are copied through the CPU's cache. Transfers larger than the cache use streaming (non-temporal)
stores. These bypass the cache, so that the destination is not read before it is overwritten. The C library's ``memcpy``
uses them only for one large copy; on runs of a few KiB it loses a third of the bandwidth. A streamed run is copied as
two halves at the same time: with two pages in flight, one core is as fast as the C library on one large array.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvplan.plan.jit import compiled as _compiled

LINE = 64  # bytes: a cache line, and one streaming store
MIN_STREAMED = 4 * LINE  # bytes; shorter runs are mostly unaligned head and tail


@intrinsic
def _memcpy(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Call ``memcpy(dst, src, nbytes)`` with int64 addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, count = arguments
        pointer = cgutils.voidptr_t
        cgutils.raw_memcpy(builder, builder.inttoptr(to, pointer), builder.inttoptr(source, pointer), count, 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@intrinsic
def _stream_line(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copy 64 bytes and bypass the cache; ``dst`` must be a multiple of 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source = arguments
        line = ir.VectorType(ir.IntType(8), LINE)
        value = builder.load(builder.inttoptr(source, line.as_pointer()), align=1)
        stored = builder.store(value, builder.inttoptr(to, line.as_pointer()), align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def _fence(typingctx: Any) -> Any:
    """Make streaming stores visible before later stores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@_compiled
def _copy(dst, src, nbytes, streaming):
    if not streaming or nbytes < MIN_STREAMED:
        _memcpy(dst, src, nbytes)
        return
    head = -dst % LINE
    if head:
        _memcpy(dst, src, head)
    half = (nbytes - head) // (2 * LINE) * LINE
    for at in range(head, head + half, LINE):
        for skip in (0, half):
            _stream_line(dst + at + skip, src + at + skip)
    done = head + 2 * half
    if nbytes - done >= LINE:
        _stream_line(dst + done, src + done)
        done += LINE
    _memcpy(dst + done, src + done, nbytes - done)


@_compiled
def copy(units, run_src, run_dst, run_size, first, last, streaming):
    """Make some copies of a plan part. They are numbered unit by unit, and run by run within a unit.

    Args:
        units: (2, n) int64, source and destination address of each unit.
        run_src, run_dst, run_size: offsets and bytes of each copy within a unit.
        first, last: number of the first copy to make, and of the first copy after the last.
        streaming: whether to bypass the cache.
    """
    runs = run_size.size
    unit, run = first // runs, first % runs
    for _ in range(last - first):
        dst, src, nbytes = units[1, unit] + run_dst[run], units[0, unit] + run_src[run], run_size[run]
        run += 1
        if run == runs:
            unit, run = unit + 1, 0
        _copy(dst, src, nbytes, streaming)
    _fence()

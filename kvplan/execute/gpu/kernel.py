"""The copy kernel: one Triton program text for every layout pair, both directions, all alignments.

A kernel gets one argument, the address of a header in pinned memory that it reads in place. The header leads to the
units (addresses, read in place too) and to the items: the pieces of one unit, at most ``width`` bytes each. Every
(unit, item) is one row of a tile; a program takes a tile of rows at a time, so that many rows are in flight at once.
Nothing else distinguishes one transfer from another, so a captured launch copies whatever its header says at replay.

The one file that imports Triton.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kvplan.execute.gpu.shape import Shape

# Element by word size: of 16 bytes, two that travel as one instruction.
_ELEMENTS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}


def copy_rows(  # type: ignore[no-untyped-def]
    header,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
    PER: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Copy every item of every unit.

    Args:
        header: int64 pointer to units, items a unit, chunks an item, then the addresses of five int64 arrays: source
            and destination address of each unit; source offset, destination offset and bytes of each item.
        ROWS: rows of a tile.
        WIDTH: bytes of a row that are in flight at once; an item has at most ``chunks`` times as many.
        WORD: bytes of a word; divides every address and size.
        ELEMENT: its type, or that of its ``PER`` equal parts.
        PER: elements a word.
        SPLIT: accesses that WIDTH is made of, 1, 2, 4 or 8.
    """
    units = tl.load(header)
    items = tl.load(header + 1).to(tl.int32)
    chunks = tl.load(header + 2).to(tl.int32)
    src_units = tl.load(header + 3).to(tl.pointer_type(tl.int64))
    dst_units = tl.load(header + 4).to(tl.pointer_type(tl.int64))
    src_items = tl.load(header + 5).to(tl.pointer_type(tl.int64))
    dst_items = tl.load(header + 6).to(tl.pointer_type(tl.int64))
    sizes = tl.load(header + 7).to(tl.pointer_type(tl.int64))
    total = (units * items).to(tl.int32)
    row = tl.arange(0, ROWS)
    SPAN: tl.constexpr = WIDTH // SPLIT // WORD * PER
    lane = tl.arange(0, SPAN)[None, :]
    step = tl.num_programs(0) * ROWS
    first = tl.program_id(0) * ROWS
    index = first + row
    unit = index // items
    item = index - unit * items
    # From tile to tile without a division.
    step_unit = step // items
    step_item = step - step_unit * items
    live = index < total
    src_unit = tl.load(src_units + unit, mask=live, other=0)
    dst_unit = tl.load(dst_units + unit, mask=live, other=0)
    src_item = tl.load(src_items + item, mask=live, other=0)
    dst_item = tl.load(dst_items + item, mask=live, other=0)
    size = tl.load(sizes + item, mask=live, other=0)
    while first < total:
        src = src_unit + src_item
        dst = dst_unit + dst_item
        # The product shows the compiler that words are never cut.
        count = ((size // WORD).to(tl.int32) * PER)[:, None]
        # The addresses of the next tile are fetched while this one is in flight: units lie across the link.
        first += step
        index = first + row
        unit += step_unit
        item += step_item
        over = item >= items
        unit = tl.where(over, unit + 1, unit)
        item = tl.where(over, item - items, item)
        live = index < total
        src_unit = tl.load(src_units + unit, mask=live, other=0)
        dst_unit = tl.load(dst_units + unit, mask=live, other=0)
        src_item = tl.load(src_items + item, mask=live, other=0)
        dst_item = tl.load(dst_items + item, mask=live, other=0)
        size = tl.load(sizes + item, mask=live, other=0)
        # The promise counts only when made of pointers, after the cast.
        source = tl.multiple_of(src[:, None].to(tl.pointer_type(ELEMENT)), (WORD, WORD)) + lane
        target = tl.multiple_of(dst[:, None].to(tl.pointer_type(ELEMENT)), (WORD, WORD)) + lane
        # Written out, because a tensor of the whole width would give a row to several warps, whose addresses then go
        # through shared memory: every tile would begin with all warps waiting for the slowest of the last one.
        for chunk in range(chunks):
            at = chunk * (SPAN * SPLIT)
            left = count - at
            value_0 = tl.load(source + at, mask=lane < left)
            if SPLIT > 1:
                value_1 = tl.load(source + at + 1 * SPAN, mask=lane + 1 * SPAN < left)
            if SPLIT > 2:
                value_2 = tl.load(source + at + 2 * SPAN, mask=lane + 2 * SPAN < left)
                value_3 = tl.load(source + at + 3 * SPAN, mask=lane + 3 * SPAN < left)
            if SPLIT > 4:
                value_4 = tl.load(source + at + 4 * SPAN, mask=lane + 4 * SPAN < left)
                value_5 = tl.load(source + at + 5 * SPAN, mask=lane + 5 * SPAN < left)
                value_6 = tl.load(source + at + 6 * SPAN, mask=lane + 6 * SPAN < left)
                value_7 = tl.load(source + at + 7 * SPAN, mask=lane + 7 * SPAN < left)
            tl.store(target + at, value_0, mask=lane < left)
            if SPLIT > 1:
                tl.store(target + at + 1 * SPAN, value_1, mask=lane + 1 * SPAN < left)
            if SPLIT > 2:
                tl.store(target + at + 2 * SPAN, value_2, mask=lane + 2 * SPAN < left)
                tl.store(target + at + 3 * SPAN, value_3, mask=lane + 3 * SPAN < left)
            if SPLIT > 4:
                tl.store(target + at + 4 * SPAN, value_4, mask=lane + 4 * SPAN < left)
                tl.store(target + at + 5 * SPAN, value_5, mask=lane + 5 * SPAN < left)
                tl.store(target + at + 6 * SPAN, value_6, mask=lane + 6 * SPAN < left)
                tl.store(target + at + 7 * SPAN, value_7, mask=lane + 7 * SPAN < left)


class Compiled(NamedTuple):
    """One kernel for one GPU architecture.

    Attributes:
        image: the cubin.
        ptx: what it was assembled from.
        name: of its function.
        shared: bytes of shared memory it needs.
        threads: of one program.
    """

    image: bytes
    ptx: str
    name: str
    shared: int
    threads: int


def _constants(shape: Shape) -> dict[str, Any]:
    element, per = _ELEMENTS[shape.word]
    return {
        "ROWS": shape.rows,
        "WIDTH": shape.width,
        "WORD": shape.word,
        "ELEMENT": element,
        "PER": per,
        "SPLIT": shape.split,
    }


@functools.lru_cache(maxsize=256)
def compile_kernel(shape: Shape, arch: int) -> Compiled:
    """Compile for an architecture (80, 90, 100, …); needs no GPU. Triton keeps the result on disk.

    >>> from kvplan.execute.gpu.shape import Shape
    >>> "v2.b64" in compile_kernel(Shape(word=16, width=2048, rows=32, warps=32, split=4), 90).ptx
    True
    """
    constants = _constants(shape)
    source = ASTSource(
        JITFunction(copy_rows),
        signature={"header": "*i64", **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": shape.warps, "enable_fp_fusion": False}
    )
    return Compiled(made.asm["cubin"], made.asm["ptx"], made.metadata.name, int(made.metadata.shared), 32 * shape.warps)


def interpret(header: Any, shape: Shape, programs: int) -> None:
    """Run the kernel on the CPU, word for word, under Triton's interpreter.

    Args:
        header: int64 torch tensor of 8 words, as the kernel reads it; all addresses in it are the CPU's.
        shape: the variant.
        programs: how many.
    """
    # A copy of the function, because the interpreter changes what its globals mean while it runs.
    text = FunctionType(copy_rows.__code__, {"tl": tl}, copy_rows.__name__)
    text.__annotations__ = dict(copy_rows.__annotations__)
    InterpretedFunction(text)[(programs,)](header, **_constants(shape))

"""The copy kernel: one Triton function for every layout pair, every route and all alignments.

A kernel has one argument, the address of a header. The header points to the addresses of the units and to the items:
the pieces of one unit. Every (unit, item) is one row of a tile. A program copies one tile of rows at a time, so that
many rows are in flight at once. Several headers may follow one another, so that one launch copies several run groups. A
launch depends on nothing but its headers. Only this file imports Triton.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvplan.execute.gpu.resources import Shape

# Element type and elements per word, by word size. Two elements of 8 bytes are one instruction of 16 bytes.
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
    """Copy every item of every unit, of one header or of several.

    Args:
        header: int64 pointer to headers of 9 words: number of units, items per unit, chunks per item, addresses of five
            int64 arrays, and, in the first header, the number of headers. The arrays: source and destination address
            per unit; source offset, destination offset and bytes per item.
        ROWS: rows per tile.
        WIDTH: bytes of a row that are in flight at once. An item has at most ``chunks * WIDTH`` bytes.
        WORD: bytes per word; divides every address and size.
        ELEMENT: type of one element; ``PER`` elements are one word.
        PER: elements per word.
        SPLIT: number of accesses per WIDTH bytes: 1, 2, 4 or 8.
    """
    row = tl.arange(0, ROWS)
    SPAN: tl.constexpr = WIDTH // SPLIT // WORD * PER
    lane = tl.arange(0, SPAN)[None, :]
    step = tl.num_programs(0) * ROWS
    first = tl.program_id(0) * ROWS
    segment = 0
    while segment < tl.load(header + 8).to(tl.int32):
        words = header + 9 * segment
        units = tl.load(words)
        items = tl.load(words + 1).to(tl.int32)
        chunks = tl.load(words + 2).to(tl.int32)
        src_units = tl.load(words + 3).to(tl.pointer_type(tl.int64))
        dst_units = tl.load(words + 4).to(tl.pointer_type(tl.int64))
        src_items = tl.load(words + 5).to(tl.pointer_type(tl.int64))
        dst_items = tl.load(words + 6).to(tl.pointer_type(tl.int64))
        sizes = tl.load(words + 7).to(tl.pointer_type(tl.int64))
        total = (units * items).to(tl.int32)
        index = first + row
        unit = index // items
        item = index - unit * items
        # The loop adds these steps, so that it needs no division.
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
            # The factor PER shows the compiler that words are never cut.
            count = ((size // WORD).to(tl.int32) * PER)[:, None]
            # Load the addresses of the next tile while this tile is in flight: unit addresses may be across the link.
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
            # The compiler uses multiple_of only on pointers, so it comes after the cast.
            source = tl.multiple_of(src[:, None].to(tl.pointer_type(ELEMENT)), (WORD, WORD)) + lane
            target = tl.multiple_of(dst[:, None].to(tl.pointer_type(ELEMENT)), (WORD, WORD)) + lane
            # The accesses are written out: a tensor of the whole width would give a row to several warps. Addresses
            # would then go through shared memory, and at each new tile all warps would wait for the slowest warp.
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
        # The programs go on in turn: the first tile of the next header is for the program behind that of the last tile.
        first -= (total + ROWS - 1) // ROWS * ROWS
        segment += 1


class Compiled(NamedTuple):
    """One kernel, compiled for one GPU architecture.

    Attributes:
        image: the cubin.
        ptx: the PTX text of the cubin.
        name: name of the function.
        shared: bytes of shared memory per program.
        threads: threads per program.
    """

    image: bytes
    ptx: str
    name: str
    shared: int
    threads: int


def constants_for(shape: Shape) -> dict[str, Any]:
    """Return the kernel's constants for a shape."""
    element, per = _ELEMENTS[shape.word]
    own = {"ROWS": shape.rows, "WIDTH": shape.width, "WORD": shape.word, "SPLIT": shape.split}
    return own | {"ELEMENT": element, "PER": per}


@functools.lru_cache(maxsize=256)
def compile_kernel(shape: Shape, arch: int) -> Compiled:
    """Compile the kernel for an architecture (80, 90, 100, …), without a GPU. Triton keeps the result on disk.

    >>> from kvplan.execute.gpu.resources import Shape
    >>> "v2.b64" in compile_kernel(Shape(word=16, width=2048, rows=32, warps=32, split=4), 90).ptx
    True
    """
    constants, attributes = constants_for(shape), {(0,): [["tt.divisibility", 16]]}
    signature = {"header": "*i64", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(JITFunction(copy_rows), signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": shape.warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Compiled(made.asm["cubin"], made.asm["ptx"], made.metadata.name, int(made.metadata.shared), 32 * shape.warps)

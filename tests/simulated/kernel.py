"""The copy kernel in plain Python, and its own text in Triton's interpreter."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from kvplan.execute.gpu.resources import Shape


def words(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64) if count else np.empty(0, np.int64)


def kernel(header: int, shape: Shape, order: random.Random, reach: Callable[[int], object] = abs) -> None:
    """What the copy kernel does with its headers, a row at a time, in any order."""
    count = int(words(header, 9)[8])
    assert 0 < count < 1 << 20, "a header was read before it was there"
    headers = [header + 72 * k for k in range(count)]
    order.shuffle(headers)
    for one in headers:
        _rows(one, shape, order, reach)


def _rows(header: int, shape: Shape, order: random.Random, reach: Callable[[int], object]) -> None:
    units, items, chunks, *columns = words(header, 8).tolist()
    assert min(units, items, chunks, *columns) >= 0, "a header was read before it was there"
    src_units, dst_units = (words(at, units).tolist() for at in columns[:2])
    src_items, dst_items, sizes = (words(at, items).tolist() for at in columns[2:])
    rows = [(unit, item) for unit in range(units) for item in range(items)]
    order.shuffle(rows)
    for unit, item in rows:
        src, dst, nbytes = src_units[unit] + src_items[item], dst_units[unit] + dst_items[item], sizes[item]
        assert min(src, dst) > 0, "units were read before they were there"
        assert (src | dst | nbytes) % shape.word == 0, "the word divides every address and size"
        assert 0 <= nbytes <= chunks * shape.width, "an item has no more chunks than the header says"
        for address in (src, src + max(nbytes, 1) - 1, dst, dst + max(nbytes, 1) - 1):
            reach(address)
        ctypes.memmove(dst, src, nbytes)


def interpret(header: Any, shape: Shape, programs: int) -> None:
    """Run the kernel's own text on the CPU.

    Args:
        header: int64 torch tensor of 9 words per header; all its addresses are CPU addresses.
        shape: the variant of the kernel.
        programs: number of programs.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    from kvplan.execute.gpu.kernel import constants_for, copy_rows

    # A copy of the function, because the interpreter changes the function's globals while it runs.
    text = FunctionType(copy_rows.__code__, {"tl": tl}, copy_rows.__name__)
    text.__annotations__ = dict(copy_rows.__annotations__)
    InterpretedFunction(text)[(programs,)](header, **constants_for(shape))

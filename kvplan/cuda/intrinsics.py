"""What numba has no function for: calls of C functions by address, and words that two threads share.

All but ``pointer`` also work in plain Python, so that ``play`` and ``watch`` do. Numba keeps compiled loops on disk
until the file of the loop changes: after an edit here, change ``player.py``, too, or delete its cache.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

WORD, CODE = ir.IntType(64), ir.IntType(32)


def call_c(entry: int, arguments: tuple[int, ...]) -> int:
    """Call the C function at the address ``entry``, which returns an int, with int64 arguments."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * len(arguments))
    return int(kind(int(entry))(*map(int, arguments)))


def observe(address: int) -> int:
    """Read a word that another thread writes: before all later reads."""
    return ctypes.c_int64.from_address(int(address)).value


def publish(address: int, value: int) -> None:
    """Write a word that another thread reads: after all earlier writes."""
    ctypes.c_int64.from_address(int(address)).value = int(value)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Make a pointer of an address, for ``numba.carray``."""
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _call_c(typingctx: Any, entry: Any, arguments: Any) -> Any:
    del typingctx, entry
    count = len(arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(CODE, [WORD] * count)
        given = [builder.extract_value(values[1], k) for k in range(count)]
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)

    return types.int32(types.int64, types.UniTuple(types.int64, count)), generate


@intrinsic
def _observe(typingctx: Any, address: Any) -> Any:
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return builder.load_atomic(builder.inttoptr(values[0], WORD.as_pointer()), ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def _publish(typingctx: Any, address: Any, value: Any) -> Any:
    del typingctx, address, value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        builder.store_atomic(values[1], builder.inttoptr(values[0], WORD.as_pointer()), ordering="release", align=8)

    return types.void(types.int64, types.int64), generate


@overload(call_c)
def _compiled_call_c(entry: Any, arguments: Any) -> Any:
    del entry, arguments

    def call(entry: Any, arguments: Any) -> Any:
        return _call_c(entry, arguments)

    return call


@overload(observe)
def _compiled_observe(address: Any) -> Any:
    del address

    def read(address: Any) -> Any:
        return _observe(address)

    return read


@overload(publish)
def _compiled_publish(address: Any, value: Any) -> Any:
    del address, value

    def write(address: Any, value: Any) -> Any:
        return _publish(address, value)

    return write

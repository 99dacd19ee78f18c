"""Instructions that numba has no function for: calls of C functions by address, and words that two threads share.

Numba keeps compiled loops on disk until the file of the loop changes. After an edit here, change ``calls.py`` and
``short_calls.py``, too, or delete their caches.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WORD, CODE = ir.IntType(64), ir.IntType(32)


@intrinsic
def call_c(typingctx: Any, entry: Any, arguments: Any) -> Any:
    """Call the C function at the address ``entry``, which returns an int, with a tuple of int64 arguments."""
    del typingctx, entry
    count = len(arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(CODE, [WORD] * count)
        given = [builder.extract_value(values[1], k) for k in range(count)]
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)

    return types.int32(types.int64, types.UniTuple(types.int64, count)), generate


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Make a pointer of an address, for ``numba.carray``."""
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def publish(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word that another thread reads: after all earlier writes."""
    del typingctx, address, value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        builder.store_atomic(values[1], builder.inttoptr(values[0], WORD.as_pointer()), ordering="release", align=8)

    return types.void(types.int64, types.int64), generate


@intrinsic
def observe(typingctx: Any, address: Any) -> Any:
    """Read a word that another thread writes: before all later reads."""
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return builder.load_atomic(builder.inttoptr(values[0], WORD.as_pointer()), ordering="acquire", align=8)

    return types.int64(types.int64), generate

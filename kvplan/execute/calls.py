"""The driver's calls in a compiled loop: a call a descriptor, without the interpreter between them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvplan.jit import compiled as _compiled

WORD, CODE = ir.IntType(64), ir.IntType(32)


@intrinsic
def _call(typingctx: Any, entry: Any, dst: Any, src: Any, nbytes: Any, stream: Any) -> Any:
    """``entry(dst, src, nbytes, stream)`` of a C function at an address, which returns an int."""
    del typingctx, entry, dst, src, nbytes, stream

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(CODE, [WORD] * 4)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int32(*[types.int64] * 5), generate


@_compiled
def copy_each(entry, dst, src, size, stream):
    """One call for each descriptor, until one fails.

    Args:
        entry: address of ``int (*)(uint64 dst, uint64 src, size_t nbytes, void *stream)``, which is cuMemcpyAsync.
        dst, src, size: (n,) int64.
        stream: its handle.

    Returns:
        The index of the call that failed, and what it returned; n and 0 where none did.
    """
    for k in range(size.size):
        code = _call(entry, dst[k], src[k], size[k], stream)
        if code:
            return k, code
    return size.size, 0

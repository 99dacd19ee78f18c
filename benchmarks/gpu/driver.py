"""Copies by the driver's own functions, called by address: the ceilings and two of the baselines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.sizes import slices

Int64Array = NDArray[np.int64]

BATCH_VERSION = 12080  # asks for the form of CUDA 12.8, with failIdx, of any later driver too
MOST_DESCRIPTORS = 16_384  # a call; far more in one batch have crashed drivers
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3
NON_BLOCKING = 1


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: 24 bytes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("src_type", ctypes.c_int),
        ("src_id", ctypes.c_int),
        ("dst_type", ctypes.c_int),
        ("dst_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class Columns(NamedTuple):
    """Descriptors: addresses and bytes."""

    src: Int64Array
    dst: Int64Array
    size: Int64Array


class Driver:
    """The CUDA driver of this process.

    Raises:
        OSError: there is none.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._copy = self._library.cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._copy.restype = ctypes.c_int
        self._batch = self._find_batch()

    @property
    def has_batch(self) -> bool:
        """Whether the driver has cuMemcpyBatchAsync."""
        return self._batch is not None

    def stream(self) -> int:
        """A stream that lives as long as the process and that torch hands to nobody else."""
        made = ctypes.c_void_p()
        _check("cuStreamCreate", self._library.cuStreamCreate(ctypes.byref(made), ctypes.c_uint(NON_BLOCKING)))
        return int(made.value or 0)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """``cuMemcpyAsync`` of one extent."""
        _check("cuMemcpyAsync", self._copy(dst, src, nbytes, stream))

    def copy_each(self, moves: Sequence[tuple[int, int, int]], stream: int) -> None:
        """``cuMemcpyAsync`` of every (destination, source, bytes), one call each."""
        copy = self._copy
        for dst, src, nbytes in moves:
            code = copy(dst, src, nbytes, stream)
            if code:
                _check("cuMemcpyAsync", code)

    def copy_batch(self, columns: Columns, order: int, stream: int) -> None:
        """``cuMemcpyBatchAsync`` with one descriptor a row, as many calls as the cap on descriptors makes.

        Args:
            columns: contiguous int64 arrays.
            order: of accesses to the source; any order is for host memory that nobody writes.
            stream: not the default one, which the driver refuses.
        """
        if self._batch is None:
            raise RuntimeError("this driver has no cuMemcpyBatchAsync")
        attributes, first, failed = Attributes(order=order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        src, dst, size = (column.ctypes.data for column in columns)
        for start, stop in slices(columns.size.size, MOST_DESCRIPTORS):
            at = start * 8
            code = self._batch(dst + at, src + at, size + at, stop - start, ctypes.byref(attributes),
                               ctypes.byref(first), 1, ctypes.byref(failed), stream)  # fmt: skip
            _check("cuMemcpyBatchAsync", code)

    def _find_batch(self) -> Any:
        """The entry point, or None; the driver may say success and give NULL."""
        address, status = ctypes.c_void_p(), ctypes.c_int()
        get = self._library.cuGetProcAddress_v2
        get.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
        get.restype = ctypes.c_int
        code = get(b"cuMemcpyBatchAsync", ctypes.byref(address), BATCH_VERSION, 0, ctypes.byref(status))
        if code or not address.value:
            return None
        pointer, number = ctypes.c_void_p, ctypes.c_size_t
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, number, pointer, pointer, number, pointer,
                                pointer)  # fmt: skip
        return kind(address.value)


def _check(call: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{call} returned {code}")

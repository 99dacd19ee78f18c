"""NCCL through ctypes, to send bytes between GPUs of this process. The library is the one that torch has loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from kvplan.errors import PathError, TransferError

NAME = "libnccl.so.2"
UINT8, SUCCESS = 1, 0  # of nccl.h
# The arguments of each entry point. A communicator and a stream are pointers.
CALLS: dict[str, tuple[Any, ...]] = {
    "ncclCommInitAll": (POINTER(c_void_p), c_int, POINTER(c_int)),
    "ncclCommDestroy": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


def library(name: str = NAME) -> Any:
    """Load NCCL: the loader returns the library of this name that torch has loaded.

    Raises:
        PathError: the library is missing, or lacks a function.

    >>> library("libnccl-missing.so")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvplan.errors.PathError: torch's NCCL cannot be called: libnccl-missing.so: cannot open shared object file: ...
    """
    try:
        found = ctypes.CDLL(name)
        for call, arguments in CALLS.items():
            getattr(found, call).argtypes = arguments
        found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = (c_int,), c_char_p
    except (OSError, AttributeError) as error:
        raise PathError(f"torch's NCCL cannot be called: {error}") from None
    return found


class Communicators:
    """A communicator per GPU, of GPUs of this process. The rank of a GPU is its place in the list.

    Args:
        ordinals: numbers of the GPUs.

    Raises:
        PathError: there is no NCCL, or it does not start.
    """

    def __init__(self, ordinals: Sequence[int]) -> None:
        self._nccl = library()
        self._handles = (c_void_p * len(ordinals))()
        try:
            self._check("ncclCommInitAll", self._handles, len(ordinals), (c_int * len(ordinals))(*ordinals))
        except TransferError as error:
            self._handles = (c_void_p * 0)()
            raise PathError(f"NCCL does not start: {error}") from None

    def send(self, src: tuple[int, int, int], dst: tuple[int, int, int], nbytes: int) -> None:
        """Enqueue one send and its receive.

        Args:
            src, dst: rank, address and stream of each end; the stream is of the GPU of that rank.
            nbytes: bytes to send.

        Raises:
            TransferError: a call failed.
        """
        (source, at, sending), (target, to, receiving) = src, dst
        self._check("ncclGroupStart")
        try:
            self._check("ncclSend", at, nbytes, UINT8, target, self._handles[source], sending)
            self._check("ncclRecv", to, nbytes, UINT8, source, self._handles[target], receiving)
        finally:
            self._check("ncclGroupEnd")

    def close(self) -> None:
        """Destroy the communicators; all that they sent must have arrived."""
        handles, self._handles = list(self._handles), (c_void_p * 0)()
        for handle in handles:
            self._check("ncclCommDestroy", handle)

    def _check(self, call: str, *arguments: Any) -> None:
        code = getattr(self._nccl, call)(*arguments)
        if code != SUCCESS:
            words = self._nccl.ncclGetErrorString(code) or b""
            raise TransferError(f"{call} returned {code}: {words.decode(errors='replace')}")

"""What an executor reuses: memory for pinned slots, run tables and rings, in pieces of fixed sizes; events."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvplan.cuda.device import Device
from kvplan.layout.strides import Int64Array

SMALLEST = 4 << 10  # bytes
CARVED = 1 << 20  # smaller pieces are cut from blocks of this many bytes


class Piece(NamedTuple):
    """A stretch of memory.

    Attributes:
        address: address of the first byte.
        nbytes: number of bytes.
        words: the same memory as int64 if the CPU can reach it; otherwise empty.
    """

    address: int
    nbytes: int
    words: Int64Array


Held = tuple[deque[Any], Piece]  # the list of free pieces that a piece goes back to, and the piece


class Arena:
    """A pool of memory pieces, which are reused. All memory stays allocated until :meth:`close`.

    Any thread may take and give back pieces. There is no lock, so finalizers may call both methods.

    Args:
        allocate: allocates a number of bytes and returns their address.
        free: frees the memory at an address.
        visible: whether the CPU can reach the memory.
    """

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None], *, visible: bool) -> None:
        self._allocate = allocate
        self._free_block = free
        self._visible = visible
        self._blocks: list[tuple[int, int]] = []  # (address, bytes)
        self._free: dict[int, deque[Held]] = {}

    @property
    def nbytes(self) -> int:
        """Return the number of allocated bytes."""
        return sum(nbytes for _, nbytes in list(self._blocks))

    def take(self, nbytes: int, held: list[Held] | None = None, *, exact: bool = False) -> Piece:
        """Take a piece of at least ``nbytes`` bytes.

        Args:
            nbytes: bytes that the caller needs.
            held: the caller's list, to which the piece is appended.
            exact: whether not to round the size up: for large pieces that are kept long.
        """
        size = nbytes
        free = self._free.get(nbytes)  # a caller that gives the size of a piece needs no rounding
        if free is None:
            size = max(nbytes, CARVED) if exact else _rounded(nbytes)
            free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, deque())
        while True:
            try:
                one = free.pop()  # the piece given back last, which may still be in the CPU's cache
            except IndexError:
                self._carve(size, free)
                continue
            if held is not None:
                held.append(one)
            return one[1]

    def give(self, piece: Piece) -> None:
        """Give a piece back to the arena."""
        held = self.held(piece)
        held[0].append(held)

    def held(self, piece: Piece) -> Held:
        """Return a piece together with the list of free pieces that it goes back to."""
        return self._free.setdefault(piece.nbytes, deque()), piece

    def _carve(self, size: int, free: deque[Held]) -> None:
        """Allocate a block and cut it into free pieces."""
        block = max(size, CARVED)
        address = self._allocate(block)
        self._blocks.append((address, block))
        free.extend([(free, self._piece(address + at, size)) for at in range(0, block, size)])

    def close(self) -> None:
        """Free all memory. No piece may be in use."""
        while self._blocks:
            address, _ = self._blocks.pop()
            self._free_block(address)
        self._free.clear()

    def _piece(self, address: int, nbytes: int) -> Piece:
        count = nbytes // 8 if self._visible else 0
        words = np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64) if count else _NOTHING
        return Piece(address, nbytes, words)


_NOTHING = np.empty(0, dtype=np.int64)


def _rounded(nbytes: int) -> int:
    """Return the size of the smallest piece that holds a number of bytes.

    Small sizes are powers of two. Large sizes are multiples of a quarter of a power of two, so that little is wasted.

    >>> _rounded(1), _rounded(5000), _rounded((5 << 20) + 1) >> 20
    (4096, 8192, 6)
    """
    if nbytes > CARVED:
        quarter = 1 << ((nbytes - 1).bit_length() - 3)
        return -(-nbytes // quarter) * quarter
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class Handles:
    """Streams and events that one executor makes. Each lives until the executor has ended.

    Attributes:
        device: the GPU.
        unused: events that no transfer uses; the last event given back is taken first.
    """

    device: Device
    unused: list[int] = field(default_factory=list)
    _streams: list[ctypes.c_void_p] = field(default_factory=list)
    _events: list[ctypes.c_void_p] = field(default_factory=list)

    def stream(self, *, urgent: bool = False) -> int:
        """Make a stream."""
        self._streams.append(made := ctypes.c_void_p())
        with self.device.current():
            return self.device.stream(urgent=urgent, made=made)

    def event(self) -> int:
        """Return an unused event, or a new one."""
        try:
            return self.unused.pop()
        except IndexError:
            self._events.append(made := ctypes.c_void_p())
            with self.device.current():
                return self.device.event(made)

    def close(self) -> None:
        """Destroy all of them. The device is current, and none is in use."""
        cu = self.device.driver
        for made in self._streams:
            if made.value:
                cu.cuStreamDestroy_v2(made.value)
        for made in self._events:
            if made.value:
                cu.cuEventDestroy_v2(made.value)
        for some in (self.unused, self._streams, self._events):
            some.clear()

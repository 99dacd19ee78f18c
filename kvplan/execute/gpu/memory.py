"""What an executor reuses: pieces of pinned memory and of GPU memory, events and streams."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvplan.cuda.device import Device
from kvplan.layout.strides import Int64Array

SMALLEST = 4 << 10  # bytes
CARVED = 1 << 20  # smaller pieces are cut from blocks of this many bytes
_NOTHING = np.empty(0, dtype=np.int64)


class Piece(NamedTuple):
    """A stretch of memory.

    Attributes:
        address: address of the first byte.
        nbytes: number of bytes.
        words: the same memory as int64 if the CPU can reach it; otherwise empty.
        free: the list of free pieces that it goes back to.
    """

    address: int
    nbytes: int
    words: Int64Array
    free: deque[Any]


class Arena:
    """Memory in pieces of a few sizes, which are reused. Any thread may take pieces and give them back, without a lock.

    Args:
        allocate: allocates a number of bytes and returns their address.
        free: frees the memory at an address.
        visible: whether the CPU can reach the memory.
    """

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None], *, visible: bool) -> None:
        self._allocate = allocate
        self._free_block = free
        self._visible = visible
        self._blocks: dict[int, int] = {}  # bytes by address
        self._free: dict[int, deque[Piece]] = {}

    @property
    def nbytes(self) -> int:
        """Return the number of allocated bytes."""
        return sum(self._blocks.copy().values())

    def take(self, nbytes: int, *, exact: bool = False) -> Piece:
        """Take a piece of at least ``nbytes`` bytes; if ``exact``, for one that is large and kept long, of no more."""
        size = nbytes if exact else rounded(nbytes) if nbytes > SMALLEST else SMALLEST
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, deque())
        while True:
            try:
                return free.pop()  # the piece given back last, which may still be in the CPU's cache
            except IndexError:
                self._carve(size, free)

    def _carve(self, size: int, free: deque[Piece]) -> None:
        """Allocate a block and cut it into free pieces."""
        block = max(size, CARVED)
        address = self._allocate(block)
        self._blocks[address] = block
        free.extend([self._piece(address + at, size, free) for at in range(0, block - size + 1, size)])

    def _piece(self, address: int, nbytes: int, free: deque[Piece]) -> Piece:
        count = nbytes // 8 if self._visible else 0
        words = np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64) if count else _NOTHING
        return Piece(address, nbytes, words, free)

    def trim(self) -> None:
        """Free the large blocks that nobody uses."""
        for size, free in list(self._free.items()):
            while size > CARVED:
                try:
                    address = free.pop().address
                except IndexError:
                    break
                del self._blocks[address]
                self._free_block(address)

    def close(self) -> None:
        """Free all memory. No piece may be in use."""
        while self._blocks:
            self._free_block(self._blocks.popitem()[0])
        self._free.clear()


def rounded(nbytes: int) -> int:
    """Return the size of the smallest piece that holds a number of bytes.

    Small sizes are powers of two. Large sizes are multiples of a quarter of a power of two, so that little is wasted.

    >>> rounded(1), rounded(5000), rounded((5 << 20) + 1) >> 20
    (4096, 8192, 6)
    """
    if nbytes > CARVED:
        quarter = 1 << ((nbytes - 1).bit_length() - 3)
        return -(-nbytes // quarter) * quarter
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())


class Handles:
    """Streams and events that one executor makes. Each lives until the executor has ended.

    Args:
        device: the GPU.

    Attributes:
        unused: events that no transfer uses; the last event given back is taken first.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.unused: list[int] = []
        self._streams: list[int] = []
        self._events: list[int] = []

    def stream(self, *, urgent: bool = False) -> int:
        """Make a stream. The device is current."""
        self._streams.append(self._device.stream(urgent=urgent))
        return self._streams[-1]

    def event(self) -> int:
        """Return an unused event, or a new one. The device is current."""
        try:
            return self.unused.pop()
        except IndexError:
            self._events.append(made := self._device.event())
            return made

    def close(self) -> None:
        """Destroy all of them. The device is current, and none is in use."""
        for stream in self._streams:
            self._device.driver.cuStreamDestroy_v2(stream)
        for event in self._events:
            if not self._device.driver.cuEventQuery(event):  # an interrupted submit may have left one on another stream
                self._device.driver.cuEventDestroy_v2(event)
        for some in (self.unused, self._streams, self._events):
            some.clear()

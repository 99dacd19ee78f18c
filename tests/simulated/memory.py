"""Memory of a GPU that is not there, and of the host as its driver knows it."""

from __future__ import annotations

import threading

import numpy as np

from kvplan.cuda.device import ACCESS_FLAGS, DEVICE_POINTER, HOST_MEMORY, MEMORY_TYPE, RANGE_SIZE, RANGE_START
from kvplan.cuda.driver import HANDLE_TYPES, LEGACY_IPC, MEMORY_POOL


class Memory:
    """Pinned ranges, and what was allocated.

    Attributes:
        owned: (start, end, ordinal) of memory that tests gave to a GPU.
        unmapped, readable: ordinals of GPUs whose memory is not mapped for this one, or to be read only.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pinned: list[tuple[int, int]] = []
        self.memory: dict[int, np.ndarray] = {}
        self.owned: list[tuple[int, int, int]] = []
        self.unmapped: set[int] = set()
        self.readable: set[int] = set()

    def check(self, call: str) -> None:
        """Raise what the call is to fail with."""
        raise NotImplementedError

    def pin(self, array: np.ndarray, start: int = 0, stop: int | None = None) -> None:
        address = array.__array_interface__["data"][0]
        self.pinned.append((address + start, address + (array.nbytes if stop is None else stop)))

    def own(self, array: np.ndarray, ordinal: int) -> None:
        """Make an array the memory of a GPU."""
        address = array.__array_interface__["data"][0]
        self.owned.append((address, address + array.nbytes, ordinal))

    def pointer(self, address: int, attribute: int) -> int | None:
        if attribute == ACCESS_FLAGS:
            found = [ordinal for start, end, ordinal in self.owned if start <= address < end]
            if not found:
                return None
            return 0 if found[0] in self.unmapped else 1 if found[0] in self.readable else 3
        if attribute in (LEGACY_IPC, HANDLE_TYPES, MEMORY_POOL):
            return self.shareable(address, attribute)
        for start, end in self.pinned:
            if start <= address < end:
                known = {
                    MEMORY_TYPE: HOST_MEMORY,
                    DEVICE_POINTER: address,
                    RANGE_START: start,
                    RANGE_SIZE: end - start,
                }
                return known[attribute]
        return None

    def shareable(self, address: int, attribute: int) -> int:
        """Whether memory has a handle of 64 bytes, and whether it has file descriptors."""
        pieces = getattr(getattr(self, "driver", None), "pieces", ())
        in_piece = any(first <= address < first + nbytes for first, nbytes, _ in pieces)
        owned = any(start <= address < end for start, end, _ in self.owned)
        return int({LEGACY_IPC: owned and not in_piece, HANDLE_TYPES: in_piece}.get(attribute, False))

    def allocate(self, nbytes: int) -> int:
        self.check("cuMemAlloc")
        array = np.full(nbytes + 512, 0xDD, np.uint8)
        address = -(-array.__array_interface__["data"][0] // 256) * 256
        with self.lock:
            self.memory[address] = array
        return address

    def free(self, address: int) -> None:
        with self.lock:
            self.memory.pop(address)

    allocate_host, free_host = allocate, free

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.memory.values())

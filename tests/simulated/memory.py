"""Memory of a GPU that is not there, and of the host as its driver knows it."""

from __future__ import annotations

import threading

import numpy as np

from kvplan.cuda.device import DEVICE_POINTER, HOST_MEMORY, MEMORY_TYPE, RANGE_SIZE, RANGE_START


class Memory:
    """Pinned ranges, and what was allocated."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pinned: list[tuple[int, int]] = []
        self.memory: dict[int, np.ndarray] = {}

    def check(self, call: str) -> None:
        """Raise what the call is to fail with."""
        raise NotImplementedError

    def pin(self, array: np.ndarray, start: int = 0, stop: int | None = None) -> None:
        address = array.__array_interface__["data"][0]
        self.pinned.append((address + start, address + (array.nbytes if stop is None else stop)))

    def pointer(self, address: int, attribute: int) -> int | None:
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

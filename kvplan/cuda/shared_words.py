"""Words in memory of two processes: streams of one process write them; the CPU and streams of the other wait for them.

A stream writes a word after all earlier work on it, and after the bytes of that work can be seen by all processors. So
the reader needs neither a call of the driver nor a turn of the writer's CPU. If the writer dies, the reader writes the
word itself, and its streams go on. An interprocess event cannot do that: a stream that waits for one waits forever.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Self

import numpy as np

from kvplan.base.process import generation
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.driver import DEVICE_MAP, PORTABLE
from kvplan.errors import LayoutError

PAGE = 16384
WORD = 8  # bytes
AT_LEAST = 0  # CUstreamWaitValue_flags: it compares by the sign of the difference
RELEASED = 1 << 62  # at least as large as any number that is waited for


class SharedWords:
    """A page of 2,048 words of 64 bits, and memory behind it, which another process opens by its file descriptor.

    Streams reach the page. The memory behind it takes none of the machine's until it is written.

    Args:
        nbytes: bytes of both.

    Attributes:
        descriptor: the descriptor to send to the other process; -1 if this process opened the other's.

    >>> with SharedWords() as mine, SharedWords.opened(mine.descriptor) as theirs:
    ...     mine.store(3, 7)
    ...     theirs.load(3), theirs.load(4)
    (7, 0)
    """

    def __init__(self, nbytes: int = PAGE) -> None:
        self.descriptor = os.memfd_create("kvplan-words")
        os.ftruncate(self.descriptor, nbytes)
        self._map(self.descriptor, nbytes)

    @classmethod
    def opened(cls, descriptor: int, nbytes: int = PAGE) -> Self:
        """Map another process's words. The caller closes the descriptor.

        Raises:
            LayoutError: it has fewer bytes, or is no memory.
        """
        self = cls.__new__(cls)
        self.descriptor = -1
        try:
            self._map(descriptor, nbytes)
        except (OSError, ValueError) as error:
            raise LayoutError(f"a descriptor of no words of {nbytes} bytes came: {error}") from None
        return self

    def _map(self, descriptor: int, nbytes: int) -> None:
        self._memory = mmap.mmap(descriptor, nbytes)
        self._address = int(np.frombuffer(self._memory, np.uint64).__array_interface__["data"][0])
        self._words: Any = memoryview(self._memory).cast("Q")  # of which a word is read faster than of an array
        self._device: Device | None = None
        self._made_in = generation()

    def load(self, index: int) -> int:
        """Return a word."""
        word: int = self._words[index]
        return word

    def store(self, index: int, value: int) -> None:
        """Write a word by the CPU."""
        self._words[index] = value

    def put(self, index: int, held: bytes) -> None:
        """Write bytes by the CPU, from a word on."""
        self._memory[WORD * index : WORD * index + len(held)] = held

    def get(self, index: int, nbytes: int) -> bytes:
        r"""Return bytes, from a word on.

        >>> with SharedWords() as words:
        ...     words.put(5, b"ready")
        ...     words.get(5, 3), words.load(5).to_bytes(8, "little")
        (b'rea', b'ready\x00\x00\x00')
        """
        return self._memory[WORD * index : WORD * index + nbytes]

    def discard(self, start: int, nbytes: int) -> None:
        """Give back the machine's memory of some bytes, in whole pages of the system; they are zeros then."""
        self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)

    def address(self, index: int) -> int:
        """Return the address of a word."""
        return self._address + WORD * index

    def pin(self, device: Device) -> None:
        """Pin the page, so that streams of all GPUs of this process can write it. A second call does nothing.

        Raises:
            TransferError: the driver does not pin it.
        """
        if self._device is not None:
            return
        with device.current(), Uncaptured(device):
            what = f"{PAGE} bytes at {self._address:#x}"
            device.driver.call("cuMemHostRegister_v2", self._address, PAGE, PORTABLE | DEVICE_MAP, what=what)
        self._device = device

    def write(self, device: Device, stream: int, index: int, value: int) -> None:
        """Let a stream of a current device write a word, after all work that was issued on the stream so far."""
        device.driver.call("cuStreamWriteValue64_v2", stream, self.address(index), value, 0)

    def wait(self, device: Device, stream: int, index: int, value: int) -> None:
        """Let later work on a stream of a current device wait until a word is at least ``value``; return at once."""
        device.driver.call("cuStreamWaitValue64_v2", stream, self.address(index), value, AT_LEAST)

    @property
    def pinned(self) -> bool:
        """Whether a stream may write or await its words."""
        return self._device is not None

    def close(self) -> None:
        """Unpin and unmap the page; no stream may still have to write it or wait for it. A second call does nothing."""
        if self._memory.closed:
            return
        device, self._device = self._device, None
        if device is not None and self._made_in == generation():
            with device.current(), Uncaptured(device):
                device.driver.cuMemHostUnregister(self._address)
        self._words.release()
        self._memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

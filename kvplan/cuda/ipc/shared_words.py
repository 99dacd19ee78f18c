"""Words in memory of two processes: streams of one process write them; the CPU and streams of the other wait for them.

A stream writes a word after all earlier work on it, and after the bytes of that work can be seen by all processors. So
the reader needs neither a call of the driver nor a turn of the writer's CPU. If the writer dies, the reader writes the
word itself, and its streams go on. An interprocess event cannot do that: a stream that waits for one waits forever.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any, Self

import numpy as np

from kvplan.base.process import generation
from kvplan.cuda.device import DEVICE_MAP, DEVICE_POINTER, PORTABLE, Device
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import LayoutError, TransferError

PAGE = 16384
WORD = 8  # bytes
AT_LEAST = 0  # CUstreamWaitValue_flags: it compares by the sign of the difference
RELEASED = 1 << 62  # at least as large as any number that is waited for
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedWords:
    """A page of 2,048 words of 64 bits, which another process opens by its file descriptor.

    The size is sealed: a process that reads beyond the end of a file would get a signal that ends it.

    Attributes:
        descriptor: the descriptor to send to the other process; -1 if this process opened the other's.

    >>> with SharedWords() as mine, SharedWords.opened(os.dup(mine.descriptor)) as theirs:
    ...     mine.store(3, 7)
    ...     theirs.load(3), theirs.load(4)
    (7, 0)
    """

    descriptor = -1

    def __init__(self) -> None:
        descriptor = os.memfd_create("kvplan-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, PAGE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def _map(self, descriptor: int) -> None:
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, PAGE)
        self._address = int(np.frombuffer(self._memory, np.uint64).__array_interface__["data"][0])
        self._words: Any = memoryview(self._memory).cast("Q")  # of which a word is read faster than of an array
        self._device: Device | None = None
        self._made_in = generation()

    @classmethod
    def opened(cls, descriptor: int) -> Self:
        """Map another process's page. The descriptor is closed, also after an error.

        Raises:
            LayoutError: it is no page of words, or its size is not sealed.
        """
        self = cls.__new__(cls)
        try:
            held = os.fstat(descriptor).st_size
            try:
                sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS
            except OSError:
                sealed = 0
            if held != PAGE or sealed != SEALS:
                raise LayoutError(f"a descriptor of {held} bytes came; expected a page of {PAGE} bytes, sealed")
            try:
                self._map(descriptor)
            except OSError as error:
                raise LayoutError(f"the page of words cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)
        return self

    def load(self, index: int) -> int:
        """Return a word."""
        word: int = self._words[index]
        return word

    def store(self, index: int, value: int) -> None:
        """Write a word by the CPU."""
        self._words[index] = value

    def put(self, index: int, held: bytes) -> None:
        """Write bytes by the CPU, from a word on."""
        assert self._memory is not None  # it is open
        at = WORD * index
        self._memory[at : at + len(held)] = held

    def get(self, index: int, nbytes: int) -> bytes:
        r"""Return bytes, from a word on.

        >>> with SharedWords() as words:
        ...     words.put(5, b"ready")
        ...     words.get(5, 3), words.load(5).to_bytes(8, "little")
        (b'rea', b'ready\x00\x00\x00')
        """
        assert self._memory is not None  # it is open
        return self._memory[WORD * index : WORD * index + nbytes]

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
        cu = device.driver
        with device.current(), Uncaptured(device):
            code = cu.cuMemHostRegister_v2(self._address, PAGE, PORTABLE | DEVICE_MAP)
            cu.check("cuMemHostRegister", code, f"{PAGE} bytes at {self._address:#x}")
        self._device = device
        if device.pointer(self._address, DEVICE_POINTER) != self._address:
            raise TransferError(f"host memory at {self._address:#x} has another address on cuda:{device.ordinal}")

    def write(self, device: Device, stream: int, index: int, value: int) -> None:
        """Let a stream of a current device write a word, after all work that was issued on the stream so far."""
        code = device.driver.cuStreamWriteValue64_v2(stream, self._address + WORD * index, value, 0)
        if code:
            device.driver.check("cuStreamWriteValue64", code)

    def wait(self, device: Device, stream: int, index: int, value: int) -> None:
        """Let later work on a stream of a current device wait until a word is at least ``value``; return at once."""
        code = device.driver.cuStreamWaitValue64_v2(stream, self._address + WORD * index, value, AT_LEAST)
        if code:
            device.driver.check("cuStreamWaitValue64", code)

    @property
    def pinned(self) -> bool:
        """Whether a stream may write or await its words."""
        return self._device is not None

    def close(self) -> None:
        """Unpin and unmap the page; no stream may still have to write it or wait for it. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        device, self._device = self._device, None
        if device is not None and self._made_in == generation():
            with device.current(), Uncaptured(device):
                device.driver.cuMemHostUnregister(self._address)
        self._words.release()
        memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

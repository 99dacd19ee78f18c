"""A stream held up until the test says so: what is behind the gate is provably not done."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Self

import torch

SECONDS = 20.0  # after which a gate opens by itself, so that a test that blocks ends, and fails
GREATER_OR_EQUAL = 0


class Gate:
    """Holds up a stream of the GPU until :meth:`open`.

    The driver waits for a word of pinned memory; no kernel spins, so that nothing else is slowed down. A gate that
    nobody opens does so by itself after ``seconds``.
    """

    def __init__(self, stream: torch.cuda.Stream, seconds: float = SECONDS) -> None:
        self.stream = stream
        self.expired = False
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._word = self._flag.numpy()
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def open(self) -> None:
        self._word[0] = 1

    def _expire(self) -> None:
        self.expired = True
        self.open()

    def __enter__(self) -> Self:
        driver = ctypes.CDLL("libcuda.so.1")
        self._timer.start()
        code = driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(self.stream.cuda_stream),
            ctypes.c_uint64(self._flag.data_ptr()),
            ctypes.c_uint32(1),
            ctypes.c_uint(GREATER_OR_EQUAL),
        )
        assert code == 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self.open()
        self.stream.synchronize()
        if error is None:
            assert not self.expired, "somebody blocked until the gate opened by itself"

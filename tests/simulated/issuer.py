"""The thread that plays lists of calls, for a GPU that is not there: in Python, list by list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.base.threads import Worker
from kvplan.cuda.call_list import ENDED, HURRIED, LAST_ROW, Segment
from kvplan.cuda.scopes import Uncaptured

if TYPE_CHECKING:
    from tests.simulated.device import Device


class Issuer:
    """Has the methods of `kvplan.cuda.issuer.Issuer`."""

    def __init__(self, device: Device, name: str, inside: set[int]) -> None:
        self.given = self.taken = 0
        self.worker = Worker(name, self._serve, "no thread makes the calls of long transfers", inside)
        self._device = device
        self._lists: SimpleQueue[Any] = SimpleQueue()
        self._last: np.ndarray | None = None

    @property
    def idle(self) -> bool:
        return self.taken == self.given

    def push(self, segments: Sequence[Segment], state: np.ndarray) -> None:
        if not self.worker.started:
            self.worker.start()
        put, entry = self._lists.put, (segments, state)
        if self._last is not None:
            self._last[HURRIED] = LAST_ROW
        self._last = state
        self.given += 1
        put(entry)

    def stop(self) -> None:
        self._lists.put(None)

    def _serve(self) -> None:
        with Uncaptured(self._device):
            while (entry := self._lists.get()) is not None:
                segments, state = entry
                for segment in segments:  # compiled code reads them by their addresses
                    assert all(array.flags.c_contiguous and array.dtype == np.int64 for array in segment)
                self._device.play(segments, state)
                while not state[ENDED]:  # it has failed
                    time.sleep(1e-4)
                self.taken += 1

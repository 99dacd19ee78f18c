"""A thread that makes driver calls from lists, and stays in compiled code: it never needs the interpreter.

Python lets one thread run at a time. A thread that asks for its turn waits up to the switch interval, 5 ms by default,
while another thread computes in Python, and longer while another thread is in a C call that keeps the interpreter. The
issuer enters a compiled loop once, and takes lists of calls from a queue in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from kvplan.base.threads import Worker
from kvplan.cuda import calls
from kvplan.cuda.call_list import HURRIED, LAST_ROW, PLAYED, Segment, new_state
from kvplan.cuda.scopes import HasDriver, Uncaptured
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array

SLOTS = 256  # lists that the queue holds
SEMAPHORE_WORDS = 8  # at least the size of a sem_t on every Linux
_LIBRARY = ctypes.PyDLL(None)  # calls that return at once keep the interpreter
_POST = _LIBRARY.sem_post


class Machine(HasDriver, Protocol):
    """The parts of a :class:`~kvplan.cuda.device.Device` that the thread needs."""

    @property
    def entries(self) -> Int64Array:
        """Return the addresses of the functions that the loop calls."""

    @property
    def attributes(self) -> tuple[int, int]:
        """Return the addresses of the attributes of batched copies, and of the index of the first copy."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device current for the calling thread, within a ``with``."""

    def watch(self, state: Int64Array, rows: int, *, hurry: bool = True) -> bool:
        """Wait for rows of a list; see :meth:`kvplan.cuda.device.Device.watch`."""


class Issuer:
    """A queue of lists, and the thread that plays them in their order.

    Args:
        device: the GPU.
        name: name of the thread.
        inside: identifiers of threads that cannot wait for the executor's end; the thread adds its own.

    If a call of a list fails, the thread plays no later list before the caller has set ENDED in the list's state. So
    the caller can make calls between the two.

    Attributes:
        given: number of lists that were ever queued.
        worker: the thread.
    """

    def __init__(self, device: Machine, name: str, inside: set[int]) -> None:
        self.given = 0
        self.worker = Worker(name, self._serve, "no thread makes the calls of long transfers", inside)
        self._device = device
        self._queue = np.zeros((SLOTS, calls.SLOT_WORDS), dtype=np.int64)
        self._taken = new_state()  # its word PLAYED counts lists
        self._held: list[tuple[Sequence[Segment], Int64Array, Int64Array] | None] = [None] * SLOTS
        self._dropped = 0  # lists that were played and are not held any more
        self._semaphore = np.zeros(SEMAPHORE_WORDS, dtype=np.int64)
        self._at = ctypes.c_void_p(self._semaphore.ctypes.data)
        if _LIBRARY.sem_init(self._at, 0, 0):
            raise TransferError("no thread makes the calls of long transfers: sem_init failed")

    @property
    def idle(self) -> bool:
        """Return whether every list has been played, so that another thread may make calls on the same streams."""
        return int(self._taken[PLAYED]) == self.given

    def push(self, segments: Sequence[Segment], state: Int64Array) -> None:
        """Queue a list. One thread at a time calls it.

        Args:
            segments: the list; its arrays are C-contiguous, and are kept until it has been played.
            state: (8,) int64: the list's state.

        Raises:
            TransferError: the thread cannot be started.
        """
        if not self.worker.started:
            self.worker.start()
        table = np.array([
            (rows.ctypes.data, len(rows), columns.ctypes.data, columns.shape[1],
             launches.ctypes.data, len(launches), boxes.ctypes.data, len(boxes))
            for rows, columns, launches, boxes in segments
        ], dtype=np.int64)  # fmt: skip
        given, post, at = self.given, _POST, self._at
        while given - int(self._taken[PLAYED]) >= SLOTS - 1:  # rare: few transfers are not played at once
            self._device.watch(self._taken, given - SLOTS + 2, hurry=False)
        for played in range(self._dropped, int(self._taken[PLAYED])):
            self._held[played % SLOTS] = None
            self._dropped = played + 1
        words = np.array((table.ctypes.data, len(table), state.ctypes.data, 0), dtype=np.int64)
        number, before = given % SLOTS, self._held[(given - 1) % SLOTS]
        if before is not None:
            before[2][HURRIED] = LAST_ROW  # the GPU shall go on with this list without a pause
        self._held[number] = (segments, table, state)
        self._queue[number] = words
        self.given = given + 1  # no signal handler runs from here to the end of post
        post(at)

    def stop(self) -> None:
        """End the thread after all lists in the queue. It is called once, after the last push."""
        if self.worker.started:
            self._queue[self.given % SLOTS] = 0
            self.given += 1
            _POST(self._at)

    def _serve(self) -> None:
        device, wait = self._device, ctypes.cast(_LIBRARY.sem_wait, ctypes.c_void_p).value
        with device.current(), Uncaptured(device):
            taken = self._taken.ctypes.data + 8 * PLAYED
            calls.serve(device.entries, *device.attributes, self._queue, taken, self._at.value, wait)

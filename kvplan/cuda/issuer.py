"""A thread that makes driver calls from lists, and stays in compiled code: it never needs the interpreter.

Python lets one thread run at a time. A thread that asks for its turn waits up to the switch interval, 5 ms by default,
while another thread computes in Python, and longer while another thread is in a C call that keeps the interpreter. The
issuer enters a compiled loop once and takes lists of calls from a queue in memory.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numba
import numpy as np

from kvplan.base.threads import Worker
from kvplan.cuda import calls
from kvplan.cuda.call_list import ENDED, PLAYED, STATE_WORDS, Segment
from kvplan.cuda.calls import _call, observe, pointer, publish
from kvplan.cuda.scopes import Uncaptured
from kvplan.layout.strides import Int64Array
from kvplan.plan.jit import compiled as _compiled

if TYPE_CHECKING:
    from kvplan.cuda.device import Device

# A slot of the queue: addresses and numbers of rows, columns, launches and boxes; the state; the rows before these; and
# whether it is the last segment of its list. The slot of the last segment of all has rows at address 0.
ROWS: Final = 0
COLUMNS: Final = 2
LAUNCHES: Final = 4
BOXES: Final = 6
STATE: Final = 8
BASE: Final = 9
LAST: Final = 10
SLOT_WORDS: Final = 12
SLOTS: Final = 256
SEMAPHORE_BYTES = 64  # at least the size of a sem_t on every Linux
WATCH_NAPS: Final = 50  # naps of 20 us between two looks of a waiting Python thread at its signals


@_compiled
def serve(entries, attributes, first, queue, taken, semaphore, wait):
    """Play the segments of a queue in order, until the slot that ends the thread.

    Args:
        entries, attributes, first: see :func:`kvplan.cuda.calls.play`.
        queue: (slots, 12) int64: the segments, one per slot, used in turn.
        taken: address of the number of segments that have been played.
        semaphore: address of a semaphore that counts the segments in the queue.
        wait: address of sem_wait.
    """
    number = 0
    while True:
        if _call(wait, (semaphore,)):
            continue  # a signal
        slot = queue[number % queue.shape[0]]
        if not slot[ROWS]:
            return
        state = slot[STATE]
        if not observe(state + 8 * ENDED):  # otherwise a call of an earlier segment has failed
            rows = numba.carray(pointer(slot[ROWS]), (slot[ROWS + 1], 4), np.int64)
            columns = numba.carray(pointer(slot[COLUMNS]), (3, slot[COLUMNS + 1]), np.int64)
            launches = numba.carray(pointer(slot[LAUNCHES]), (slot[LAUNCHES + 1], 8), np.int64)
            boxes = numba.carray(pointer(slot[BOXES]), (slot[BOXES + 1], 16), np.int64)
            played = calls.play(entries, rows, columns, launches, boxes, attributes, first, state, slot[BASE])
            if played and slot[LAST]:
                publish(state + 8 * ENDED, 1)
        number += 1
        publish(taken, number)


@_compiled
def watch(state, rows, nap, naps):
    """Wait until rows of a list have been played or the list has ended, for at most ``naps`` naps.

    Args:
        state: address of the list's state.
        rows: the number of rows.
        nap: address of usleep.
        naps: number of naps.

    Returns:
        Whether the wait is over.
    """
    for _ in range(naps):
        if observe(state + 8 * PLAYED) >= rows or observe(state + 8 * ENDED):
            return True
        _call(nap, (calls.NAP_MICROSECONDS,))
    return False


class Issuer:
    """A queue of segments, and the thread that plays them.

    Args:
        device: the GPU.
        name: name of the thread.
        inside: identifiers of threads that cannot wait for the executor's end; the thread adds its own.
    """

    def __init__(self, device: Device, name: str, inside: set[int]) -> None:
        self._device = device
        self._library = ctypes.PyDLL(None)
        self._semaphore = np.zeros(SEMAPHORE_BYTES // 8, dtype=np.int64)
        self._at = ctypes.c_void_p(self._semaphore.ctypes.data)
        if self._library.sem_init(self._at, 0, 0):
            raise OSError(ctypes.get_errno() or errno.ENOSYS, "sem_init failed")
        self._queue = np.zeros((SLOTS, SLOT_WORDS), dtype=np.int64)
        self._taken = new_state()  # its word PLAYED counts segments
        self._given = 0
        self._held: list[tuple[Sequence[Segment], Int64Array] | None] = [None] * SLOTS
        self._lock = threading.Lock()
        self._ended = False
        self.worker = Worker(name, self._serve, "no thread makes the calls of long transfers", inside)

    @property
    def idle(self) -> bool:
        """Return whether every segment has been played, so that another thread may make calls on the same streams."""
        return int(self._taken[PLAYED]) == self._given

    @property
    def room(self) -> int:
        """Return how many segments the queue takes now."""
        return SLOTS - 1 - (self._given - int(self._taken[PLAYED]))

    def push(self, segments: Sequence[Segment], state: Int64Array, base: int = 0, *, last: bool = True) -> None:
        """Queue segments of a list, in order. One thread at a time calls it.

        Args:
            segments: the segments; their arrays are C-contiguous, and are kept until the queue's slot is used again.
            state: (8,) int64: the list's state.
            base: rows of the list that are before these segments.
            last: whether the list has no further segments.
        """
        if not self.worker.started:
            self.worker.start()
        for k, segment in enumerate(segments):
            while not self.room:  # rare: the queue holds more than any transfer has
                watch(self._taken.ctypes.data, self._given - SLOTS + 2, self._device.entries[calls.NAP], WATCH_NAPS)
            number = self._given % SLOTS
            rows, columns, launches, boxes = segment
            self._held[number] = (segment, state)
            self._queue[number, :11] = (
                rows.ctypes.data, len(rows), columns.ctypes.data, columns.shape[1], launches.ctypes.data, len(launches),
                boxes.ctypes.data, len(boxes), state.ctypes.data, base, last and k == len(segments) - 1,
            )  # fmt: skip
            base += len(rows)
            self._given += 1
            self._library.sem_post(self._at)

    def stop(self) -> None:
        """End the thread after all segments in the queue. A second call does nothing."""
        with self._lock:
            if self._ended or not self.worker.started:
                return
            self._ended = True
        self._queue[self._given % SLOTS, :] = 0
        self._given += 1
        self._library.sem_post(self._at)

    def _serve(self) -> None:
        device, wait = self._device, ctypes.cast(ctypes.CDLL(None).sem_wait, ctypes.c_void_p).value
        with device.current(), Uncaptured(device):
            serve(device.entries, *device.attributes, self._queue, self._taken.ctypes.data, self._at.value, wait)


def new_state() -> Int64Array:
    """Return the state of a list of which no call has been made."""
    return np.zeros(STATE_WORDS, dtype=np.int64)


def load() -> None:
    """Compile the loops for the types of their arguments, or load them from numba's cache; make no call."""
    state = new_state()
    state[ENDED] = 1
    watch(state.ctypes.data, 1, 0, 1)
    serve.compile(tuple(numba.typeof(one) for one in (state, 0, 0, np.zeros((1, SLOT_WORDS), np.int64), 0, 0, 0)))

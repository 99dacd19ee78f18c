"""A thread that makes driver calls from lists, and stays in compiled code: it never needs the interpreter.

Python lets one thread run at a time. A thread that asks for its turn waits up to the switch interval, 5 ms by default,
while another thread computes in Python, and longer while another thread is in a C call that keeps the interpreter. The
issuer enters a compiled loop once, and takes lists of calls from two queues in memory, the urgent one first.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvplan.base.threads import Worker
from kvplan.cuda import player
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.rows import ENDED, HURRIED, LAST_ROW
from kvplan.layout.strides import Int64Array

SLOTS = 256  # lists that a queue holds
SEMAPHORE_WORDS = 8  # at least the size of a sem_t on every Linux
_LIBRARY = ctypes.PyDLL(None)  # calls that return at once keep the interpreter


class Issuer:
    """Two queues of lists, and the thread that plays each of them in order.

    Args:
        device: the GPU.
        name: name of the thread.
        paces: four events, which it uses until it ends.

    Raises:
        TransferError: the system cannot start the thread.
    """

    def __init__(self, device: Device, name: str, paces: list[int]) -> None:
        self._device = device
        self._queue = np.zeros((2, SLOTS, 3), dtype=np.int64)
        # For each queue, its slot, the rows and the state of each list that the loop may still read.
        self._held: list[list[tuple[Int64Array, Int64Array, Int64Array]]] = [[], []]
        self._given = [0, 0]
        self._control, self._semaphore = np.zeros(1, dtype=np.int64), np.zeros(SEMAPHORE_WORDS, dtype=np.int64)
        self._at = ctypes.c_void_p(self._semaphore.ctypes.data)
        _LIBRARY.sem_init(self._at, 0, 0)
        self._paces = np.array(paces, dtype=np.int64).reshape(2, 2)
        self.thread = Worker(name, self._serve, "no thread makes the calls of long transfers", set())
        self.thread.start()

    def idle(self, urgent: bool) -> bool:
        """Return whether every list of a queue has ended, so that another thread may make calls on its streams."""
        held = self._held[urgent]
        return not held or bool(held[-1][2][ENDED])

    def full(self, urgent: bool) -> bool:
        """Return whether a queue has no free slot, after a wait of about 1 ms for one."""
        slot = self._queue[int(urgent), self._given[urgent] % SLOTS]
        if slot[0]:
            self._device.watch(self._held[urgent][0][2], LAST_ROW, hurry=False)
        return bool(slot[0])

    def push(self, rows: Int64Array, state: Int64Array, *, urgent: bool) -> None:
        """Queue a list; there is a free slot. One thread at a time calls it. The list is kept until it has ended.

        Args:
            rows: the calls.
            state: the list's state.
            urgent: whether it goes to the urgent queue.
        """
        held, slot = self._held[urgent], self._queue[int(urgent), self._given[urgent] % SLOTS]
        while held and not held[0][0][0]:  # the loop has left its slot
            held.pop(0)
        if held:
            held[-1][2][HURRIED] = LAST_ROW  # the GPU shall go on with this list without a pause
        held.append((slot, rows, state))
        slot[1:] = len(rows), state.ctypes.data
        slot[0] = rows.ctypes.data  # last: the loop looks at it first
        self._given[urgent] += 1
        _LIBRARY.sem_post(self._at)

    def has(self, state: Int64Array) -> bool:
        """Return whether the list with this state is in a queue, or was played."""
        return bool(state[ENDED] or ((self._queue[:, :, 2] == state.ctypes.data) & (self._queue[:, :, 0] != 0)).any())

    def stop(self) -> None:
        """Let the thread end after all lists in the queues."""
        self._control[0] = 1
        _LIBRARY.sem_post(self._at)

    def _serve(self) -> None:
        device = self._device
        with device.current(), Uncaptured(device):
            player.serve(device.entries, self._queue, self._paces, self._control, self._at.value)

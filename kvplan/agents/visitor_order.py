"""The order of a visitor's transfers and of the owner's work, on the visitor's GPU: no CPU waits for either."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvplan.agents.board import ENDED, ISSUED, LANES, PASSED, PUBLISHED
from kvplan.base.process import generation
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.ipc.shared_words import RELEASED, SharedWords
from kvplan.errors import TransferError

WITHIN = "a transfer was submitted within the submit of another one of the same thread"
LOOK_SECONDS = 1e-4  # between two looks for the end of published work


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream, as ``after=`` and ``wait`` take it."""

    cuda_stream: int
    device_index: int


class VisitorOrder:
    """The streams behind a visitor's transfers, one a lane, and the stream before them.

    Args:
        device: the GPU that runs the kernels.
        board: the board.
        gpus: numbers of the owner's GPUs.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device, board: SharedWords, gpus: Sequence[int]) -> None:
        self._device, self._board, self._gpus = device, board, gpus
        self._lock = threading.RLock()  # several threads may submit, and they share the event
        self._counting = False
        self._issued = [0] * LANES
        self._made_in = generation()
        self._streams: list[int] = []
        self._gate_stream = self._gate = 0
        board.pin(device)
        try:
            with device.current(), Uncaptured(device):
                self._streams = [device.stream(urgent=True) for _ in range(LANES)]
                self._gate_stream, self._gate = device.stream(urgent=True), device.event()
        except BaseException:
            self.close()
            raise

    def count(self, transfer: Any, lane: int) -> int:
        """Let the lane's stream count a transfer that was submitted, behind its end; return its number.

        It returns 0 for a transfer that only the CPU can count: not all of its driver calls have been made, or it has
        failed.

        Raises:
            TransferError: a signal handler submits within a submit.
        """
        if not getattr(transfer, "ordered", False) or not self._streams:
            return 0
        with self._lock:
            if self._counting:  # by this thread, in a signal handler: a later number must not be written first
                raise TransferError(WITHIN)
            self._counting = True
            try:
                return self._count(transfer, lane)
            finally:
                self._counting = False

    def _count(self, transfer: Any, lane: int) -> int:
        board, device = self._board, self._device
        # Counted first: after an error, the next transfer must not take a number that the stream may have written.
        number = self._issued[lane] = self._issued[lane] + 1
        words = (board.address(ENDED + lane),)
        try:
            if device.is_current():  # as in most submits; then there is nothing to restore
                transfer.write_behind(self._streams[lane], words, (number,))
            else:
                with device.current():
                    transfer.write_behind(self._streams[lane], words, (number,))
        except TransferError:  # the agent tells its error
            return 0
        board.store(ISSUED + lane, number)
        return number

    def behind_published(self, after: Any) -> Any:
        """Return the ``after=`` to submit with: it waits for the user's, and for the work that the owner published."""
        waits = self._unfinished()
        if not waits:
            return after
        with self._lock, self._device.current():
            if self._wait_for(after):
                for word, number in waits:
                    self._board.wait(self._device, self._gate_stream, word, number)
                return Waited(self._gate_stream, self._device.ordinal)
        while self._unfinished():  # the CPU waits for ``after`` anyway
            time.sleep(LOOK_SECONDS)
        return after

    def _unfinished(self) -> list[tuple[int, int]]:
        """Return the words of published work that has not ended, each with the number that it will have."""
        board, words = self._board, list[tuple[int, int]]()
        for gpu in self._gpus:
            number = board.load(PUBLISHED + gpu)
            if number and board.load(PASSED + gpu) < number <= RELEASED:
                words.append((PASSED + gpu, number))
        return words

    def _wait_for(self, after: Any) -> bool:
        """Let the gate's stream wait for an ``after=``; return whether it can."""
        device, stream, handle = self._device, self._gate_stream, event_handle(after)
        if handle is not None:
            if handle:
                device.wait(stream, handle)
            return True
        theirs = stream_handle(after)
        if theirs is not None and getattr(after, "device_index", device.ordinal) == device.ordinal:
            device.record(self._gate, theirs)
            device.wait(stream, self._gate)
        elif getattr(after, "ordered", False):  # all driver calls of a transfer have been made, and it is in no graph
            after.wait(Waited(stream, device.ordinal))
        else:
            return after is None
        return True

    def release(self) -> None:
        """Let transfers go on that wait for work of the owner, which has died."""
        for gpu in self._gpus:
            self._board.store(PASSED + gpu, RELEASED)

    def close(self) -> None:
        """Wait until the streams are idle, and destroy them. In a child of a fork it touches nothing of the GPU."""
        self.release()  # a submit that failed may have left a wait, and no transfer is in flight
        streams, gate = [*self._streams, self._gate_stream], self._gate
        self._streams, self._gate_stream, self._gate = [], 0, 0
        if self._made_in != generation():
            return
        device = self._device
        with device.current(), Uncaptured(device):
            for stream in filter(None, streams):
                if gate:
                    with suppress(TransferError):  # the GPU may have failed
                        device.record(gate, stream)
                        device.synchronize(gate)
                device.driver.cuStreamDestroy_v2(stream)
            if gate:
                device.driver.cuEventDestroy_v2(gate)

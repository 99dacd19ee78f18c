"""The order of an owner's work and of its visitors' transfers, on the GPUs of both: no CPU waits for either."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvplan.agents.board import ENDED, ISSUED, LANES, PASSED, PUBLISHED
from kvplan.base.process import generation
from kvplan.base.values import listed
from kvplan.cuda.device import NOT_READY, Device, Uncaptured
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.shared_words import RELEASED, SharedWords
from kvplan.errors import KVPlanError, TransferError

WITHIN = "a transfer was submitted within the submit of another one of the same thread"
LOOK_SECONDS = 1e-4  # between two looks for the end of published work


class OrderStreams:
    """Streams of high priority, and an event to record on them.

    Args:
        device: the GPU.
        count: number of streams.

    Attributes:
        device: as given.
        handles: the driver's handles of the streams; none after :meth:`close`.
        event: that of the event.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device, count: int) -> None:
        self.device, self.event = device, 0
        self.handles: list[int] = []
        self._made_in = generation()
        try:
            with device.current(), Uncaptured(device):
                for _ in range(count):
                    self.handles.append(device.stream(urgent=True))
                self.event = device.event()
        except BaseException:
            self.close()
            raise

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child, and they are its parent's."""
        return self._made_in != generation()

    def close(self) -> None:
        """Wait until the streams are idle, and destroy all. In a child of a fork it touches nothing of the GPU."""
        handles, self.handles = self.handles, []
        event, self.event = self.event, 0
        if self.foreign:
            return
        device = self.device
        with device.current(), Uncaptured(device):
            for stream in handles:
                if event:
                    with suppress(TransferError):  # the GPU may have failed
                        device.record(event, stream)
                        device.synchronize(event)
                device.driver.cuStreamDestroy_v2(stream)
            if event:
                device.driver.cuEventDestroy_v2(event)


# ---- the owner -----------------------------------------------------------------------------------------------------


class OwnerOrder:
    """The streams of an owner that wait for its visitors, and for which they wait; with the board of each visitor."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._streams: dict[int, _Streams] = {}  # by GPU
        self._published: dict[int, int] = {}  # how often work was published, by GPU
        self._boards: list[SharedWords] = []
        self._retired: list[tuple[SharedWords, list[tuple[_Streams, int]]]] = []  # boards that streams may still need

    def publish(self, stream: Any, gpus: Collection[int]) -> None:
        """Let transfers that visitors submit from now on wait for the work that was issued on a stream so far.

        Args:
            stream: a stream of the user.
            gpus: numbers of the GPUs whose memory is offered.

        Raises:
            KVPlanError: it is no stream, or of another GPU.
        """
        with self._lock:
            streams, handle = self._streams_of(stream, gpus)
            streams.order(handle, streams.published, handle)
            gpu = streams.device.ordinal
            self._published[gpu] = self._published.get(gpu, 0) + 1
            for board in self._boards:
                self._tell(board, gpu)

    def wait_for_visitors(self, stream: Any, gpus: Collection[int]) -> None:
        """Let later work on a stream wait for the transfers that visitors have issued so far; see :meth:`publish`."""
        with self._lock:
            streams, handle = self._streams_of(stream, gpus)
            device = streams.device
            for board in self._boards:
                for lane in range(LANES):
                    issued = min(board.load(ISSUED + lane), RELEASED)
                    if board.load(ENDED + lane) < issued:
                        board.pin(device)
                        with device.current():
                            board.wait(device, streams.visitors, ENDED + lane, issued)
            streams.order(streams.visitors, handle, handle)

    def enter(self, board: SharedWords) -> None:
        """Take the board of a new visitor, whose transfers wait for all work that was published."""
        with self._lock:
            self._boards.append(board)
            for gpu in self._published:
                self._tell(board, gpu)

    def leave(self, board: SharedWords) -> None:
        """Close the board of a visitor that has gone, once no stream needs it; never block."""
        with self._lock:
            if board in self._boards:
                self._boards.remove(board)
            marks = [(one, mark) for one in self._streams.values() for mark in one.marks()] if board.pinned else []
            self._retired.append((board, marks))
            for retired in list(self._retired):
                if all(one.passed(mark) for one, mark in retired[1]):
                    self._retired.remove(retired)
                    _close(*retired)

    def close(self) -> None:
        """Wait until the streams are idle, and close all; no visitor is left."""
        with self._lock:
            for streams in self._streams.values():
                streams.close()
            for retired in self._retired:
                _close(*retired)
            self._streams, self._retired = {}, []

    def _tell(self, board: SharedWords, gpu: int) -> None:
        """Let a visitor's next transfers wait for the work that was published on a GPU."""
        streams = self._streams[gpu]
        board.pin(streams.device)
        with streams.device.current():
            board.write(streams.device, streams.published, PASSED + gpu, self._published[gpu])
        board.store(PUBLISHED + gpu, self._published[gpu])

    def _streams_of(self, stream: Any, gpus: Collection[int]) -> tuple[_Streams, int]:
        """Return the streams of the GPU of a user's stream, and that stream's handle."""
        handle = stream_handle(stream)
        if handle is None:
            raise KVPlanError(f"stream is a {type(stream).__name__}; give a stream, as torch.cuda.Stream()")
        gpu = getattr(stream, "device_index", min(gpus))
        if gpu not in gpus:
            raise KVPlanError(f"the stream is of cuda:{gpu}; give one of {listed(f'cuda:{k}' for k in sorted(gpus))}")
        if gpu not in self._streams:
            self._streams[gpu] = _Streams(Device(gpu))
        return self._streams[gpu], handle


def _close(board: SharedWords, marks: list[tuple[_Streams, int]]) -> None:
    for streams, mark in marks:
        streams.forget(mark)
    board.close()


class _Streams(OrderStreams):
    """Two streams of a GPU, so that each order holds for work of any of the user's streams.

    Attributes:
        published: the stream behind all work that was published.
        visitors: the stream behind visitors' transfers.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device, 2)
        self.published, self.visitors = self.handles

    def order(self, first: int, second: int, user: int) -> None:
        """Let a stream wait for another one; one of them is the user's."""
        device = self.device
        with device.current():
            if device.capturing(user):
                raise KVPlanError("the stream is being captured into a CUDA graph; call this outside of the capture")
            device.record(self.event, first)
            device.wait(second, self.event)

    def marks(self) -> list[int]:
        """Return new events behind both streams."""
        device, marks = self.device, list[int]()
        with device.current(), Uncaptured(device):
            for stream in (self.published, self.visitors):
                marks.append(device.event())
                device.record(marks[-1], stream)
        return marks

    def passed(self, mark: int) -> bool:
        """Return whether an event has passed; never block."""
        with self.device.current(), Uncaptured(self.device):
            return bool(self.device.driver.cuEventQuery(mark) != NOT_READY)

    def forget(self, mark: int) -> None:
        """Destroy an event. In a child of a fork it does nothing."""
        if not self.foreign:
            with self.device.current(), Uncaptured(self.device):
                self.device.driver.cuEventDestroy_v2(mark)


# ---- the visitor ---------------------------------------------------------------------------------------------------


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
        board.pin(device)
        self._streams = OrderStreams(device, LANES + 1)  # one a lane, and the stream before all of them

    def count(self, transfer: Any, lane: int) -> int:
        """Let the lane's stream count a transfer that was submitted, behind its end; return its number.

        It returns 0 for a transfer that only the CPU can count: not all of its driver calls have been made, or it has
        failed.

        Raises:
            TransferError: a signal handler submits within a submit.
        """
        if not getattr(transfer, "ordered", False) or not self._streams.handles:
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
                transfer.write_behind(self._streams.handles[lane], words, (number,))
            else:
                with device.current():
                    transfer.write_behind(self._streams.handles[lane], words, (number,))
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
            gate = self._streams.handles[LANES]
            if self._wait_for(after, gate):
                for word, number in waits:
                    self._board.wait(self._device, gate, word, number)
                return Waited(gate, self._device.ordinal)
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

    def _wait_for(self, after: Any, stream: int) -> bool:
        """Let a stream wait for an ``after=``; return whether it can."""
        device, handle = self._device, event_handle(after)
        if handle is not None:
            if handle:
                device.wait(stream, handle)
            return True
        theirs = stream_handle(after)
        if theirs is not None and getattr(after, "device_index", device.ordinal) == device.ordinal:
            device.record(self._streams.event, theirs)
            device.wait(stream, self._streams.event)
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
        self._streams.close()

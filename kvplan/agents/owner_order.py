"""The order of an owner's work and of its visitors' transfers, on its GPUs: no CPU waits for either."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from kvplan.agents.board import ENDED, ISSUED, LANES, PASSED, PUBLISHED
from kvplan.base.process import generation
from kvplan.base.quoting import listed
from kvplan.cuda.device import NOT_READY, Device, Uncaptured
from kvplan.cuda.handles import stream_handle
from kvplan.cuda.ipc.shared_words import RELEASED, SharedWords
from kvplan.errors import KVPlanError, TransferError


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


class _Streams:
    """Two streams of a GPU, so that each order holds for work of any of the user's streams.

    Attributes:
        device: the GPU.
        published: the stream behind all work that was published.
        visitors: the stream behind visitors' transfers.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.published = self.visitors = self._event = 0
        self._made_in = generation()
        try:
            with device.current(), Uncaptured(device):
                self.published, self.visitors = device.stream(urgent=True), device.stream(urgent=True)
                self._event = device.event()
        except BaseException:
            self.close()
            raise

    def order(self, first: int, second: int, user: int) -> None:
        """Let a stream wait for another one; one of them is the user's."""
        device = self.device
        with device.current():
            if device.capturing(user):
                raise KVPlanError("the stream is being captured into a CUDA graph; call this outside of the capture")
            device.record(self._event, first)
            device.wait(second, self._event)

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
        if self._made_in == generation():
            with self.device.current(), Uncaptured(self.device):
                self.device.driver.cuEventDestroy_v2(mark)

    def close(self) -> None:
        """Wait until both streams are idle, and destroy them. In a child of a fork it does nothing."""
        if self._made_in != generation():
            return
        device = self.device
        with device.current(), Uncaptured(device):
            for stream in filter(None, (self.published, self.visitors)):
                if self._event:
                    with suppress(TransferError):  # the GPU may have failed
                        device.record(self._event, stream)
                        device.synchronize(self._event)
                device.driver.cuStreamDestroy_v2(stream)
            if self._event:
                device.driver.cuEventDestroy_v2(self._event)

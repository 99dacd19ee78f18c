"""``cuda_ipc``, the owner's side: GPU memory that visitors open, the order of work with it, and notes."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    ENDED_WORD,
    ISSUED_WORD,
    LANES,
    MOST_GPUS,
    PASSED_WORD,
    PUBLISHED_WORD,
    read_message,
)
from kvplan.agents.cuda_ipc.cuda_ipc_notes import PendingNotes
from kvplan.agents.cuda_ipc.cuda_ipc_streams import OwnerStreams
from kvplan.agents.way import Table
from kvplan.cuda.device import Device
from kvplan.cuda.handles import stream_handle
from kvplan.cuda.ipc.exports import Export, descriptors, exported
from kvplan.cuda.ipc.shared_words import RELEASED, SharedWords
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import KVPlanError, PathError
from kvplan.layout.components import Region

SPARE_DESCRIPTORS = 256  # that the rest of the process may open while all pieces are sent


class CudaIpcOffer:
    """Memory of this process's GPUs that visitors may open. See :class:`kvplan.agents.way.Offer`.

    Args:
        regions: regions of layouts, ascending.

    Attributes:
        part: the part of the card.
        exports: the allocations, ascending.

    Raises:
        PathError: the memory has too many pieces for this process's limit of descriptors.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.exports = _exports(regions)
        if len({export.gpu for _, export in self.exports}) > MOST_GPUS:
            raise PathError(f"the memory is of more than {MOST_GPUS} GPUs; make several agents")
        pieces = sum(len(export.pieces) for _, export in self.exports)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        if pieces > most >= 0:
            raise PathError(
                f"the memory has {pieces} pieces, each with a file descriptor, and this process may open {most} more; "
                "raise the limit (ulimit -n), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        self.part: Table = {"memory": [_document(export) for _, export in self.exports]}
        self._lock = threading.RLock()
        self._descriptors: list[int] | None = None
        self._gpus = list(dict.fromkeys(device.ordinal for device, _ in self.exports))  # as the visitor counts them
        self._streams: dict[int, OwnerStreams] = {}
        self._published: dict[int, int] = {}
        self._served: list[ServedByCudaIpc] = []
        self._retired: list[tuple[SharedWords, dict[int, list[int]]]] = []  # pages that streams may still need

    def serve(self) -> ServedByCudaIpc:
        """See :meth:`kvplan.agents.way.Offer.serve`."""
        with self._lock:
            if self._descriptors is None:
                self._descriptors = self._opened()
            made = ServedByCudaIpc(self, self._descriptors)
            try:
                for ordinal, number in self._published.items():
                    made.publish(self._gpus.index(ordinal), self._streams[ordinal], number)
            except BaseException:
                made.close()
                raise
            self._served.append(made)
            return made

    def publish(self, stream: Any) -> None:
        """Let transfers that visitors submit from now on wait for all work that was issued on a stream so far.

        The caller then tells the visitor, by any channel, that it may submit. No CPU waits.

        Args:
            stream: a stream of torch, or an object with ``cuda_stream`` or ``__cuda_stream__``, of a GPU whose memory
                is offered.

        Raises:
            KVPlanError: it is no stream, or of another GPU.
        """
        with self._lock:
            streams, handle = self._streams_of(stream)
            streams.follow(handle)
            ordinal = streams.device.ordinal
            number = self._published[ordinal] = self._published.get(ordinal, 0) + 1
            for one in self._served:
                one.publish(self._gpus.index(ordinal), streams, number)

    def wait_for_visitors(self, stream: Any) -> None:
        """Let later work on a stream wait for all transfers that visitors have submitted so far. No CPU waits.

        A transfer that was not issued by its submit does not count, such as one whose ``after=`` the CPU waits for.

        Raises:
            KVPlanError: it is no stream, or of another GPU.
        """
        with self._lock:
            streams, handle = self._streams_of(stream)
            for one in self._served:
                one.wait(streams)
            streams.precede(handle)

    def _streams_of(self, stream: Any) -> tuple[OwnerStreams, int]:
        """Return the streams of the GPU of a user's stream, and that stream's handle."""
        handle = stream_handle(stream)
        known = {device.ordinal: device for device, _ in self.exports}
        if handle is None:
            raise KVPlanError(f"stream is a {type(stream).__name__}; give a stream, as torch.cuda.Stream()")
        ordinal = getattr(stream, "device_index", next(iter(known)))
        if ordinal not in known:
            raise KVPlanError(f"the stream is of cuda:{ordinal}; give one of {', '.join(f'cuda:{k}' for k in known)}")
        if ordinal not in self._streams:
            self._streams[ordinal] = OwnerStreams(known[ordinal])
        return self._streams[ordinal], handle

    def gone(self, served: ServedByCudaIpc) -> None:
        """Forget a visitor that has gone."""
        with self._lock, suppress(ValueError):
            self._served.remove(served)

    def retire(self, words: SharedWords) -> None:
        """Close a page of words once no stream needs it; never block."""
        with self._lock:
            marks = {ordinal: streams.marks() for ordinal, streams in self._streams.items() if words.pinned}
            self._retired.append((words, marks))
            for one in list(self._retired):
                if all(self._streams[ordinal].all_passed(some) for ordinal, some in one[1].items()):
                    self._retired.remove(one)
                    one[0].close()

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Offer.close`."""
        with self._lock:
            held, self._descriptors = self._descriptors or [], None
            for streams in self._streams.values():
                streams.close()
            for words, marks in self._retired:
                for ordinal, some in marks.items():
                    self._streams[ordinal].all_passed(some)
                words.close()
            self._streams, self._retired = {}, []
        for each in held:
            os.close(each)

    def _opened(self) -> list[int]:
        found: list[int] = []
        try:
            for device, export in self.exports:
                found += descriptors(device, export)
        except BaseException:
            for each in found:
                os.close(each)
            raise
        return found


class ServedByCudaIpc:
    """The owner's state for one visitor. See :class:`kvplan.agents.way.Served`.

    Attributes:
        descriptors: of the pieces, in the order of the card, then of the words.
        words: the words that the streams of both processes write.
    """

    def __init__(self, offer: CudaIpcOffer, pieces: Sequence[int]) -> None:
        self._offer = offer
        self.words = SharedWords()
        self.descriptors: Sequence[int] = (*pieces, self.words.descriptor)
        self._notes = PendingNotes(self.words)
        self._closed = False
        self._lock = threading.RLock()  # the service thread hears and closes; a user's thread asks for notes

    def heard(self, message: bytes) -> None:
        """See :meth:`kvplan.agents.way.Served.heard`."""
        with self._lock:
            self._notes.take(read_message(message))

    def notes(self) -> list[bytes]:
        """See :meth:`kvplan.agents.way.Served.notes`. A word says behind which note the last byte has arrived."""
        with self._lock:
            return [] if self._closed else self._notes.arrived()

    def publish(self, gpu: int, streams: OwnerStreams, number: int) -> None:
        """Let the visitor's next transfers wait for the stream of published work; ``gpu`` counts the owner's GPUs."""
        device = streams.device
        self.words.pin(device)
        with device.current():
            self.words.write(device, streams.published, PASSED_WORD + gpu, number)
        self.words.store(PUBLISHED_WORD + gpu, number)

    def wait(self, streams: OwnerStreams) -> None:
        """Let the stream behind visitors wait for all transfers of this visitor that were issued."""
        device = streams.device
        for lane in range(LANES):
            issued = min(self.words.load(ISSUED_WORD + lane), RELEASED)
            if self.words.load(ENDED_WORD + lane) < issued:
                self.words.pin(device)
                with device.current():
                    self.words.wait(device, streams.visitors, ENDED_WORD + lane, issued)

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Served.close`. Streams that wait for a visitor that died go on."""
        self._offer.gone(self)
        with self._lock:
            self._closed = True
            for lane in range(LANES):
                self.words.store(ENDED_WORD + lane, RELEASED)
            self._offer.retire(self.words)


def _exports(regions: Sequence[Region]) -> list[tuple[Device, Export]]:
    """Return the allocations that hold some regions, ascending and without overlap, each with its GPU."""
    found: list[tuple[Device, Export]] = []
    for name, some in groupby(sorted(regions, key=lambda one: (one.device, one.address)), lambda one: one.device):
        device = Device(ordinal_of(name))
        for region in some:
            last = found[-1][1] if found and found[-1][0] is device else None
            if last is None or region.address >= last.end:
                found.append((device, exported(device, region.address, region.nbytes)))
            elif region.address + region.nbytes > last.end:
                found[-1] = device, exported(device, last.address, region.address + region.nbytes - last.address)
    return sorted(found, key=lambda one: one[1].address)


def _document(export: Export) -> Table:
    runs = [[nbytes, len(list(some))] for nbytes, some in groupby(export.pieces)]
    return {"gpu": export.gpu, "address": export.address, "nbytes": export.nbytes, "handle": export.handle.hex(),
            "pieces": runs}  # fmt: skip

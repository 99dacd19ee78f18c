"""``cuda_ipc``, the owner's side: GPU memory that visitors open, an event before it, and the notes behind transfers."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_messages import EVENT, PUBLISHED_WORD, read_message, refused
from kvplan.agents.cuda_ipc.cuda_ipc_notes import PendingNotes
from kvplan.agents.way import Table, Tell
from kvplan.cuda.device import Device
from kvplan.cuda.handles import stream_handle
from kvplan.cuda.ipc.exports import Export, descriptors, exported
from kvplan.cuda.ipc.interprocess_event import InterprocessEvent
from kvplan.cuda.ipc.shared_words import SharedWords
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import KVPlanError, LayoutError, PathError
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
        pieces = sum(len(export.pieces) for _, export in self.exports)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        if pieces > most >= 0:
            raise PathError(
                f"the memory has {pieces} pieces, each with a file descriptor, and this process may open {most} more; "
                "raise the limit (ulimit -n), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        self.part: Table = {"memory": [_document(export) for _, export in self.exports]}
        self._lock = threading.Lock()
        self._descriptors: list[int] | None = None
        self._events: dict[int, InterprocessEvent] = {}
        self._published = 0
        self._served: list[ServedByCudaIpc] = []

    def serve(self, hello: Table, tell: Tell) -> ServedByCudaIpc:
        """See :meth:`kvplan.agents.way.Offer.serve`."""
        del tell
        if hello:
            raise LayoutError("the visitor's greeting has a table for cuda_ipc, which takes none")
        with self._lock:
            if self._descriptors is None:
                self._descriptors = self._opened()
            events = {export.gpu: self._event(device) for device, export in self.exports}
            made = ServedByCudaIpc(self, self._descriptors, events)
            made.words.store(PUBLISHED_WORD, self._published)
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
            device, handle = self._device_of(stream)
            self._event(device).record(handle)
            self._published += 1
            for one in self._served:
                one.words.store(PUBLISHED_WORD, self._published)

    def wait_for_visitors(self, stream: Any) -> None:
        """Let later work on a stream wait for all transfers that visitors have submitted so far. No CPU waits.

        A transfer counts once its driver calls have been made: one whose ``after=`` the CPU waits for counts later.

        Raises:
            KVPlanError: it is no stream, or of another GPU.
        """
        with self._lock:
            device, handle = self._device_of(stream)
            for one in self._served:
                for event in one.events_of(device):
                    event.wait(handle)

    def _event(self, device: Device) -> InterprocessEvent:
        """Return the event of a GPU behind which visitors' transfers begin."""
        if device.ordinal not in self._events:
            self._events[device.ordinal] = InterprocessEvent(device)
        return self._events[device.ordinal]

    def _device_of(self, stream: Any) -> tuple[Device, int]:
        handle = stream_handle(stream)
        known = {device.ordinal: device for device, _ in self.exports}
        if handle is None:
            raise KVPlanError(f"stream is a {type(stream).__name__}; give a stream, as torch.cuda.Stream()")
        ordinal = getattr(stream, "device_index", next(iter(known)))
        if ordinal not in known:
            raise KVPlanError(f"the stream is of cuda:{ordinal}; give one of {', '.join(f'cuda:{k}' for k in known)}")
        return known[ordinal], handle

    def gone(self, served: ServedByCudaIpc) -> None:
        """Forget a visitor that has gone."""
        with self._lock, suppress(ValueError):
            self._served.remove(served)

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Offer.close`."""
        with self._lock:
            held, self._descriptors = self._descriptors or [], None
            events, self._events = self._events, {}
        for each in held:
            os.close(each)
        for event in events.values():
            event.close()

    def _opened(self) -> list[int]:
        found: list[int] = []
        try:
            for device, export in self.exports:
                found += descriptors(device, export, 0, len(export.pieces))
        except BaseException:
            for each in found:
                os.close(each)
            raise
        return found


class ServedByCudaIpc:
    """The owner's state for one visitor. See :class:`kvplan.agents.way.Served`.

    Attributes:
        table: the events behind which the visitor's transfers begin, by GPU.
        descriptors: of the pieces, in the order of the card, then of the words.
        words: the words that the visitor's streams write, and that this process writes for the visitor.
    """

    def __init__(self, offer: CudaIpcOffer, pieces: Sequence[int], events: dict[str, InterprocessEvent]) -> None:
        self._offer = offer
        self.words = SharedWords()
        self.descriptors: Sequence[int] = (*pieces, self.words.descriptor)
        self.table: Table = {"events": {gpu: event.handle.hex() for gpu, event in events.items()}}
        self._notes = PendingNotes(self.words)
        self._visitor: dict[int, bytes] = {}  # the handles of the visitor's events, by lane
        self._opened: dict[tuple[int, int], InterprocessEvent] = {}  # by GPU and lane
        self._closed = False
        self._lock = threading.RLock()  # the service thread hears and closes; a user's thread asks for notes

    def heard(self, message: bytes) -> None:
        """See :meth:`kvplan.agents.way.Served.heard`."""
        read = read_message(message)
        with self._lock:
            if read.kind != EVENT:
                self._notes.take(read)
            elif self._visitor.setdefault(read.lane, read.rest) != read.rest:
                raise refused(message)

    def notes(self) -> list[bytes]:
        """See :meth:`kvplan.agents.way.Served.notes`. A word says behind which note the last byte has arrived."""
        with self._lock:
            return [] if self._closed else self._notes.arrived()

    def events_of(self, device: Device) -> list[InterprocessEvent]:
        """Return the visitor's events behind its transfers, opened for a GPU; nothing if it has sent none."""
        for lane, handle in list(self._visitor.items()):
            if (device.ordinal, lane) not in self._opened:
                self._opened[device.ordinal, lane] = InterprocessEvent.opened(device, handle)
        return [event for (ordinal, _), event in self._opened.items() if ordinal == device.ordinal]

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Served.close`."""
        self._offer.gone(self)
        for event in self._opened.values():
            event.close()
        self._opened.clear()
        self._closed = True
        self.words.close()


def _exports(regions: Sequence[Region]) -> list[tuple[Device, Export]]:
    """Return the allocations that hold some regions, ascending and without overlap, each with its GPU."""
    found: list[tuple[Device, Export]] = []
    for name, some in groupby(sorted(regions, key=lambda one: (one.device, one.address)), lambda one: one.device):
        device = Device(ordinal_of(name))
        for region in some:
            last = found[-1][1] if found and found[-1][0] is device else None
            if last is None or region.address >= last.end:
                made = exported(device, region.address, region.nbytes)
                if last is not None and made.address < last.end:  # the next bytes of the same pieces
                    made = exported(device, last.address, made.end - last.address)
                    found.pop()
                found.append((device, made))
            elif region.address + region.nbytes > last.end:
                found[-1] = device, exported(device, last.address, region.address + region.nbytes - last.address)
    return sorted(found, key=lambda one: one[1].address)


def _document(export: Export) -> Table:
    runs = [[nbytes, len(list(some))] for nbytes, some in groupby(export.pieces)]
    return {"gpu": export.gpu, "address": export.address, "nbytes": export.nbytes, "handle": export.handle.hex(),
            "pieces": runs}  # fmt: skip

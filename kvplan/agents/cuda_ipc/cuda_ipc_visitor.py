"""``cuda_ipc``, the visitor's side: memory of another process's GPUs, mapped for the GPU that runs the kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_lane import VisitorLane, Waited
from kvplan.agents.cuda_ipc.cuda_ipc_messages import LANES, PUBLISHED_WORD
from kvplan.agents.way import Deliver, Mapped, Tell
from kvplan.base.quoting import quoted
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import HANDLE_NBYTES, Export
from kvplan.cuda.ipc.interprocess_event import InterprocessEvent
from kvplan.cuda.ipc.openings import Opening, opened
from kvplan.cuda.ipc.shared_words import SharedWords
from kvplan.errors import LayoutError
from kvplan.plan.plan import Plan

MOST_EVENTS = 64
_HANDLE = re.compile(f"[0-9a-f]{{{2 * HANDLE_NBYTES}}}")


class OpenedByCudaIpc:
    """Memory of one owner. See :class:`kvplan.agents.way.Opened`.

    Args:
        device: the GPU that runs the kernels.
        exports: the owner's allocations, from its checked card.
        table: the owner's table, not yet checked.
        descriptors: descriptors of all pieces, then of the shared words; the caller closes them.
        tell: function that sends a message to the owner.

    Raises:
        LayoutError: what the descriptors or handles map is not what the card says.
        PathError, TransferError: the driver refuses.
    """

    def __init__(
        self, device: Device, exports: Sequence[Export], table: Mapping[str, Any], descriptors: Sequence[int],
        tell: Tell,
    ) -> None:  # fmt: skip
        handles = _handles(table)
        self.gpu = f"cuda:{device.ordinal}"
        self._device = device
        self._openings: list[Opening] = []
        self._events: list[InterprocessEvent] = []
        self._lanes: list[VisitorLane] = []
        self._words: SharedWords | None = None
        try:
            self.mapped = self._map(exports, descriptors)
            self._words = SharedWords.opened(os.dup(descriptors[-1]))
            self._words.pin(device)
            self._events += [InterprocessEvent.opened(device, handle) for handle in handles]
            for number in range(LANES):
                self._lanes.append(VisitorLane(device, self._words, number, tell))
        except BaseException:
            self.close()
            raise
        for lane in self._lanes:
            lane.introduce()

    def _map(self, exports: Sequence[Export], descriptors: Sequence[int]) -> list[Mapped]:
        found, at = list[Mapped](), 0
        for export in exports:
            mine = descriptors[at : at + len(export.pieces)]
            at += len(export.pieces)
            made = opened(self._device, export, partial(_some, mine))
            self._openings.append(made)
            found.append(Mapped(export.address, export.nbytes, made.address, f"cuda:{made.owner}", made))
        return found

    def before(self, plan: Plan, after: Any) -> Any:
        """See :meth:`kvplan.agents.way.Opened.before`. The transfer waits for the work that the owner published."""
        del plan
        words = self._words
        if words is None or not words.load(PUBLISHED_WORD) or all(event.passed() for event in self._events):
            return after
        lane = self._lanes[0]
        with self._device.current():
            if not lane.wait_for(after):
                for event in self._events:  # the CPU waits for ``after`` anyway
                    event.synchronize()
                return after
            for event in self._events:
                event.wait(lane.gate_stream)
        return Waited(lane.gate_stream, self._device.ordinal)

    def after(self, transfer: Any, note: bytes, *, urgent: bool) -> Deliver | None:
        """See :meth:`kvplan.agents.way.Opened.after`. A stream tells the owner that the last byte has arrived."""
        return self._lanes[int(urgent)].ordered(transfer, note) if self._lanes else None

    def lost(self) -> str | None:
        """See :meth:`kvplan.agents.way.Opened.lost`. The agent's own check is enough."""
        return None

    def heard(self, message: bytes) -> None:
        """See :meth:`kvplan.agents.way.Opened.heard`. An owner sends nothing."""
        raise LayoutError(f"a message of {len(message)} bytes came for cuda_ipc; no agent of kvplan sends it")

    def notes(self) -> list[bytes]:
        """See :meth:`kvplan.agents.way.Opened.notes`."""
        return []

    def release(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.release`."""
        for lane in self._lanes:
            lane.drain()
        for opening in self._openings:
            opening.close()

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.close`. In a child of a fork, it touches nothing of the GPU."""
        self.release()
        lanes, self._lanes = self._lanes, []
        words, self._words = self._words, None
        events, self._events = self._events, []
        for lane in lanes:
            lane.close()
        for event in events:
            event.close()
        if words is not None:
            words.close()


def _some(descriptors: Sequence[int], first: int, last: int) -> Sequence[int]:
    return descriptors[first:last]


def _handles(table: Mapping[str, Any]) -> list[bytes]:
    """Return the handles of the owner's events.

    Raises:
        LayoutError: no owner sends the table.
    """
    events = table.get("events")
    if not isinstance(events, dict) or len(events) > MOST_EVENTS or set(table) != {"events"}:
        raise LayoutError(f"the owner's table for cuda_ipc is {quoted(table)}; no agent of kvplan sends it")
    found = []
    for handle in events.values():
        if not isinstance(handle, str) or not _HANDLE.fullmatch(handle):
            raise LayoutError(f"the handle of an owner's event is {quoted(handle)}; it has {HANDLE_NBYTES} bytes")
        found.append(bytes.fromhex(handle))
    return found

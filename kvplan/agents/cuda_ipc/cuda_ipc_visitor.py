"""``cuda_ipc``, the visitor's side: memory of another process's GPUs, mapped for the GPU that runs the kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_lane import VisitorLane
from kvplan.agents.cuda_ipc.cuda_ipc_messages import LANES, PASSED_WORD, PUBLISHED_WORD
from kvplan.agents.way import Deliver, Mapped, Tell
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import Export
from kvplan.cuda.ipc.openings import Opening
from kvplan.cuda.ipc.shared_words import RELEASED, SharedWords
from kvplan.plan.plan import Plan

POLL_SECONDS = 1e-4


class OpenedByCudaIpc:
    """Memory of one owner. See :class:`kvplan.agents.way.Opened`.

    Args:
        device: the GPU that runs the kernels.
        exports: the owner's allocations, from its checked card.
        descriptors: descriptors of all pieces, then of the shared words; the caller closes them.
        tell: function that sends a message to the owner.

    Raises:
        LayoutError: what the descriptors or handles map is not what the card says.
        PathError, TransferError: the driver refuses.
    """

    def __init__(self, device: Device, exports: Sequence[Export], descriptors: Sequence[int], tell: Tell) -> None:
        self.gpu = f"cuda:{device.ordinal}"
        self._device = device
        self._openings: list[Opening] = []
        self._gpus = range(len({export.gpu for export in exports}))
        self._lanes: list[VisitorLane] = []
        self._words: SharedWords | None = None
        try:
            self.mapped = self._map(exports, descriptors)
            self._words = SharedWords.opened(os.dup(descriptors[-1]))
            self._words.pin(device)
            for number in range(LANES):
                self._lanes.append(VisitorLane(device, self._words, number, tell))
        except BaseException:
            self.close()
            raise

    def _map(self, exports: Sequence[Export], descriptors: Sequence[int]) -> list[Mapped]:
        found, at = list[Mapped](), 0
        for export in exports:
            mine = descriptors[at : at + len(export.pieces)]
            at += len(export.pieces)
            made = Opening(self._device, export, mine)
            self._openings.append(made)
            found.append(Mapped(export.address, export.nbytes, made.address, f"cuda:{made.owner}", made))
        return found

    def before(self, plan: Plan, after: Any) -> Any:
        """See :meth:`kvplan.agents.way.Opened.before`. The transfer waits for the work that the owner published."""
        del plan
        words = self._words
        waits = [] if words is None else _behind(words, self._gpus)
        if words is None or not waits:
            return after
        gated = self._lanes[0].gated(after, waits)
        if gated is None:  # the CPU waits for ``after`` anyway
            while _behind(words, self._gpus):
                time.sleep(POLL_SECONDS)
            return after
        return gated

    def owner_gone(self) -> None:
        """Let transfers go on that wait for work of the owner, which has died."""
        words = self._words
        if words is not None:
            for gpu in self._gpus:
                words.store(PASSED_WORD + gpu, RELEASED)

    def after(self, transfer: Any, note: bytes, taken: list[Deliver], *, urgent: bool) -> None:
        """See :meth:`kvplan.agents.way.Opened.after`. A stream tells the owner that the last byte has arrived."""
        if self._lanes:
            self._lanes[int(urgent)].ordered(transfer, note, taken)

    def release(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.release`."""
        self.close()

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.close`. In a child of a fork, it touches nothing of the GPU."""
        self.owner_gone()  # a submit that failed may have left a wait, and no transfer is in flight
        lanes, self._lanes = self._lanes, []
        words, self._words = self._words, None
        for lane in lanes:
            lane.close()
        for opening in self._openings:
            opening.close()
        if words is not None:
            words.close()


def _behind(words: SharedWords, gpus: range) -> list[tuple[int, int]]:
    """Return the words of published work that has not ended, each with the number that it will have."""
    found = []
    for gpu in gpus:
        number = words.load(PUBLISHED_WORD + gpu)
        if number and words.load(PASSED_WORD + gpu) < number <= RELEASED:
            found.append((PASSED_WORD + gpu, number))
    return found

"""This process's end of packed transfers, moved on by a thread that also serves other notes of NIXL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplan.agents.by_nixl.nixl_progress import NixlProgress
from kvplan.agents.packed.pack_end import End
from kvplan.agents.packed.pack_rows import Mover
from kvplan.agents.packed.wire import Wire
from kvplan.plan.row_plans import Memory


class NixlPackEnd(End):
    """An end whose progress is made by the thread of the transport ``nixl``, or by calls of ``poll``.

    Args:
        name, memory, slot_nbytes, executor, arrivals: as of :class:`kvplan.agents.packed.pack_end.End`.
        progress: the thread; None if there is none.
        heard: called after each step, when all messages that came before have been heard.
    """

    def __init__(
        self, name: str, memory: Memory, slot_nbytes: int, executor: Mover, arrivals: Callable[[], object],
        progress: NixlProgress | None, heard: Callable[[], object],
    ) -> None:  # fmt: skip
        self._by, self._heard = progress, heard
        super().__init__(name, memory, slot_nbytes, executor, arrivals)

    @property
    def threaded(self) -> bool:
        """Whether a thread makes progress."""
        return self._by is not None and self._by.running

    def wake(self) -> None:
        """Let the thread poll now."""
        if self._by is not None:
            self._by.wake()

    def _step(self) -> bool:
        changed = super()._step()
        self._heard()
        return changed

    def open(self, peer: str) -> bool:
        """Return whether there is a lane to a peer that takes transfers."""
        lane = self._lanes.get(peer)
        return lane is not None and lane.why is None

    def uses(self, wire: Wire) -> bool:
        """Return whether a lane still uses a wire."""
        every: list[Any] = self._every()
        return any(lane._wire is wire for lane in every)

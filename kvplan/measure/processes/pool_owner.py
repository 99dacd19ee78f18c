"""The other process, as this one sees it: it is started, asked, and ended."""

from __future__ import annotations

import base64

from kvplan.measure.processes.other_process import OtherProcess
from kvplan.measure.processes.pool_layouts import PoolSpec

CHILD = "kvplan.measure.processes.pool_process"


class PoolOwner(OtherProcess):
    """A process that owns a pool. Its cards are there when it has started.

    Args:
        spec: its memory.

    Attributes:
        card: the card of its agent.
        layers: the card of a second agent, whose layout has a separate allocation for each layer.
        nixl: the card of its agent of NIXL, or None.
        nixl_refused: why it has no agent of NIXL, or "".

    Raises:
        KVPlanError: the process does not start.
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(CHILD, "the process that owns the pool")
        try:
            found = self.ask(spec._asdict())
        except BaseException:
            self.close()
            raise
        self.card: bytes = base64.b64decode(found["card"])
        self.layers: bytes = base64.b64decode(found["layers"])
        self.nixl: bytes | None = base64.b64decode(found["nixl"]) if found["nixl"] else None
        self.nixl_refused: str = found["nixl_refused"]

    def expect_notes(self, count: int) -> None:
        """Let the process poll its notes, until it has seen a number of them; :meth:`arrivals` returns them."""
        self.tell({"ask": "notes", "count": count})

    def arrivals(self) -> dict[str, int]:
        """Return the notes that the process has seen, with the times in nanoseconds at which it saw them."""
        return dict(self.answer())

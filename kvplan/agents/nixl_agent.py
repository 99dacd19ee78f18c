"""An agent between machines: :class:`kvplan.Agent` with the transport ``nixl`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplan.agents.agent import Agent
from kvplan.agents.transport import NIXL
from kvplan.base.threads import error_of
from kvplan.errors import PathError
from kvplan.layout.kvlayout import KVLayout


class NixlAgent(Agent):
    """A :class:`kvplan.Agent` whose only transport is ``nixl``. It registers its layouts at once.

    Args:
        name, layouts, backends, agent, progress, slots: as of :class:`kvplan.Agent`; host memory need not be shared.

    Raises:
        PathError: NIXL is not installed, has none of these backends, or the memory is neither the CPU's nor CUDA's.
        KVPlanError: ``agent`` has another name.
        LayoutError: the memory of a layout is not this process's.
        TransferError: NIXL cannot register the memory.
    """

    def __init__(
        self, name: str, layouts: Mapping[str, KVLayout], *, backends: Sequence[str] = ("UCX",), agent: Any = None,
        progress: str | None = None, slots: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            name, layouts, transports=(NIXL,), agent=agent, backends=backends, progress=progress, slots=slots
        )
        nixl = self._core.nixl
        error = PathError(self._reasons[NIXL]) if nixl is None else error_of(nixl.open)
        if error is not None:
            self.close()
            raise error

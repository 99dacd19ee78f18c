"""NIXL's agent as an engine and kvplan's packed transfers share it."""

from __future__ import annotations

from typing import Any


class SharedNixl:
    """An agent of NIXL, from which packed transfers remove no peer that the engine has added.

    Args:
        real: NIXL's agent.

    Attributes:
        known: names of the peers that the engine has added, and not removed.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self.known: set[str] = set()

    def remove_remote_agent(self, name: str) -> None:
        """Remove a peer, unless the engine knows it."""
        if name not in self.known:
            self._real.remove_remote_agent(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

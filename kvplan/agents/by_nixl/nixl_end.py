"""The transport ``nixl``: an agent of NIXL, made when it is first needed, and its part of a card."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.errors import KVPlanError, PathError
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_agent import NixlAgent


class NixlEnd:
    """This process's agent of NIXL. It is made with the first card, or when the first peer is met through it.

    Args:
        name: name of the agent.
        layouts: layouts to register.
        agent: an existing ``nixl_agent``, or None.
        backends: names of NIXL's backends.
        progress_thread: whether a new agent gets NIXL's own thread.

    Attributes:
        layouts, backends: as given.
        refused: why NIXL cannot be used; None while that is not known.
    """

    def __init__(
        self, name: str, layouts: Mapping[str, KVLayout], agent: Any, backends: Sequence[str], *, progress_thread: bool
    ) -> None:
        self.refused: str | None = None
        self.layouts = dict(layouts)
        self._name, self._agent, self.backends = name, agent, tuple(backends)
        self._progress_thread = progress_thread
        self._lock = threading.RLock()
        self._made: NixlAgent | None = None

    @property
    def made(self) -> NixlAgent | None:
        """The agent of NIXL, if it was made."""
        return self._made

    def agent(self) -> NixlAgent:
        """Return the agent of NIXL; raise PathError if it cannot be made."""
        made = self._made  # another thread may close it
        if made is not None and self.refused is None:
            return made
        with self._lock:
            if self.refused is not None:
                raise PathError(self.refused)
            if self._made is None:
                try:
                    self._made = NixlAgent(
                        self._name, self.layouts, backends=self.backends, agent=self._agent,
                        progress_thread=self._progress_thread,
                    )  # fmt: skip
                except KVPlanError as error:
                    self.refused = str(error)
                    raise PathError(self.refused) from error
            return self._made

    def metadata(self) -> bytes | None:
        """Return NIXL's metadata for the card, or None if NIXL cannot be used."""
        try:
            return self.agent().metadata()
        except KVPlanError as error:
            self.refused = self.refused or str(error)
            return None

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that came through NIXL."""
        return [] if self._made is None else self._made.notes()

    def close(self) -> None:
        """Close the agent of NIXL, if it was made."""
        with self._lock:
            made, self._made = self._made, None
            if made is not None:
                made.close()


class NixlOffer(NamedTuple):
    """NIXL's part of a card.

    Attributes:
        metadata: NIXL's metadata.
        packed: version of the packed way that the peer takes; 0 if it takes none.
    """

    metadata: bytes
    packed: int = 0

    def part(self) -> dict[str, object]:
        """Return the part as a card holds it.

        >>> NixlOffer.of(NixlOffer(b"met", 1).part())
        NixlOffer(metadata=b'met', packed=1)
        """
        return {"metadata": self.metadata.hex()} | ({"packed": self.packed} if self.packed else {})

    @classmethod
    def of(cls, part: dict[str, Any]) -> NixlOffer:
        """Read the part of a card."""
        return cls(bytes.fromhex(part["metadata"]), part.get("packed", 0))

"""This process's end of NIXL, and its connection to one peer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan

Span = tuple[int, int, str]  # address, bytes, device

log = logging.getLogger("kvplan.nixl")


def spans_of(layouts: Iterable[KVLayout]) -> frozenset[Span]:
    """Address, bytes and device of every region of some layouts."""
    return frozenset((r.address, r.nbytes, r.device) for layout in layouts for r in layout.regions)


def in_words(error: BaseException) -> str:
    """An error of NIXL as a message shows it."""
    return f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class End:
    """This process's end of NIXL.

    Attributes:
        name: name of the process.
        spans: the memory that it registers.
        nixl: the ``nixl_agent``.
        tally: sums of its transfers.
        lock: guards everything here, and every call of NIXL.
        closed: whether the agent is closed.
        kept: handles that NIXL could not release, and the plans whose memory they reach.
    """

    name: str
    spans: frozenset[Span]
    nixl: Any
    tally: Tally = field(default_factory=Tally)
    lock: Any = field(default_factory=threading.RLock)
    closed: bool = False
    kept: list[tuple[Any, Plan]] = field(default_factory=list)

    def check_open(self) -> None:
        """Raise TransferError if the agent is closed."""
        if self.closed:
            raise TransferError(f"the agent {self.name!r} is closed")

    def release(self, held: list[tuple[Any, Plan]]) -> None:
        """Give NIXL's handles back. A handle in use is told to end, and is given back with the next ones."""
        kept, self.kept = self.kept, []
        for handle, plan in [*kept, *held]:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001  # the handle is kept, and the plan's memory with it
                self.kept.append((handle, plan))
                log.debug("NIXL cannot release %r: %s", handle, error)


class Flying(Protocol):
    """A transfer in flight, as its connection sees it."""

    def moves(self) -> bool:
        """Whether NIXL has it and reports that it is in progress."""

    def give_up(self, why: str) -> None:
        """End it now as failed."""


@dataclass(eq=False)
class Connection:
    """NIXL's connection to one peer.

    Attributes:
        end: this process's end.
        name: name of the peer.
        metadata: NIXL's metadata from the peer's card.
        forgotten: whether the agent has forgotten the peer.
        joined: how often the connection was made; a failed transfer sees by it whether another one has renewed it.
        flying: transfers in flight.
    """

    end: End
    name: str
    metadata: bytes
    forgotten: bool = False
    joined: int = 0
    flying: list[Flying] = field(default_factory=list)

    def join(self) -> None:
        """Tell NIXL of the peer; raise TransferError if it does not take the metadata."""
        try:
            self.end.nixl.add_remote_agent(self.metadata)
        except Exception as error:
            raise TransferError(f"NIXL does not take the metadata of {self.name!r}: {in_words(error)}") from error
        self.joined += 1

    def leave(self) -> None:
        """Let NIXL forget the peer, and with it a broken connection."""
        try:
            self.end.nixl.remove_remote_agent(self.name)
        except Exception as error:  # noqa: BLE001  # NIXL had forgotten it already
            log.debug("NIXL had forgotten %s: %s", self.name, in_words(error))

    def rejoin(self, joined: int) -> None:
        """Renew the connection as :meth:`join` does, unless that was done since it was made for the ``joined``-th time.

        It also stays while another transfer moves over it, because a new connection would make that one fail.
        """
        if self.joined == joined and not any(one.moves() for one in tuple(self.flying)):
            self.leave()
            self.join()

    def forget(self) -> None:
        """End the transfers in flight as failed, and leave the peer."""
        for transfer in tuple(self.flying):
            transfer.give_up(f"the peer {self.name!r} was forgotten")
        self.leave()
        self.forgotten = True

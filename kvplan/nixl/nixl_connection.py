"""This process's end of NIXL, and its connection to one peer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvplan.base.quoting import quoted
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan

Span = tuple[int, int, str]  # address, bytes, device

log = logging.getLogger("kvplan.nixl")


def spans_of(layouts: Iterable[KVLayout]) -> frozenset[Span]:
    """Return address, bytes and device of every region of some layouts."""
    return frozenset((r.address, r.nbytes, r.device) for layout in layouts for r in layout.regions)


def in_words(error: BaseException) -> str:
    """Return an error of NIXL as a message shows it."""
    return f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class End:
    """The state of this process's end of NIXL.

    Attributes:
        name: name of the process.
        spans: address, bytes and device of the memory that it registers.
        nixl: the ``nixl_agent``.
        tally: sums over its transfers.
        lock: lock for all attributes, and for every call of NIXL.
        closed: whether the agent is closed.
        kept: handles that NIXL could not release yet, and the plans whose memory they access.
        holds: peers that NIXL must go on knowing, each with a function that lets its connection be renewed or not.
    """

    name: str
    spans: frozenset[Span]
    nixl: Any
    tally: Tally = field(default_factory=Tally)
    lock: Any = field(default_factory=threading.RLock)
    closed: bool = False
    kept: list[tuple[Any, Plan]] = field(default_factory=list)
    holds: dict[str, Callable[[], bool]] = field(default_factory=dict)

    def check_open(self) -> None:
        """Raise TransferError if the agent is closed."""
        if self.closed:
            raise TransferError(f"the agent {self.name!r} is closed")

    def release(self, held: list[tuple[Any, Plan]]) -> None:
        """Release handles of NIXL. A handle in use is aborted, and a later call releases it."""
        kept, self.kept = self.kept, []
        for handle, plan in [*kept, *held]:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001  # the handle is kept, and the plan's memory with it
                self.kept.append((handle, plan))
                log.debug("NIXL cannot release %r: %s", handle, error)


class Flying(Protocol):
    """The methods of a transfer in flight that its connection calls."""

    def moves(self) -> bool:
        """Return whether NIXL has the transfer and reports that it is in progress."""

    def give_up(self, why: str) -> None:
        """End the transfer now as failed."""


@dataclass(eq=False)
class Connection:
    """NIXL's connection to one peer.

    Attributes:
        end: this process's end.
        name: name of the peer.
        metadata: NIXL's metadata from the peer's card.
        forgotten: whether the agent has removed the peer.
        joined: how often the connection was made; a failed transfer compares it, to see whether it was renewed.
        flying: transfers in flight.
    """

    end: End
    name: str
    metadata: bytes
    forgotten: bool = False
    joined: int = 0
    flying: list[Flying] = field(default_factory=list)

    def join(self) -> None:
        """Add the peer to NIXL; raise TransferError if NIXL does not accept its metadata, or it is of another agent."""
        try:
            told = self.end.nixl.add_remote_agent(self.metadata)
        except Exception as error:
            raise TransferError(f"NIXL does not take the metadata of {self.name!r}: {in_words(error)}") from error
        name = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        if name != self.name:  # NIXL keeps it: another peer here may have that name
            raise TransferError(f"the metadata in the card of {self.name!r} is of the agent {quoted(name)}")
        self.joined += 1

    def leave(self) -> None:
        """Remove the peer from NIXL, also if its connection is broken."""
        try:
            self.end.nixl.remove_remote_agent(self.name)
        except Exception as error:  # noqa: BLE001  # NIXL had removed it already
            log.debug("NIXL had forgotten %s: %s", self.name, in_words(error))

    def tell(self, note: bytes) -> None:
        """Send the peer a note without a transfer; raise TransferError if NIXL does not send it."""
        with self.end.lock:
            try:
                self.end.nixl.send_notif(self.name, note)
            except Exception as error:
                raise TransferError(f"NIXL does not send the note to {self.name!r}: {in_words(error)}") from error

    def rejoin(self, joined: int) -> None:
        """Renew the connection, unless it was already renewed after it was made for the ``joined``-th time.

        It is not renewed while a transfer uses it, because a new connection would make that transfer fail.
        """
        if self.joined != joined or any(one.moves() for one in tuple(self.flying)):
            return
        may = self.end.holds.get(self.name)
        if may is None or may():
            self.leave()
            self.join()

    def forget(self) -> None:
        """End the transfers in flight as failed, and remove the peer from NIXL."""
        for transfer in tuple(self.flying):
            transfer.give_up(f"the peer {self.name!r} was forgotten")
        if self.name not in self.end.holds:
            self.leave()
        self.forgotten = True

"""Peers in other processes of this machine, whose memory is open here."""

from __future__ import annotations

from contextlib import suppress

from kvplan.agents.agent import Agent
from kvplan.agents.agent_card import read_card
from kvplan.engines.nixl.descriptor_rows import Held, Placed, Range, Rows
from kvplan.errors import LayoutError, TransferError
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan

RELEASE_SECONDS = 30.0  # that a release waits for bytes in flight


class LocalPeer:
    """A peer in another process of this machine, whose memory is open here.

    Args:
        name: name of the peer, as NIXL knows it.
        agent: this process's agent.
        card: the card of the peer's agent.

    Attributes:
        name, card: as given.
        left: whether NIXL moves all transfers with it by now: it was removed or replaced, or is gone.
        removed: whether the engine has removed it.
        transport: the transports that move its bytes.

    Raises:
        KVPlanError: the card is wrong, or the peer's memory cannot be opened.
    """

    left = removed = False

    def __init__(self, name: str, agent: Agent, card: str) -> None:
        told = read_card(card.encode())
        if told.name != name:
            raise LayoutError(f"the card in the metadata of {name!r} is of {told.name!r}")
        self.name, self.card, self._agent = name, card, agent
        self._peer = agent.meet(card.encode())
        self.transport = self._peer.transport
        self._held, opened = list[Held](), self._peer.layouts
        by_device: dict[tuple[str, str], list[str]] = {}
        for key, layout in told.layouts.items():
            by_device.setdefault((key.partition(" ")[0], layout.device), []).append(key)
        for (kind, device), keys in by_device.items():
            theirs, here = ([some[key].regions[0] for key in keys] for some in (told.layouts, opened))
            ranges = [Range(kind, device, one.address, one.nbytes) for one in theirs]
            merged = KVLayout.merge([opened[key] for key in keys])
            self._held.append(Held(ranges, [one.address for one in here], merged))

    def place(self, rows: Rows) -> Placed | None:
        """Return rows of the peer at their addresses in this process; None if NIXL must move them."""
        return placed_in(self._held, rows)

    def prepare(self, plan: Plan) -> None:
        """Warm up for plans like this one; move nothing."""
        self._peer.core.executor_for(plan).prepare(plan)

    def wants(self, plan: Plan) -> bool:
        """Return whether kvplan is to move a plan."""
        del plan
        return True

    def submit(self, plan: Plan) -> Transfer:
        """Begin to move a plan; raise KVPlanError if no byte has moved and none will."""
        return self._peer.submit(plan)

    def ended(self, moving: Transfer) -> bool:
        """Return whether a transfer has ended."""
        return moving.done()

    def gone(self) -> str | None:
        """Return why the peer can no longer be moved to and from, or None."""
        link = self._peer.link
        return "it has no connection" if link is None else link.lost() or link.why

    def end(self, moving: Transfer) -> bool:
        """End a transfer: cancel it, or wait for its bytes; return whether nothing of it moves any more."""
        if moving.cancel():
            return True
        with suppress(TransferError):
            moving.synchronize(RELEASE_SECONDS)
        return moving.done()

    def close(self) -> None:
        """Let go of the memory, once no transfer is in flight."""
        self._agent.forget(self._peer)


def placed_in(held: list[Held], rows: Rows) -> Placed | None:
    """Return rows at their addresses in this process; None if no memory holds all of them."""
    return next((found for one in held if (found := one.place(rows)) is not None), None)

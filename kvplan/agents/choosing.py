"""The choice of a transport for each layout of a peer's card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.agents.agent_card import AgentCard, why_not
from kvplan.agents.by_nixl.nixl_end import NixlOffer
from kvplan.agents.sockets import unreachable
from kvplan.agents.transport import NIXL, Owner, Transport
from kvplan.base.values import quoted
from kvplan.errors import PathError


class Chosen(NamedTuple):
    """The transports for a card.

    Attributes:
        names: the transport of each layout.
        wanted: for each local transport, the number of descriptors that it needs.
        data: for each local transport, what it has read of the card.
        nixl: NIXL's part of the card, if a layout goes by NIXL.
        owner: the owner.
        here: whether a socket leads to the owner.
    """

    names: dict[str, str]
    wanted: dict[str, int]
    data: dict[str, Any]
    nixl: NixlOffer | None
    owner: Owner
    here: bool


def choose(
    card: AgentCard, transports: Sequence[str], usable: Mapping[str, Transport], refused: Mapping[str, str]
) -> Chosen:  # fmt: skip
    """Choose a transport for each layout of a card; check the parts, and open nothing.

    Args:
        card: the card of a peer.
        transports: names of transports, the best first.
        usable: the local transports that this process can use.
        refused: why it cannot use the others.

    Raises:
        PathError: no transport serves a layout.
    """
    far = unreachable(card)
    owner = Owner(card.name, card.pid, card.host.pids)
    reasons = dict(refused)
    counts: dict[str, int] = {}
    data: dict[str, Any] = {}
    names: dict[str, str] = {}
    for transport in transports:
        wanted = {
            name: layout for name, layout in card.layouts.items()
            if name not in names and transport in card.offered and name in card.offered[transport].layouts
        }  # fmt: skip
        if transport in reasons or (not wanted and len(names) == len(card.layouts)):
            continue
        if not wanted:
            reasons[transport] = why_not(transport, card)
        elif transport == NIXL:
            names |= dict.fromkeys(wanted, NIXL)
        elif far is not None:
            reasons[transport] = far
        else:
            try:
                counts[transport], data[transport] = usable[transport].check(card.offered[transport].part, owner)
            except PathError as error:
                reasons[transport] = str(error)
                continue
            names |= dict.fromkeys(wanted, transport)
    if lacked := [name for name in card.layouts if name not in names]:
        told = "; ".join(f"{one}: {reasons.get(one) or why_not(one, card)}" for one in transports)
        raise PathError(f"no transport serves layout {quoted(lacked[0])} of {card.name!r}: {told}")
    nixl = NixlOffer.of(card.offered[NIXL].part) if NIXL in names.values() else None
    return Chosen(names, counts, data, nixl, owner, far is None)

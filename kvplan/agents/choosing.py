"""The choice of a transport for each layout of a peer's card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvplan.agents.agent_card import AgentCard, why_not
from kvplan.agents.by_nixl.nixl_end import NixlOffer
from kvplan.agents.relocation import regions_of
from kvplan.agents.sockets import unreachable
from kvplan.agents.way import Checked, Origin, Way
from kvplan.agents.ways import NIXL
from kvplan.base.quoting import quoted
from kvplan.errors import PathError


class Chosen(NamedTuple):
    """The transports for a card.

    Attributes:
        names: the transport of each layout.
        checked: the checked part of each local transport.
        nixl: NIXL's part of the card, if a layout goes by NIXL.
        origin: the owner.
        here: whether a socket leads to the owner.
    """

    names: dict[str, str]
    checked: dict[str, Checked]
    nixl: NixlOffer | None
    origin: Origin
    here: bool


def choose(
    card: AgentCard, transports: Sequence[str], ways: Mapping[str, Way], refused: Mapping[str, str]
) -> Chosen:  # fmt: skip
    """Choose a transport for each layout of a card; check the parts, and open nothing.

    Args:
        card: the card of a peer.
        transports: names of transports, the best first.
        ways: the local transports that this process can use.
        refused: why it cannot use the others.

    Raises:
        PathError: no transport serves a layout.
    """
    far = unreachable(card)
    origin = Origin(card.name, card.pid, card.host.pids)
    reasons = dict(refused)
    checked: dict[str, Checked] = {}
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
            part = card.offered[transport]
            whole = {name: card.layouts[name] for name in part.layouts}
            try:
                one = ways[transport].check(part.part, regions_of(whole.values()), origin)
            except PathError as error:
                reasons[transport] = str(error)
                continue
            checked[transport] = one
            names |= dict.fromkeys(wanted, transport)
    if lacked := [name for name in card.layouts if name not in names]:
        told = "; ".join(f"{one}: {reasons.get(one) or why_not(one, card)}" for one in transports)
        raise PathError(f"no transport serves layout {quoted(lacked[0])} of {card.name!r}: {told}")
    nixl = NixlOffer.of(card.offered[NIXL].part) if NIXL in names.values() else None
    return Chosen(names, checked, nixl, origin, far is None)

"""Peers of this machine, whose memory this process has opened."""

from __future__ import annotations

from kvplan.agents.agent import Agent as LocalAgent
from kvplan.agents.agent_card import read_card
from kvplan.base.numbers import binary
from kvplan.engines.nixl.spans import Span, Spans
from kvplan.errors import LayoutError
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan

WORDS = {"DRAM": "host memory", "VRAM": "GPU memory"}


class OtherProcess:
    """A peer in another process of this machine.

    Args:
        name: name of the peer, as NIXL knows it.
        agent: this process's agent.
        card: the peer's card.

    Attributes:
        name, spans, words: see :class:`kvplan.engines.nixl.transfer_handles.Neighbour`.

    Raises:
        KVPlanError: the card is wrong, or the peer's memory cannot be opened.
    """

    def __init__(self, name: str, agent: LocalAgent, card: bytes) -> None:
        told = read_card(card)
        if told.name != name:
            raise LayoutError(f"the card behind the metadata of {name!r} is of {told.name!r}")
        self.name = name
        self._agent = agent
        self._peer = agent.meet(card)
        spans: list[Span] = []
        for key, layout in self._peer.layouts.items():
            kind = key.partition(" ")[0]
            if kind not in WORDS:
                self.close()
                raise LayoutError(f"the card of {name!r} has a layout {key!r}; layouts are named by NIXL's memory")
            spans += _spans_of(kind, told.layouts[key], layout)
        self.spans = Spans(spans)
        held = {kind: sum(span.nbytes for span in spans if span.kind == kind) for kind in WORDS}
        memory = " and ".join(f"{binary(nbytes)} of {WORDS[kind]}" for kind, nbytes in held.items() if nbytes)
        self.words = f"{memory}, by {self._peer.transport}"

    def submit(self, plan: Plan) -> Transfer:
        """See :meth:`Neighbour.submit`."""
        return self._peer.submit(plan)

    def prepare(self, plan: Plan) -> None:
        """See :meth:`Neighbour.prepare`."""
        self._agent._core.executor_for(plan).prepare(plan)

    def gone(self) -> str | None:
        """See :meth:`Neighbour.gone`."""
        link = self._peer.link
        return "it has no connection" if link is None else link.lost(None) or link.why

    def close(self) -> None:
        """See :meth:`Neighbour.close`."""
        self._agent.forget(self._peer)


def _spans_of(kind: str, theirs: KVLayout, here: KVLayout) -> list[Span]:
    """Return the ranges of a peer's layout; each is a layer of one block, with the owner's address and with ours."""
    sizes = {region.address: region.nbytes for region in theirs.regions}
    spans = []
    for one, other in zip(theirs.components, here.components, strict=True):
        if one.address not in sizes:
            raise LayoutError(f"the card has a part at {one.address:#x}, where no region begins")
        spans.append(Span(kind, one.address, sizes[one.address], other.address, here))
    return spans

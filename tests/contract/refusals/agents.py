"""Refusals of agents that need no other process: their arguments, cards, submits and ends; kvplan's own and NIXL's."""

from __future__ import annotations

import json
import threading

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, LayoutError, PathError, TransferError
from kvplan.nixl import NixlAgent
from tests.contract.refusals.table import rows, spec, tensors, zeros
from tests.nixl import double

ROWS = []

ROWS += rows("Agent", lambda more: Agent(**{"name": "x", "layouts": {}} | more), None, [
    ({"name": ""}, LayoutError, "name of an agent ... ''"),
    ({"layouts": []}, LayoutError, "layouts is"),
    ({"layouts": {"kv": 3}}, LayoutError, "layout 'kv' is a int"),
    ({"layouts": {"kv": spec()}}, LayoutError, "not of this process's memory"),
    ({"transports": "shm"}, PathError, "transports is 'shm'"),
    ({"transports": ()}, PathError, "transports is ()"),
    ({"transports": ["tcp"]}, PathError, "transport 'tcp' ... 'cuda_ipc' ... 'shm' ... 'nixl'"),
    ({"executor": 3}, PathError, "executor is 3"),
    ({"users": "root"}, KVPlanError, "users is 'root'"),
    ({"users": ["no such user"]}, KVPlanError, "'no such user' ... no user of that name"),
    ({"users": [None]}, KVPlanError, "None"),
])  # fmt: skip
PLAIN = KVLayout.from_tensors("layer block dim", zeros(2, 4, 16))


def pool():
    return kvplan.allocate("block layer dim", like=PLAIN, shared=True)


def between(call):
    """A call of two agents of this process that have met: (visitor, owner, peer, the peer's layout, one's own)."""
    with (
        Agent("owner", {"kv": pool()}, transports=["shm"]) as owner,
        Agent("visitor", {}, transports=["shm"]) as visitor,
    ):
        peer = visitor.meet(owner.card())
        call(visitor, owner, peer, peer.layouts["kv"], tensors("layer block dim", 2, 4, 16))


def submitted(more):
    def call(visitor, owner, peer, theirs, mine):
        peer.submit(**{"plan": kvplan.compile(theirs, mine).plan([0], [0])} | more)

    between(call)


def planned(src, dst):
    def call(visitor, owner, peer, theirs, mine):
        sides = {"theirs": theirs, "mine": mine}
        peer.submit(kvplan.compile(sides[src], sides[dst]).plan([0], [1]))

    between(call)


ROWS += rows("Peer.submit", submitted, KVPlanError, [
    ({"plan": 3}, "plan is a int"),
    ({"note": "text"}, "note is a str"),
    ({"note": bytes(60_001)}, "note has 60,001 bytes"),
    ({"deadline": 0}, "deadline is 0"),
    ({"deadline": True}, "deadline is True"),
    ({"after": 3}, "after ... int"),
    ({"priority": "low"}, "priority is 'low'"),
])  # fmt: skip
ROWS += rows("Peer.submit", planned, PathError, [("mine", "mine", "neither side"), ("theirs", "theirs", "both sides")])


def forgotten(visitor, owner, peer, theirs, mine):
    made = kvplan.compile(theirs, mine).plan([0], [0])
    visitor.forget(peer)
    peer.submit(made)


def late(visitor, owner, peer, theirs, mine):
    gate = threading.Event()
    transfer = peer.submit(kvplan.compile(theirs, mine).plan([0], [0]), after=gate, deadline=0.01)
    try:
        transfer.synchronize()
    finally:
        gate.set()


def taken_back(visitor, owner, peer, theirs, mine):
    gate = threading.Event()
    transfer = peer.submit(kvplan.compile(theirs, mine).plan([0], [0]), after=gate)
    assert transfer.cancel()
    gate.set()
    transfer.synchronize()


def in_use(visitor, owner, peer, theirs, mine):
    gate = threading.Event()
    peer.submit(kvplan.compile(theirs, mine).plan([0], [0]), after=gate)
    try:
        owner.close(timeout=0.05)
    finally:
        gate.set()


def absent_layer(visitor, owner, peer, theirs, mine):
    peer.submit(kvplan.compile(theirs, mine).plan([0], [0]), by_layer=True).wait_layer(7)


def private():
    layout = tensors("block dim", 4, 8)
    with Agent("private", {"kv": layout}, transports=["shm"]) as owner, Agent("x", {}, transports=["shm"]) as visitor:
        visitor.meet(owner.card())


def closed(call):
    agent = Agent("x", {}, transports=["shm"])
    agent.close()
    return call(agent)


def met(card):
    with Agent("me", {}, transports=["shm"]) as me:
        me.meet(me.card() if card is None else card)


ROWS += rows(
    "Agent",
    between,
    None,
    [
        (forgotten, TransferError, "'owner' ... the peer was forgotten"),
        (late, TransferError, "deadline of 0.01 seconds ... had not begun"),
        (taken_back, TransferError, "cancelled before it began"),
        (absent_layer, LayoutError, "layer 7 is not moved"),
        (lambda visitor, owner, peer, *_: owner.forget(peer), KVPlanError, "give what meet"),
        (in_use, TransferError, "not closed ... 'visitor' still uses"),
    ],
)
ROWS += rows("Agent.meet", met, KVPlanError, [(None, "as this agent")])
ROWS += rows("Agent.meet", met, LayoutError, [
    (b"", "card"), (b"\xff", "card"), (b"[]", "card"), (b"3", "card"), (b"{}", "card"),
    (b"[" * 100_000, "nested too deeply"),
])  # fmt: skip
ROWS += [
    ("Agent.meet", private, PathError, "'kv' of 'private' ... memory is private ... kvplan.allocate(..., shared=True)")
]
ROWS += rows("a closed agent", closed, TransferError, [
    (lambda agent: agent.card(), "is closed"), (lambda agent: agent.notes(), "is closed"),
    (lambda agent: agent.meet(b""), "is closed"),
])  # fmt: skip


class Pair:
    """Two agents of NIXL's face over a double of NIXL."""

    def __init__(self, agents):
        network = double.Network()
        self.mine = zeros(3, 8, 64)
        self.here = KVLayout.from_tensors("layer block dim", self.mine)
        self.me = NixlAgent("me", {"kv": self.here}, agent=double.Agent(network, "me"))
        self.you = NixlAgent("you", {"pool": tensors("block layer dim", 8, 3, 64)}, agent=double.Agent(network, "you"))
        agents += [self.me, self.you]
        self.peer = self.me.meet(self.you.card())
        self.theirs = self.peer.layouts["pool"]

    def plan(self, src=None, dst=None):
        return kvplan.compile(src or self.theirs, dst or self.here).plan([0], [1])


def over_nixl(call):
    agents = []
    try:
        call(Pair(agents))
    finally:
        for agent in agents:
            agent.close()


def card(change):
    """Meet who shows the peer's card with other fields."""
    over_nixl(lambda pair: pair.me.meet(
        change if isinstance(change, bytes | str | int) else json.dumps(json.loads(pair.you.card()) | change).encode()
    ))  # fmt: skip


STRANGER = tensors("layer block dim", 3, 8, 64)
ROWS += rows(
    "NixlAgent",
    over_nixl,
    None,
    [
        (lambda pair: pair.peer.submit([1]), KVPlanError, "plan is a list"),
        (lambda pair: pair.peer.submit(pair.plan(), deadline=0), KVPlanError, "deadline is 0"),
        (lambda pair: pair.peer.submit(pair.plan(), deadline=float("nan")), KVPlanError, "deadline is nan"),
        (lambda pair: pair.peer.submit(pair.plan(), deadline="2"), KVPlanError, "deadline is '2'"),
        (lambda pair: pair.peer.submit(pair.plan(), note="text"), KVPlanError, "note is a str"),
        (lambda pair: pair.peer.submit(pair.plan(pair.here, STRANGER)), PathError, "neither side"),
        (lambda pair: pair.peer.submit(pair.plan(STRANGER, pair.theirs)), PathError, "src ... neither"),
        (lambda pair: pair.peer.submit(pair.plan(pair.here, pair.here)), PathError, "neither side"),
        (lambda pair: pair.peer.submit(pair.plan(pair.theirs, pair.theirs)), PathError, "both sides ... 'you'"),
        (lambda pair: pair.me.forget("you"), KVPlanError, "give what meet() of 'me'"),
        (lambda pair: pair.me.forget(pair.you.meet(pair.me.card())), KVPlanError, "give what meet() of 'me'"),
        (lambda pair: pair.me.meet(pair.me.card()), KVPlanError, "as this agent"),
        (lambda pair: (pair.me.close(), pair.me.notes()), TransferError, "is closed"),
        (lambda pair: (pair.me.close(), pair.me.card()), TransferError, "is closed"),
        (
            lambda pair: (pair.me.meet(pair.you.card()), pair.peer.submit(pair.plan())),
            TransferError,
            "forgotten ... meet it again",
        ),
        (
            lambda pair: NixlAgent("x", {"kv": pair.mine}, agent=double.Agent(double.Network(), "x")),
            LayoutError,
            "ndarray",
        ),
        (
            lambda pair: NixlAgent("x", {"kv": pair.theirs}, agent=double.Agent(double.Network(), "x")),
            LayoutError,
            "not of this process's memory",
        ),
        (
            lambda pair: NixlAgent("x", {"kv": pair.here}, agent=double.Agent(double.Network(), "y")),
            KVPlanError,
            "'y' by NIXL ... 'x' here",
        ),
        (
            lambda pair: NixlAgent(
                "x", {"kv": pair.here}, agent=double.Agent(double.Network(failures=["register"]), "x")
            ),
            TransferError,
            "cannot register the memory of 'x'",
        ),
    ],
)
ROWS += rows("NixlAgent.meet", card, LayoutError, [
    (b"", "card"), (b"\xff", "card"), (b"[]", "card is []"), (3, "card is a int"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"schema": ' + b"9" * 5000 + b"}", "4300 digits"),
    ({"name": "other"}, "card was changed on its way"), ({"layouts": {}}, "card was changed on its way"),
    ({"schema": "kvplan.nixl/2"}, "card ... 'kvplan.nixl/2'"),
    ({"schema": "x" * 10**6}, "schema 'xxx"),
])  # fmt: skip

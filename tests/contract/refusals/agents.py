"""Refusals of agents that need no other process: their arguments, cards, submits and ends; kvplan's own and NIXL's."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack

import kvplan
from kvplan import Agent, KVPlanError, LayoutError, PathError, TransferError
from kvplan.nixl import NixlAgent
from tests.contract.refusals.table import REFUSED, spec, tensors
from tests.nixl import double

REFUSED["Agent", lambda more: Agent(**{"name": "x", "layouts": {}} | more)] = [
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
]


class Pair:
    """Two agents of this process that have met, by shared memory or over a double of NIXL."""

    def __init__(self, stack: ExitStack, kind: str) -> None:
        network, self.mine = double.Network(), tensors("layer block dim", 3, 8, 64)

        def agent(name, **layouts):
            own = NixlAgent(name, layouts, agent=double.Agent(network, name))
            return stack.enter_context(own if kind == "NIXL" else Agent(name, layouts, transports=["shm"]))

        pool = {"like": self.mine} | ({} if kind == "NIXL" else {"shared": True})
        self.you = agent("you", kv=kvplan.allocate("block layer dim", **pool))
        self.me = agent("me", **({"kv": self.mine} if kind == "NIXL" else {}))
        self.peer = self.me.meet(self.you.card())
        self.theirs = self.peer.layouts["kv"]
        self.gate = threading.Event()
        stack.callback(self.gate.set)  # before the agents close

    def plan(self, src=None, dst=None):
        return kvplan.compile(src or self.theirs, dst or self.mine).plan([0], [1])

    def forgotten(self):
        """A plan from before the peer was forgotten."""
        plan = self.plan()
        self.me.forget(self.peer)
        return plan

    def submit(self, plan=None, **more):
        return self.peer.submit(plan or self.plan(), **more)


def of_both(kind):
    def call(act):
        with ExitStack() as stack:
            act(Pair(stack, kind))

    return call


STRANGER = tensors("layer block dim", 3, 8, 64)
for kind in ("Agent", "NIXL"):
    REFUSED[kind, of_both(kind)] = [
        (lambda pair: pair.submit([1]), KVPlanError, "plan is a list"),
        (lambda pair: pair.submit(note="text"), KVPlanError, "note is a str"),
        (lambda pair: pair.submit(deadline=0), KVPlanError, "deadline is 0"),
        (lambda pair: pair.submit(deadline="2"), KVPlanError, "deadline is '2'"),
        (lambda pair: pair.submit(pair.plan(pair.mine, STRANGER)), PathError, "neither side"),
        (lambda pair: pair.submit(pair.plan(pair.theirs, pair.theirs)), PathError, "both sides"),
        (lambda pair: pair.submit(pair.forgotten()), TransferError, "'you' ... forgotten"),
        (lambda pair: pair.you.forget(pair.peer), KVPlanError, "give what meet() of 'you'"),
        (lambda pair: pair.me.forget("you"), KVPlanError, "give what meet() of 'me'"),
        (lambda pair: pair.me.meet(pair.me.card()), KVPlanError, "as this agent"),
        (lambda pair: (pair.me.close(), pair.me.notes()), TransferError, "is closed"),
        (lambda pair: (pair.me.close(), pair.me.card()), TransferError, "is closed"),
        (lambda pair: (pair.me.close(), pair.me.meet(b"")), TransferError, "is closed"),
        (lambda pair: pair.me.meet(b""), LayoutError, "card"),
        (lambda pair: pair.me.meet(b"\xff"), LayoutError, "card"),
        (lambda pair: pair.me.meet(b"[]"), LayoutError, "card"),
        (lambda pair: pair.me.meet(b"[" * 100_000), LayoutError, "nested too deeply"),
    ]


def cancelled(pair):
    transfer = pair.submit(after=pair.gate)
    assert transfer.cancel()
    transfer.synchronize()


def private(pair):
    with Agent("private", {"kv": pair.mine}, transports=["shm"]) as owner:
        pair.me.meet(owner.card())


REFUSED["Agent", of_both("Agent")] = [
    (lambda pair: pair.submit(note=bytes(60_001)), KVPlanError, "note has 60,001 bytes"),
    (lambda pair: pair.submit(deadline=True), KVPlanError, "deadline is True"),
    (lambda pair: pair.submit(after=3), KVPlanError, "after ... int"),
    (lambda pair: pair.submit(priority="low"), KVPlanError, "priority is 'low'"),
    (lambda pair: pair.submit(by_layer=True).wait_layer(7), LayoutError, "layer 7 is not moved"),
    (private, PathError, "'kv' of 'private' ... memory is private ... kvplan.allocate(..., shared=True)"),
]
REFUSED["Agent", of_both("Agent"), TransferError] = [
    (
        lambda pair: pair.submit(after=pair.gate, deadline=0.01).synchronize(),
        "deadline of 0.01 seconds ... had not begun",
    ),
    (lambda pair: (pair.submit(after=pair.gate), pair.you.close(timeout=0.05)), "not closed ... 'me' still uses"),
    (cancelled, "cancelled before it began"),
]


def card(change):
    """Meet who shows the peer's card with other fields."""
    with ExitStack() as stack:
        pair = Pair(stack, "NIXL")
        pair.me.meet(json.dumps(json.loads(pair.you.card()) | change).encode() if isinstance(change, dict) else change)


REFUSED["NixlAgent.meet", card, LayoutError] = [
    (3, "card is a int"),
    (b'{"schema": ' + b"9" * 5000 + b"}", "4300 digits"),
    ({"name": "other"}, "card was changed on its way"),
    ({"layouts": {}}, "card was changed on its way"),
    ({"schema": "kvplan.nixl/2"}, "card ... 'kvplan.nixl/2'"),
    ({"schema": "x" * 10**6}, "schema 'xxx"),
]


def over(layout, name="x", **network):
    return NixlAgent("x", {"kv": layout}, agent=double.Agent(double.Network(**network), name))


REFUSED["NixlAgent", lambda layout, more: over(layout, **more)] = [
    (STRANGER.tensors, {}, LayoutError, "ndarray"),
    (spec(), {}, LayoutError, "not of this process's memory"),
    (STRANGER, {"name": "y"}, KVPlanError, "'y' by NIXL ... 'x' here"),
    (STRANGER, {"failures": ["register"]}, TransferError, "cannot register the memory of 'x'"),
]

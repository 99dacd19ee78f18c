"""Random pairs of layouts, and random ranks, moved over a simulated wire with faults, and compared byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

import kvplan
from kvplan.agents.peer_transfer import Order
from kvplan.base.threads import error_of
from tests import oracle
from tests.agents.packed.simulated_wire import Faults, Network
from tests.strategies import Case, layout_of

HOLDS = "nothing was moved", "the destination's blocks hold", "the peer's memory may hold", "all bytes have moved"


@dataclass(frozen=True)
class Manner:
    """How a case is moved."""

    reading: bool
    by_layer: bool
    urgent: bool
    note: bytes
    slots: tuple[int, int]
    slot_nbytes: tuple[int, int]
    faults: Faults
    seed: int


@st.composite
def faults(draw) -> Faults:
    chance = st.sampled_from((0.0, 0.0, 0.1, 0.4))
    return Faults(
        late=draw(chance), fail=draw(chance), refuse=draw(st.sampled_from((0.0, 0.0, 0.1))), linger=draw(chance),
        cut=draw(st.sampled_from((0.0, 0.0, 0.05, 0.3))),
    )  # fmt: skip


@st.composite
def manners(draw) -> Manner:
    nbytes = st.sampled_from((256, 256, 512, 4096))
    return Manner(
        reading=draw(st.booleans()), by_layer=draw(st.booleans()), urgent=draw(st.booleans()),
        note=draw(st.binary(max_size=5)), slots=(draw(st.integers(2, 15)), draw(st.integers(2, 15))),
        slot_nbytes=(draw(nbytes), draw(nbytes)), faults=draw(faults()), seed=draw(st.integers(0, 2**32)),
    )  # fmt: skip


def allowed(got: Sequence[np.ndarray], before: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    """Each byte is what it was, or what it is to be."""
    for now, old, new in zip(got, before, wanted, strict=True):
        assert ((now == old) | (now == new)).all(), "a wrong byte"


def equal(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for now, new in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(now, new)


def move_pair(case: Case, manner: Manner, executor) -> bool:
    """Move a drawn case; return whether it was done. What is called done is right, and nothing is lost."""
    src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    want_src, want_dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    before = [root.copy() for root in dst.roots]
    oracle.copy(
        want_src, want_dst, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units
    )
    layouts = layout_of(src), layout_of(dst)
    plan = kvplan.compile(*layouts).plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
    network = Network(manner.seed)
    network.faults = manner.faults
    names = "src", "dst"
    for name, layout, slots, nbytes in zip(names, layouts, manner.slots, manner.slot_nbytes, strict=True):
        network.place(name, executor, [layout], slots=slots, slot_nbytes=nbytes)
    mine, other = names[::-1] if manner.reading else names
    order = Order(
        plan, other, manner.reading, note=manner.note, by_layer=manner.by_layer, urgent=manner.urgent
    )  # fmt: skip
    transfer = network.places[mine].end.submit(order)
    network.run(lambda: transfer.ended)
    done = finished(transfer)
    if done:
        equal(dst.roots, want_dst.roots)
    network.faults = Faults()
    network.settle()
    equal(src.roots, want_src.roots)
    notes = network.places[other].end.notes()
    assert not network.places[mine].end.notes()
    if done:
        equal(dst.roots, want_dst.roots)
        assert notes == ([(mine, manner.note)] if manner.note else []) or (manner.faults.cut and not notes)
    else:
        allowed(dst.roots, before, want_dst.roots)
        if notes:
            equal(dst.roots, want_dst.roots)
        if "nothing was moved" in str(transfer.error):
            equal(dst.roots, before)
    return done


def finished(transfer) -> bool:
    """Whether an ended transfer ended well; an error says what the destination holds."""
    error = error_of(transfer.synchronize)
    assert error is None or any(words in str(error) for words in HOLDS), error
    return error is None

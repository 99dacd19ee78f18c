"""Random pairs of layouts, and random ranks, moved over a simulated wire with faults, and compared byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

import kvplan
from kvplan.errors import TransferError
from tests import oracle
from tests.agents.packed.simulated_wire import Faults, Network, meet, slots_back
from tests.ranks.topologies import Reshard, fill, shards_of, truth_of
from tests.strategies import Case, layout_of


@dataclass(frozen=True)
class Manner:
    """How a case is moved."""

    reading: bool
    by_layer: bool
    urgent: bool
    note: bytes
    attempts: int
    slots: tuple[int, int]
    together: bool
    leg_units: int
    slot_nbytes: tuple[int, int]
    granted: int
    most_note: int
    faults: Faults
    seed: int


@st.composite
def faults(draw) -> Faults:
    chance = st.sampled_from((0.0, 0.0, 0.2, 0.5))
    return Faults(
        late=draw(chance), twice=draw(chance), refuse=draw(st.sampled_from((0.0, 0.0, 0.1))), fail=draw(chance),
        told=draw(st.sampled_from((0.0, 0.2))), linger=draw(chance),
        stuck=draw(st.sampled_from((0.0, 0.0, 0.1))),
    )  # fmt: skip


@st.composite
def manners(draw) -> Manner:
    reading = draw(st.booleans())
    slots = st.one_of(st.integers(2, 15), st.integers(28, 40))  # of the larger ones, many chunks are on the way
    nbytes = st.sampled_from((256, 256, 512, 4096))
    return Manner(
        reading=reading, by_layer=draw(st.booleans()), urgent=draw(st.booleans()),
        note=b"" if reading else draw(st.binary(max_size=5)), attempts=draw(st.sampled_from((1, 1, 4))),
        slots=(draw(slots), draw(slots)), together=draw(st.booleans()),
        leg_units=draw(st.sampled_from((1, 3, 1 << 15))), slot_nbytes=(draw(nbytes), draw(nbytes)),
        granted=draw(st.sampled_from((1, 2, 3, 4, 16))),
        most_note=draw(st.sampled_from((512, 2048, 1 << 16))), faults=draw(faults()),
        seed=draw(st.integers(0, 2**32)),
    )  # fmt: skip


def allowed(got: Sequence[np.ndarray], before: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    """Each byte is what it was, or what it is to be."""
    for now, old, new in zip(got, before, wanted, strict=True):
        assert ((now == old) | (now == new)).all(), "a wrong byte"


def equal(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for now, new in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(now, new)


def options(manner: Manner) -> dict:
    made = {"by_layer": manner.by_layer, "attempts": manner.attempts, "priority": "high" if manner.urgent else "normal"}
    return made if manner.reading else {**made, "note": manner.note}


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
    network = Network(manner.seed, most_note=manner.most_note)
    for name, slots, nbytes in zip(("src", "dst"), manner.slots, manner.slot_nbytes, strict=True):
        network.place(name, executor, slots=slots, slot_nbytes=nbytes, sending=1 + slots // 3, granted=manner.granted,
                      together=manner.together, leg_units=manner.leg_units)  # fmt: skip
    meet(network, "src", "dst", ([layouts[0]], [layouts[1]]))
    network.faults = manner.faults
    mine, other = ("dst", "src") if manner.reading else ("src", "dst")
    transfer = network.places[mine].end.submit(other, plan, reading=manner.reading, **options(manner))
    network.run(lambda: transfer.over)
    done = finished(transfer)
    if done:
        equal(dst.roots, want_dst.roots)
    network.faults = Faults()
    network.settle()
    equal(src.roots, want_src.roots)
    notes = [note for place in network.places.values() for note in place.end.notes()]
    if done:
        equal(dst.roots, want_dst.roots)
        assert notes == ([(mine, manner.note)] if manner.note else [])
    else:
        allowed(dst.roots, before, want_dst.roots)
        assert notes in ([], [(mine, manner.note)])
        if notes:
            equal(dst.roots, want_dst.roots)
        if "nothing was moved" in str(transfer._ends[0][1]):
            equal(dst.roots, before)
    assert not any(place.other for place in network.places.values())
    slots_back(network)
    return done


def finished(transfer) -> bool:
    """Whether an ended transfer ended well; an error says what the destination holds."""
    try:
        transfer.synchronize()
    except TransferError as error:
        said = str(error)
        assert any(
            words in said for words in (
                "nothing was moved", "the destination's blocks hold", "the peer's memory may hold", "no transfer with"
            )
        ), said  # fmt: skip
        return False
    return True


def move_ranks(case: Reshard, wrong: Faults, seed: int, executor) -> tuple[int, int]:
    """Move a sequence from n ranks to m, all pairs at once; return the number of transfers that were done, and all."""
    truth = truth_of(case)
    caches = [[rank.form.build(case.seed + 7 * k) for k, rank in enumerate(side)] for side in case.sides]
    wanted = [rank.form.build(case.seed + 7 * k) for k, rank in enumerate(case.sides[1])]
    for rank, cache in zip(case.sides[0], caches[0], strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth)
    for rank, cache in zip(case.sides[1], wanted, strict=True):
        fill(rank, cache, case.ids[1], case.first[1], truth)
    shards = shards_of(case, caches)
    before = [[root.copy() for root in cache.roots] for cache in caches[1]]
    network = Network(seed)
    network.faults = Faults(late=wrong.late, twice=wrong.twice)
    for side, letter in zip(shards, "sd", strict=True):
        for k, _ in enumerate(side):
            slots = network.rng.choice((3, 5, 28))  # of 28, each of the other side's ranks gets some at once
            granted, together = network.rng.choice((None, 3)), network.rng.random() < 0.5
            legs = network.rng.choice((2, 1 << 15))
            network.place(f"{letter}{k}", executor, slots=slots, slot_nbytes=256, granted=granted, together=together,
                          leg_units=legs)  # fmt: skip
    plans = kvplan.reshard(*shards).plan(*case.ids, *case.skips)
    for s, d in plans:
        meet(network, f"s{s}", f"d{d}", ([shards[0][s].layout], [shards[1][d].layout]))
    network.faults = wrong
    transfers = {}
    for (s, d), plan in plans.items():
        reading = network.rng.random() < 0.5
        mine, other = (f"d{d}", f"s{s}") if reading else (f"s{s}", f"d{d}")
        made = network.places[mine].end.submit(other, plan, reading=reading, attempts=network.rng.choice((1, 5)))
        transfers[s, d] = made
    network.run(lambda: all(transfer.over for transfer in transfers.values()))
    done = {pair: finished(transfer) for pair, transfer in transfers.items()}
    network.faults = Faults()
    network.settle()
    for d, cache in enumerate(caches[1]):
        allowed(cache.roots, before[d], wanted[d].roots)
        if all(well for pair, well in done.items() if pair[1] == d):
            equal(cache.roots, wanted[d].roots)
    slots_back(network)
    return sum(done.values()), len(done)

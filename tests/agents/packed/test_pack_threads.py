"""Several threads submit, wait and cancel at once; one of them polls at a time, or a thread of its own does."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from tests.agents.packed.pairs import Pair
from tests.agents.packed.simulated_wire import Faults
from tests.patience import PATIENCE

THREADS, TURNS, PART = 4, 25, 8


@pytest.mark.parametrize("threaded", [False, True])
def test_threads(executor, threaded):
    """Each thread has blocks of its own, moves them to and fro, and compares them."""
    stop, wakes = threading.Event(), []
    options = {"threaded": lambda: threaded, "wake": lambda: wakes.append(1)} if threaded else {}
    pair = Pair(executor, kv="none", near={"granted": 2, **options}, far={"granted": 2})
    network = pair.network
    mine = np.random.default_rng(1).integers(0, 256, (3, THREADS * PART, 64), dtype=np.uint8)
    theirs = np.zeros((THREADS * PART, 3, 64), np.uint8)
    here = kvplan.KVLayout.from_tensors("layer block dim", mine)
    there = kvplan.KVLayout.from_tensors("block layer dim", theirs)
    pair.near.meet("far", [here])
    pair.far.meet("near", [there])
    network.faults = Faults(late=0.2, twice=0.2)
    push, pull = kvplan.compile(here, there), kvplan.compile(there, here)
    wrong: list[BaseException] = []

    def go() -> None:
        while not stop.is_set():
            network.turn()
            pair.far.end.poll()
            if threaded:
                pair.near.end.poll()

    def work(number: int) -> None:
        try:
            ids = list(range(number * PART, (number + 1) * PART))
            rng = np.random.default_rng(number)
            for turn in range(TURNS):
                mine[:, ids] = rng.integers(0, 256, (3, PART, 64), dtype=np.uint8)
                want = mine[:, ids].copy()
                there_ids = rng.permutation(ids)
                sent = pair.near.end.submit("far", push.plan(ids, there_ids), reading=False, deadline=PATIENCE)
                if turn % 5 == 4 and sent.cancel():
                    continue
                sent.synchronize(PATIENCE)
                back = pair.near.end.submit(
                    "far", pull.plan(there_ids, ids[::-1]), reading=True, by_layer=bool(turn % 2)
                )
                for layer in range(3):
                    back.wait_layer(layer)
                    np.testing.assert_array_equal(mine[layer, ids[::-1]], want[layer])
                assert back.result().nbytes == 3 * PART * 64
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    mover = threading.Thread(target=go, daemon=True)
    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in (mover, *workers):
        thread.start()
    for thread in workers:
        thread.join(PATIENCE)
    stop.set()
    mover.join(PATIENCE)
    assert not wrong, wrong
    assert not mover.is_alive()
    assert bool(wakes) == threaded
    pair.check()

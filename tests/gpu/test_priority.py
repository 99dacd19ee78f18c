"""On a real GPU: priorities change no byte, high ones go past what waits, and what was taken back moves nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, pair_of

pytestmark = pytest.mark.gpu

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged", "auto")
PATIENCE = 60.0  # seconds
every_path = pytest.mark.parametrize("path", PATHS)
both_ways = pytest.mark.parametrize("direction", ["load", "store"])


def pair(direction):
    return pair_of(
        direction, Paged(DEVICE_NOTATION, block=64, dim=512), Paged(HOST_NOTATIONS["page-first"], block=64, dim=512)
    )


@every_path
@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_what_was_submitted_last_is_what_stays(path, direction, seed, executor_of):
    rng = np.random.default_rng(seed)
    moves = pair(direction)
    executor = executor_of(path=path)
    transfers = [
        executor.submit(
            moves.plan(Move(rng.permutation(64)[:24], rng.permutation(64)[:24])),
            priority=str(rng.choice(["normal", "high"])),
        )
        for _ in range(40)
    ]
    for transfer in transfers:
        transfer.synchronize(PATIENCE)
    moves.check()


@every_path
@both_ways
def test_a_high_one_goes_past_what_waits_and_what_waits_is_taken_back(path, direction, executor_of):
    moves, gate = pair(direction), threading.Event()
    executor = executor_of(path=path)
    before = executor.stats().cancelled
    held = executor.submit(moves.program.plan([3], [0]), after=gate)
    behind = executor.submit(moves.plan(Move([2], [6])))
    executor.submit(moves.plan(Move([4], [2])), priority="high").synchronize(PATIENCE)
    assert not held.done()
    assert not behind.done()
    assert held.cancel()
    behind.synchronize(PATIENCE)
    gate.set()
    with pytest.raises(kvplan.TransferError, match="was cancelled"):
        held.synchronize(PATIENCE)
    moves.check()
    assert executor.stats().cancelled == before + 1

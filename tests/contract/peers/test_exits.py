"""Normal exits without close(): what was submitted is finished, or its loss is an error on stderr, in time."""

from __future__ import annotations

import subprocess

import pytest

from kvplan import TransferError
from tests.contract.peers.pairs import Pair, form
from tests.contract.peers.transports import over

pytestmark = pytest.mark.slow

BOUND = 30.0  # seconds that an exit may take
GENEROUS = 30.0  # seconds beyond a bound, on a machine that does much else
BLOCKS = range(256)
LARGE = {"layer": 4, "block": len(BLOCKS), "dim": 2048}  # 4 MiB in rows of 4 KiB
FORMS = form("layer block dim", **LARGE), form("block layer dim", **LARGE)


def ends(process, code=0):
    """Let a process exit; check that it ends in time and by itself, and return what it said and its exit code."""
    try:
        ended = process.exit(BOUND + GENEROUS, code)
    except subprocess.TimeoutExpired:
        pytest.fail("the process does not end")
    assert ended >= 0, f"signal {-ended} ended it: {process.said()}"
    return process.said(), ended


@over("shm", "direct", "packed", "cuda_ipc")
@pytest.mark.parametrize("code", [0, 3], ids=["return", "exit"])
def test_what_was_pushed_arrives(transport, start, code):
    pair = Pair(transport, start(), start(), FORMS)
    for k in range(4):
        pair.submit(BLOCKS, BLOCKS[::-1], reading=False, note=b"push %d" % k)
    pair.there.tensors[::-1] = pair.here.tensors.swapaxes(0, 1)  # the oracle would take a minute
    said, ended = ends(pair.near, code)
    assert ended == code, said
    assert sorted(note for _, note in pair.far.hear(4)) == [b"push %d" % k for k in range(4)]
    assert pair.far.content() == [root.tobytes() for root in pair.there.roots]
    pair.far.close()


@over("shm", "cuda_ipc")
def test_the_owner_exits_while_it_is_visited(transport, start):
    pair = Pair(transport, start(), start(), FORMS)
    pair.near.begin("until_refused", "far", list(BLOCKS), reading=True, **transport.options)
    said, ended = ends(pair.far)
    assert ended == 0, said
    assert "'far'" in pair.near.answer()
    pair.near.close(BOUND)


@over("shm", "cuda_ipc")
def test_both_exit_at_once(transport, start):
    pair = Pair(transport, start(), start(), FORMS)
    pair.near.end(pair.submit(BLOCKS, BLOCKS, reading=True))
    pair.near.pipe.close()
    for process in (pair.far, pair.near):
        said, ended = ends(process)
        assert ended == 0, said


@over("shm")
def test_a_transfer_that_an_exit_gives_up_is_an_error_on_stderr(transport, start):
    pair = Pair(transport, start(), start(), FORMS)
    pair.submit([1], [2], reading=False, event=1, note=b"never")
    said, _ = ends(pair.near)
    assert TransferError.__name__ in said or "'far'" in said, f"it said {said!r}"
    assert pair.far.notes() == []
    pair.far.close()

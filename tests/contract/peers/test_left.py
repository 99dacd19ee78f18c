"""Nothing is left of peers that have gone: threads, descriptors, mappings, files and rings are counted from outside."""

from __future__ import annotations

import time

import pytest

from tests.contract.peers.pairs import FAR, NEAR, Pair
from tests.contract.peers.process import mapped_by_others, shared_files
from tests.contract.peers.transports import over

pytestmark = pytest.mark.slow

RING = 40 << 20  # bytes of an agent's ring
SOCKETS = "NIXL keeps two sockets of each peer that is removed and met again"


class Counted:
    """What processes hold before, and again after: as much."""

    def __init__(self, folder, *processes):
        self.folder, self.files = folder, shared_files() | set(folder.iterdir())
        self.before = {one: (one.holds(), one.data_nbytes()) for one in processes}

    def check(self):
        for process, (held, nbytes) in self.before.items():
            process.holds_no_more_than(held)
            assert process.data_nbytes() < nbytes + RING
        end = time.monotonic() + 30
        while left := self.left() - mapped_by_others({one.pid for one in self.before}):
            assert time.monotonic() < end, f"left: {left}"
            time.sleep(0.1)

    def left(self):
        """New files: of sockets, and shared memory, also of tests that run beside this one until they end."""
        return (shared_files() | set(self.folder.iterdir())) - self.files


@over("shm", "cuda_ipc", xfail={"direct": SOCKETS, "packed": SOCKETS})
@pytest.mark.parametrize(("peers", "rounds"), [(1, 200), (3, 67)])
def test_two_hundred_meetings(transport, start, folder, peers, rounds):
    near, *others = (start() for _ in range(1 + peers))
    transport.open(near, "near", NEAR.build(0))
    cards = [transport.open(one, f"far {k}", FAR.build(k)) for k, one in enumerate(others)]
    near.meet_often(cards, 4, **transport.options)
    counted = Counted(folder, near, *others)
    near.meet_often(cards, rounds, **transport.options)
    counted.check()
    for process in (near, *others):
        process.close()


@over("shm", "direct", "packed", "nixl_agent", "cuda_ipc")
def test_many_agents(transport, standing, folder):
    def turn():
        pair = Pair(transport, standing["near"], standing["far"])
        pair.move([1, 2], [3, 4], reading=False)
        standing.close()

    for _ in range(3):
        turn()
    counted = Counted(folder, standing["near"], standing["far"])
    for _ in range(12):
        turn()
    counted.check()


@over("shm")
def test_peers_that_die(transport, start, folder):
    """Each has another name, as where a new worker takes the place of one that died."""
    near = start()
    transport.open(near, "near", NEAR.build(0))
    counted = None
    for k in range(4):
        other = start()
        near.meet(transport.open(other, f"far {k}", FAR.build(k)))
        near.move(f"far {k}", [1], [2], reading=True, **transport.options)
        near.drop(f"far {k}")
        other.kill()
        if k == 0:
            counted = Counted(folder, near)
    counted.check()
    near.close()


@over("shm")
def test_notes_of_peers_that_left_are_bounded(transport, start, folder):
    """An agent that never reads them keeps as much as of one peer."""
    far, near = start(), start()
    card = transport.open(far, "far", FAR.build(0))
    before = far.data_nbytes()
    for k in range(6):
        transport.open(near, f"near {k}", NEAR.build(0))
        near.meet(card)
        for _ in range(400):
            near.send("far", bytes(60_000))
        near.close()
    assert far.data_nbytes() - before < 4 * 400 * 60_000
    far.close()

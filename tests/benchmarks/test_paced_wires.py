"""A wire that is as fast as a network card: when its writes, and the pieces of a large message, are posted."""

from __future__ import annotations

from itertools import accumulate

import pytest

from benchmarks.wires.paced import PIECE, PacedMessage, pace


class Posts:
    """A wire that notes what is posted, asked and released. Writes end when the test says so."""

    def __init__(self) -> None:
        self.posted: list[bytes] = []
        self.asked: list[bytes] = []
        self.done: set[bytes] = set()
        self.released: list[bytes] = []
        self.told: list[bytes] = []

    def write(self, local, remote, nbytes, note):
        if not nbytes:
            raise RuntimeError("no such peer")
        assert not note  # it would be sent within the post, if that ends the write
        self.posted.append(b"%d" % (1 + len(self.posted)))
        return self.posted[-1]

    def state(self, number):
        self.asked.append(number)
        return "done" if number in self.done else "moving"

    def release(self, number):
        self.released.append(number)
        return True

    def tell(self, note):
        self.told.append(note)


@pytest.fixture
def clock():
    """A clock that the test turns."""
    return [0.0]


@pytest.fixture
def owner(clock):
    """A class of wires at 1 GB/s."""
    made = type("Paced", (Posts,), {name: getattr(Posts, name) for name in ("write", "state", "release", "tell")})
    pace(made, 1.0, lambda: clock[0])
    return made


def test_a_paced_write_is_posted_at_once_and_ends_when_its_last_byte_has_left(owner, clock):
    wire = owner()
    first, second = (wire.write(0, 0, 1_000_000, note) for note in (b"note 1", b"note 2"))
    wire.done |= {b"1", b"2"}
    assert (wire.state(first), wire.posted, wire.asked, wire.told) == ("moving", [b"1", b"2"], [], [])
    clock[0] = 0.0011
    assert (wire.state(first), wire.state(second), wire.asked) == ("done", "moving", [b"1"])
    assert (wire.state(first), wire.told) == ("done", [b"note 1"])
    assert (wire.release(first), wire.released) == (True, [b"1"])
    clock[0] = 0.0021
    assert (wire.state(second), wire.told) == ("done", [b"note 1", b"note 2"])


def test_a_paced_write_ends_no_sooner_than_on_the_wire_itself(owner, clock):
    wire = owner()
    write = wire.write(0, 0, 1_000_000, b"1")
    clock[0] = 1.0
    assert wire.state(write) == "moving"


def test_all_wires_share_the_card(owner, clock):
    wire, other = owner(), owner()
    wire.write(0, 0, 1_000_000, b"1")
    second = other.write(0, 0, 1_000_000, b"2")
    other.done.add(b"1")
    clock[0] = 0.0015
    assert other.state(second) == "moving"
    clock[0] = 0.0025
    assert other.state(second) == "done"


def test_a_card_that_was_idle_does_not_catch_up(owner, clock):
    wire = owner()
    clock[0] = 5.0
    write = wire.write(0, 0, 1_000_000, b"1")
    wire.done.add(b"1")
    assert wire.state(write) == "moving"


def test_a_post_that_fails_takes_no_time_of_the_card(owner, clock):
    wire = owner()
    with pytest.raises(RuntimeError, match="no such peer"):
        wire.write(0, 0, 0, b"1")
    write = wire.write(0, 0, 1_000_000, b"2")
    wire.done.add(b"1")
    clock[0] = 0.0011
    assert wire.state(write) == "done"


class Pieces:
    """NIXL, whose posts take 3 ms each, on a clock of its own."""

    def __init__(self) -> None:
        self.now, self.moved = 0.0, list[tuple[float, int]]()

    def clock(self):
        self.now += 1e-4
        return self.now

    def prep_xfer_dlist(self, whose, rows, memory):
        return rows

    def make_prepped_xfer(self, operation, mine, here, theirs, there, note):
        return int(mine[here[0]][1])

    def transfer(self, nbytes):
        self.moved.append((self.now, nbytes))
        self.now += 3e-3
        return "DONE"


def test_one_paced_message_keeps_its_card_busy():
    fake = Pieces()
    message = PacedMessage(fake, "you", (0, 0), (0, 0), 10 * PIECE + 8, "DRAM", "WRITE", 1.0, fake.clock)
    seconds = message()
    sizes = [PIECE] * 10 + [8]
    assert [nbytes for _, nbytes in fake.moved] == sizes
    late = [at - sent / 1e9 for (at, _), sent in zip(fake.moved, accumulate(sizes), strict=True)]
    assert min(late) >= 0
    assert max(late) < 4e-3  # not the posts of all pieces, one after another
    assert seconds >= sum(sizes) / 1e9

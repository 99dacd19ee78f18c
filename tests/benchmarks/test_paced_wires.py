"""A wire that is as fast as a network card: when its writes, and the pieces of a large message, are posted."""

from __future__ import annotations

from itertools import accumulate

import pytest

from benchmarks.wires.paced import PIECE, PacedMessage, pace


class Posts:
    """A wire that notes what is posted. Writes end when the test says so."""

    def __init__(self) -> None:
        self.posted: list[bytes] = []
        self.done: set[bytes] = set()
        self.released: list[bytes] = []
        self.refuses = False

    def write(self, local, remote, nbytes, note):
        if self.refuses:
            raise RuntimeError("no such peer")
        self.posted.append(note)
        return note

    def state(self, note):
        return "done" if note in self.done else "moving"

    def release(self, note):
        self.released.append(note)
        return True

    def close(self):
        self.released.append(b"all")


@pytest.fixture
def clock():
    """A clock that the test turns."""
    return [0.0]


@pytest.fixture
def owner(clock):
    """A class of wires at 1 GB/s."""
    made = type("Paced", (Posts,), {name: getattr(Posts, name) for name in ("write", "state", "release", "close")})
    pace(made, 1.0, lambda: clock[0])
    return made


def test_a_paced_write_is_posted_when_its_last_byte_has_left(owner, clock):
    wire = owner()
    first, second = (wire.write(0, 0, 1_000_000, note) for note in (b"1", b"2"))
    assert (wire.state(first), wire.posted) == ("moving", [])
    clock[0] = 0.0011
    assert (wire.state(first), wire.state(second), wire.posted) == ("moving", "moving", [b"1"])
    wire.done.add(b"1")
    assert (wire.state(first), wire.release(first), wire.released) == ("done", True, [b"1"])
    clock[0] = 0.0021
    assert (wire.state(second), wire.posted) == ("moving", [b"1", b"2"])


def test_a_question_about_the_oldest_write_posts_all_that_are_due_in_order(owner, clock):
    wire, other = owner(), owner()
    first = wire.write(0, 0, 1_000_000, b"1")
    other.write(0, 0, 1_000_000, b"2")  # both wires share the card
    wire.write(0, 0, 1_000_000, b"3")
    clock[0] = 0.0025
    wire.state(first)
    assert (wire.posted, other.posted) == ([b"1"], [b"2"])
    clock[0] = 0.0035
    wire.state(first)
    assert wire.posted == [b"1", b"3"]


def test_a_card_that_was_idle_does_not_catch_up(owner, clock):
    wire = owner()
    clock[0] = 5.0
    write = wire.write(0, 0, 1_000_000, b"1")
    assert (wire.state(write), wire.posted) == ("moving", [])


def test_a_paced_write_that_waits_is_released_and_never_posted(owner, clock):
    wire = owner()
    first, second = (wire.write(0, 0, 1_000_000, note) for note in (b"1", b"2"))
    assert wire.release(first)
    clock[0] = 1.0
    assert (wire.state(first), wire.state(second)) == ("failed: it was given up", "moving")
    assert (wire.posted, wire.released) == ([b"2"], [])
    assert wire.release(first)


def test_a_post_that_fails_fails_its_own_write(owner, clock):
    wire, other = owner(), owner()
    wire.refuses = True
    first, second = wire.write(0, 0, 1, b"1"), other.write(0, 0, 1, b"2")
    clock[0] = 1.0
    assert other.state(second) == "moving"
    assert (wire.state(first), wire.release(first)) == ("failed: no such peer", True)
    assert (other.posted, wire.released) == ([b"2"], [])


def test_a_wire_that_is_closed_posts_nothing_more(owner, clock):
    wire, other = owner(), owner()
    first, second = wire.write(0, 0, 1, b"1"), other.write(0, 0, 1, b"2")
    wire.close()
    clock[0] = 1.0
    assert (wire.state(first), other.state(second)) == ("failed: its wire is closed", "moving")
    assert (wire.posted, wire.released, other.posted) == ([], [b"all"], [b"2"])


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

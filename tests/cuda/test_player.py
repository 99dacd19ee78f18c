"""The player of rows: it makes the driver's own calls until one fails, compiled and as the Python it is written in."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext

import numpy as np
import pytest

from kvplan.cuda import player, rows
from kvplan.cuda.rows import (
    ADDED,
    BOX,
    ENDED,
    FAILED,
    LAUNCH,
    NAMES,
    PLAYED,
    RECORD,
    SYNC,
    WAIT,
    boxes,
    copy_rows,
    error_of,
    new_state,
    rows_of,
)
from tests.plan.slow_twins import uncompiled

COUNTS = (2, 3, 4, 4, 9, 2, 1)  # arguments of the functions of NAMES
NOT_READY, REFUSED = 600, 719


def words_at(address, count):
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64).tolist()


class Library:
    """The driver's functions, usleep and sem_wait, which note their calls.

    Attributes:
        calls: names and arguments; those of a launch and of a batch as the driver would read them.
        codes: by the number of a call, what it returns.
        napping: called by each nap.
    """

    def __init__(self) -> None:
        self.calls, self.codes, self.batch_at, self.napping = [], {}, 99, lambda: None
        kinds = [ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count) for count in (*COUNTS, 1, 1)]
        names = [*NAMES, "usleep", "sem_wait"]
        self._functions = [kind(lambda *given, name=name: self._call(name, *given))
                           for kind, name in zip(kinds, names, strict=True)]  # fmt: skip
        addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in self._functions]
        self.entries = np.array([*addresses, 0xA77, 0xF1], np.int64)

    def _call(self, name, *given):
        if name == "usleep":
            self.napping()
            return 0
        if name == "cuLaunchKernelEx":
            config, function, arguments, extra = given
            given = function, *words_at(words_at(arguments, 1)[0], 1), words_at(config, 7), extra
        if name == "cuMemcpyBatchAsync":
            ctypes.c_int64.from_address(given[7]).value = self.batch_at
            given = [words_at(column, given[3]) for column in given[:3]], given[4:7], given[8]
        self.calls.append((name, *given))
        return self.codes.pop(len(self.calls) - 1, 0)


@pytest.fixture(params=["compiled", "as written"])
def library(request):
    with uncompiled(player) if request.param == "as written" else nullcontext():
        yield Library()


COLUMNS = np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 3, 32, 33]])  # source, destination, bytes
BOXES = boxes(np.array([[0x1000, 0x2000, 8, 3, 16, 32]]))
COPIES = copy_rows(COLUMNS, 81, least=4, most=2)  # a batch of one, a copy, a batch of two
LIST = np.concatenate((
    rows_of([(RECORD, 77, 5), (WAIT, 78, 6), (LAUNCH, 79, 0x5000, 0x78, 132, 512, 64)]), COPIES,
    rows_of([(BOX, 82, BOXES.ctypes.data), (SYNC, 77, 5)]),
))  # fmt: skip
CONFIG = [*np.array([132, 1, 1, 512, 1, 1, 64, 0], np.uint32).view(np.int64).tolist(), 79, 0, 0]
EXPECTED = [
    ("cuEventRecord", 5, 77),
    ("cuStreamWaitEvent", 78, 6, 0),
    ("cuLaunchKernelEx", 0x78, 0x5000, CONFIG, 0),
    ("cuMemcpyBatchAsync", [[20], [10], [30]], (0xA77, 0xF1, 1), 81),
    ("cuMemcpyAsync", 21, 11, 3, 81),
    ("cuMemcpyBatchAsync", [[22, 23], [12, 13], [32, 33]], (0xA77, 0xF1, 1), 81),
    ("cuMemcpy2DAsync_v2", BOXES.ctypes.data, 82),
    ("cuEventQuery", 5),
]


def test_a_list_is_played_by_the_driver_s_own_calls(library):
    state = new_state()
    player.play(library.entries, LIST, state)
    assert library.calls == EXPECTED
    assert state[[PLAYED, FAILED, ENDED, ADDED]].tolist() == [len(LIST), 0, 1, 0]


@pytest.mark.parametrize(("failing", "what"), [
    (0, "cuEventRecord returned CUDA_ERROR_PLAYED (719, it was played)"), (1, "cuStreamWaitEvent returned"),
    (2, "cuLaunchKernelEx returned"), (3, "cuMemcpyBatchAsync returned CUDA_ERROR_PLAYED (719, it was played): of 1"),
    (4, "descriptor 1 of 4, 3 bytes from 0xb to 0x15"), (5, "of 2 copies"),
    (6, "cuMemcpy2DAsync returned CUDA_ERROR_PLAYED (719, it was played): 2-D copy of 3 rows of 8 bytes from 0x1000"),
    (7, "cuEventQuery returned"),
])  # fmt: skip
def test_the_call_that_fails_is_the_last_and_its_error_names_it(library, device, failing, what):
    library.codes[failing], state = REFUSED, new_state()
    player.play(library.entries, LIST, state)
    assert library.calls == EXPECTED[: failing + 1]
    assert state[[PLAYED, FAILED, ENDED]].tolist() == [failing, REFUSED, 0]
    error = error_of(device.driver, LIST, state)
    assert re.search(re.escape(what), str(error))


class Queues:
    """Two queues of lists, which a thread that is to stop plays until none is left; compiled, as it needs pointers."""

    def __init__(self, library) -> None:
        self.library, self.queue, self.held, self.given = library, np.zeros((2, 4, 3), np.int64), [], [0, 0]

    def push(self, event, *, urgent, calls=1):
        """Queue a list that records an event so often; return its state."""
        mine, state = rows_of([(RECORD, 80 + urgent, event)] * calls), new_state()
        self.held.append((mine, state))
        self.queue[int(urgent), self.given[urgent] % 4] = mine.ctypes.data, len(mine), state.ctypes.data
        self.given[urgent] += 1
        return state

    def play(self):
        paces = np.array([[900, 901], [910, 911]])
        player.serve(self.library.entries, self.queue, paces, np.ones(1, np.int64), 0)
        assert not self.queue[:, :, 0].any()
        return [arguments[0] for name, *arguments in self.library.calls if name == "cuEventRecord"]


def test_the_urgent_queue_is_played_first_and_each_queue_in_order():
    library = Library()
    queues = Queues(library)
    states = [queues.push(event, urgent=urgent, calls=2) for event, urgent in ((1, 0), (2, 1), (3, 0), (4, 1))]
    assert queues.play() == [2, 2, 4, 4, 1, 1, 3, 3]
    assert all(state[[PLAYED, FAILED, ENDED]].tolist() == [2, 0, 1] for state in states)


def test_behind_a_list_that_failed_nothing_of_its_queue_is_played_until_its_end_is_set():
    library = Library()
    queues = Queues(library)
    failing, behind, urgent = (queues.push(event, urgent=one) for event, one in ((1, 0), (2, 0), (3, 1)))
    library.codes[1] = REFUSED  # the first call after that of the urgent list

    def closes():
        assert (failing[FAILED], behind[PLAYED], urgent[ENDED]) == (REFUSED, 0, 1)
        failing[ENDED] = 1

    library.napping = closes
    assert queues.play() == [3, 1, 2]
    assert (failing[PLAYED], behind[ENDED]) == (0, 1)


def test_a_long_list_leaves_the_driver_s_queue_room():
    """Of two events, recorded in turn every 256 calls, the one recorded first must have passed."""
    library = Library()
    queues, naps = Queues(library), []
    queues.push(1, urgent=False, calls=3 * player.PACE)
    library.codes[2 * player.PACE + 2] = NOT_READY
    library.napping = lambda: naps.append(len(library.calls))
    made = queues.play()
    assert [event for event in made if event != 1] == [900, 901]  # none behind the last call
    assert made.count(1) == 3 * player.PACE
    assert [arguments for arguments in library.calls if arguments[0] == "cuEventQuery"] == [("cuEventQuery", 900)] * 2
    assert naps == [2 * player.PACE + 3]


def test_words_of_states_have_one_number():
    """The player counts them in bytes."""
    for name in ("PLAYED", "FAILED", "FAILED_COPY", "ENDED", "ADDED", "HURRIED"):
        assert getattr(player, name) == 8 * getattr(rows, name), name
    assert len(NAMES) == player.NAP

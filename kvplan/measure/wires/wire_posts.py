"""Lists that are posted between two processes, and timed."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from kvplan.agents.by_nixl.nixl_end import NixlEnd, in_words
from kvplan.errors import TransferError
from kvplan.measure.processes.other_process import OtherProcess
from kvplan.measure.timing import Progress
from kvplan.measure.wires.wire_memory import Memory
from kvplan.measure.wires.wire_process import NAME, PING

CHILD = "kvplan.measure.wires.wire_process"
NBYTES = 64 << 20  # bytes of the memory of each end
SIZES = (576, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of a descriptor
COUNTS = (1, 16, 256, 2048)  # descriptors of a list
SLOT_SIZES = tuple(1 << power for power in range(20, 27))  # bytes: 1 to 64 MiB
OPERATIONS = ("WRITE", "READ")
SAMPLES, PINGS, WARM_PINGS = 5, 200, 20
PATIENCE = 30.0  # seconds after which a list, or a note, is given up


class Posted(NamedTuple):
    """A list that was posted. The times are medians.

    Attributes:
        descriptors: number of descriptors.
        nbytes: bytes of each.
        post: seconds until the call returned.
        seconds: seconds until the end was known.
        operation: ``"WRITE"`` or ``"READ"``.
    """

    descriptors: int
    nbytes: int
    post: float
    seconds: float
    operation: str = "WRITE"


class WireEnds:
    """This process's end of a wire whose other end is a process of its own. :func:`wire_ends` makes it.

    Args:
        agent: this process's end of NIXL, which knows the other one.
        mine: memory here.
        theirs: address of the memory there.
        number: number of the device there.
        tell: function that sends a note.
        clock: function that returns seconds; tests replace it.
    """

    def __init__(
        self, agent: NixlEnd, mine: Memory, theirs: int, number: int, tell: Callable[[bytes], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._agent, self._mine, self._theirs, self._number = agent, mine, theirs, number
        self._tell, self._clock = tell, clock
        self._order = np.random.default_rng(0)

    def post(self, number: int, nbytes: int, operation: str, *, same: bool = False) -> tuple[float, float]:
        """Post a list of rows in random order. Return the seconds until the call returned, and until the end.

        Args:
            number: rows.
            nbytes: bytes of each.
            operation: ``"WRITE"`` or ``"READ"``.
            same: whether the rows are the first ones in order, as in every call before: slots that are used again.

        Raises:
            TransferError: NIXL reports a failure, or no end for half a minute.
        """
        nixl, held = self._agent.nixl, []
        rows = NBYTES // nbytes
        places = [(np.arange(rows) if same else self._order.permutation(rows))[:number] * nbytes for _ in range(2)]
        try:
            for name, start, device, at in (("NIXL_INIT_AGENT", self._mine.address, self._mine.number, places[0]),
                                            (NAME, self._theirs, self._number, places[1])):  # fmt: skip
                table = np.stack([start + at, np.full(number, nbytes), np.full(number, device)], axis=1)
                held.append(nixl.prep_xfer_dlist(name, np.ascontiguousarray(table, dtype=np.int64), self._mine.kind))
            every = np.arange(number, dtype=np.int32)
            held.insert(0, nixl.make_prepped_xfer(operation, held[0], every, held[1], every, b""))
            begun = self._clock()
            state = nixl.transfer(held[0])
            posted = self._clock() - begun
            while state == "PROC" and self._clock() - begun < PATIENCE:
                state = nixl.check_xfer_state(held[0])
            took = self._clock() - begun
        except Exception as error:
            raise TransferError(f"NIXL cannot move a list of {number} descriptors: {in_words(error)}") from error
        finally:
            for one in held:
                with suppress(Exception):  # NIXL releases a list that is still moving when the agent closes
                    one.release()
        if state != "DONE":
            raise TransferError(f"NIXL says {state!r} of a list of {number} descriptors of {nbytes} bytes")
        return posted, took

    def latency(self) -> float:
        """Return the seconds until the other process sees a note: half of there and back, the fastest of ten.

        A slower one waits for a core of the CPU, which is not the wire's cost.

        Raises:
            TransferError: no note came back.
        """
        taken = []
        for k in range(PINGS + WARM_PINGS):
            begun = self._clock()
            self._tell(PING)
            while not self._agent.notes():
                if self._clock() - begun > PATIENCE:
                    raise TransferError("the other process does not answer a note")
            if k >= WARM_PINGS:
                taken.append(self._clock() - begun)
        return statistics.quantiles(taken, n=10)[0] / 2


@contextmanager
def wire_ends(device: str, peer: str) -> Iterator[WireEnds]:
    """Start the other process, and connect to it. The process ends with the context.

    Args:
        device, peer: ``"cpu"`` or ``"cuda:N"``: memory here, and memory of the other process.

    Raises:
        PathError: NIXL is not installed.
        KVPlanError: the other process does not start, or refuses.
    """
    mine = Memory(device, NBYTES)
    with ExitStack() as stack:
        agent = NixlEnd("near end", {"pool": mine.layout}, None, ("UCX",), progress_thread=False)
        stack.callback(agent.close)
        agent.open()
        other = stack.enter_context(OtherProcess(CHILD, "the process at the other end of the wire"))
        found = other.ask({"device": peer, "nbytes": NBYTES})
        if "refused" in found:
            raise TransferError(f"the process at the other end of the wire: {found['refused']}")
        agent.add(NAME, base64.b64decode(found["metadata"]))
        other.ask({"name": agent.name, "metadata": base64.b64encode(agent.metadata() or b"").decode()})
        yield WireEnds(agent, mine, found["address"], int(peer.partition(":")[2] or 0), partial(agent.tell, NAME))


def measured(ends: WireEnds, seconds: float, tell: Progress) -> list[Posted]:
    """Time lists of several counts and sizes. Cases take turns, since a shared machine drifts.

    Args:
        ends: the ends of the wire.
        seconds: seconds after which no further round begins; every case has at least one sample.
        tell: function that is called with the share that is done.
    """
    cases = [(number, size, operation) for size in SIZES for number in COUNTS for operation in OPERATIONS
             if number * size <= NBYTES]  # fmt: skip
    taken: dict[tuple[int, int, str], list[tuple[float, float]]] = {case: [] for case in cases}
    begun = time.perf_counter()
    for turn in range(SAMPLES + 1):
        if turn > 1 and time.perf_counter() - begun > seconds:
            break
        for case in cases:
            found = ends.post(*case)
            if turn:  # the first round warms up
                taken[case].append(found)
        tell(turn / SAMPLES, f"round {turn} of lists")
    return [Posted(number, size, _median(held, 0), _median(held, 1), operation)
            for (number, size, operation), held in taken.items()]  # fmt: skip


def slot_bytes(ends: WireEnds) -> dict[int, float]:
    """Time writes of slots that are used again and again. Return the seconds for each byte, by bytes of a slot.

    A small slot stays in the caches of the CPU, so its bytes may cost less than those of a large message.
    """
    found = {}
    for size in SLOT_SIZES:
        taken = [ends.post(1, size, "WRITE", same=True)[1] for _ in range(SAMPLES + 2)]
        found[size] = statistics.median(taken[2:]) / size
    return found


def _median(held: Sequence[tuple[float, float]], column: int) -> float:
    return statistics.median(one[column] for one in held)

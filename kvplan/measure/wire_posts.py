"""Lists that NIXL posts between two processes, timed one by one: the points of a wire's calibration."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvplan.agents.by_nixl.nixl_end import NixlEnd, in_words
from kvplan.errors import KVPlanError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.processes import OtherProcess
from kvplan.measure.rig import Progress
from kvplan.plan.descriptors import memory_of

NBYTES = 64 << 20  # bytes of the memory of each end
SIZES = (576, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of a descriptor
COUNTS = (1, 16, 256, 2048)  # descriptors of a list
SLOT_SIZES = tuple(1 << power for power in range(20, 27))  # bytes: 1 to 64 MiB
OPERATIONS = ("WRITE", "READ")
SAMPLES, PINGS, WARM_PINGS = 5, 200, 20
PATIENCE = 30.0  # seconds after which a list, or a note, is given up
NEAR, FAR, PING, PONG = "near end", "far end", b"ping", b"pong"


class Memory:
    """Bytes that NIXL registers, each touched, so that no page is missing while something is timed.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``.
        nbytes: bytes.

    Attributes:
        layout: a layout over them, with one block.
        address: address of the first byte.
        kind: NIXL's name of the memory, ``"DRAM"`` or ``"VRAM"``.
        number: number of the device.

    Raises:
        KVPlanError: the GPU's memory needs torch, and it is not installed.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self.kind, self.number = memory_of(device, "the memory of a wire")
        flat: Any = np.ones(nbytes, dtype=np.uint8)
        if device != "cpu":
            try:
                import torch
            except ModuleNotFoundError:
                raise KVPlanError('GPU memory needs torch; pip install "kvplan[cuda]"') from None
            flat = torch.ones(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        self.address = int(flat.ctypes.data if self.kind == "DRAM" else flat.data_ptr())
        self.layout = KVLayout.from_tensors("block dim", flat.reshape(1, -1))


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
        nixl, rows = self._agent.nixl, NBYTES // nbytes
        sides, handles = [], []
        for start, device in ((self._mine.address, self._mine.number), (self._theirs, self._number)):
            at = (np.arange(rows) if same else self._order.permutation(rows))[:number] * nbytes
            table = np.stack([start + at, np.full(number, nbytes), np.full(number, device)], axis=1)
            sides.append(np.ascontiguousarray(table, dtype=np.int64))
        try:
            for name, table in zip(("NIXL_INIT_AGENT", FAR), sides, strict=True):
                handles.append(nixl.prep_xfer_dlist(name, table, self._mine.kind))
            every = np.arange(number, dtype=np.int32)
            handles.insert(0, nixl.make_prepped_xfer(operation, handles[0], every, handles[1], every, b""))
            begun = self._clock()
            state = nixl.transfer(handles[0])
            posted = self._clock() - begun
            while state == "PROC" and self._clock() - begun < PATIENCE:
                state = nixl.check_xfer_state(handles[0])
            took = self._clock() - begun
        except Exception as error:
            raise TransferError(f"NIXL cannot move a list of {number} descriptors: {in_words(error)}") from error
        finally:
            for handle in handles:
                with suppress(Exception):  # NIXL releases a list that is still moving when the agent closes
                    handle.release()
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
        for _ in range(PINGS + WARM_PINGS):
            begun = self._clock()
            self._tell(PING)
            while not self._agent.notes():
                if self._clock() - begun > PATIENCE:
                    raise TransferError("the other process does not answer a note")
            taken.append(self._clock() - begun)
        return statistics.quantiles(taken[WARM_PINGS:], n=10)[0] / 2


@contextmanager
def wire_ends(device: str, peer: str) -> Iterator[WireEnds]:
    """Start the other process, and connect to it. The process ends with the context.

    Args:
        device, peer: ``"cpu"`` or ``"cuda:N"``: memory here, and memory of the other process.

    Raises:
        PathError: NIXL is not installed; or the other process refuses.
        TransferError: the other process does not start.
    """
    mine = Memory(device, NBYTES)
    with ExitStack() as stack:
        agent = NixlEnd(NEAR, {"pool": mine.layout}, None, ("UCX",), progress_thread=False)
        stack.callback(agent.close)
        agent.open()
        other = OtherProcess(role="echo", device=peer, nbytes=NBYTES)
        stack.callback(other.close)
        agent.add(FAR, base64.b64decode(other.offered["metadata"]))
        other.ask(name=NEAR, metadata=base64.b64encode(agent.metadata()).decode())
        number = int(peer.partition(":")[2] or 0)
        yield WireEnds(agent, mine, other.offered["address"], number, partial(agent.tell, FAR))


def measured(ends: WireEnds, seconds: float, tell: Progress) -> list[Posted]:
    """Time lists of several counts and sizes. Cases take turns, since a shared machine drifts.

    Args:
        ends: the ends of the wire.
        seconds: seconds after which no further round begins; every case has at least one sample.
        tell: function that is called with the share that is done.
    """
    cases = [(number, size, operation) for size in SIZES for number in COUNTS for operation in OPERATIONS
             if number * size <= NBYTES]  # fmt: skip
    rounds, begun = list[list[tuple[float, float]]](), time.perf_counter()
    while len(rounds) < 2 or (len(rounds) <= SAMPLES and time.perf_counter() - begun < seconds):
        rounds.append([ends.post(*case) for case in cases])
        tell(len(rounds) / (SAMPLES + 1), f"round {len(rounds)} of lists")
    medians = np.median(rounds[1:], axis=0).tolist()  # the first round warms up
    return [Posted(number, size, post, whole, operation)
            for (number, size, operation), (post, whole) in zip(cases, medians, strict=True)]  # fmt: skip


def slot_bytes(ends: WireEnds) -> dict[int, float]:
    """Time writes of slots that are used again and again. Return the seconds for each byte, by bytes of a slot.

    A small slot stays in the caches of the CPU, so its bytes may cost less than those of a large message.
    """
    taken = {size: [ends.post(1, size, "WRITE", same=True)[1] for _ in range(SAMPLES + 2)] for size in SLOT_SIZES}
    return {size: statistics.median(times[2:]) / size for size, times in taken.items()}

"""Two ends on a wire of a given speed, by a clock of the test: naps, looks, copies and writes take virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

import numpy as np

import kvplan
from kvplan.agents.by_nixl.nixl_progress import Naps
from kvplan.agents.packed.pack_end import End
from kvplan.agents.packed.pack_starts import LEG_UNITS
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.slot_ring import ALIGNMENT
from kvplan.plan.row_plans import Memory

SLOT = 4096
EMPTY, FOUND = 10e-6, 100e-6  # seconds of a look that finds nothing, and of one that moves something
COPY = 60e-6  # of a gather or a scatter
NOTE = 3e-6  # of a note on its way


class Clock:
    """The time of both processes."""

    def __init__(self) -> None:
        self.time = 1.0

    def __call__(self) -> float:
        return self.time


class Copy:
    """A gather or a scatter, which moves nothing."""

    def __init__(self, clock: Clock, plan: kvplan.Plan) -> None:
        self.plan = plan
        self._clock, self._until = clock, clock.time + COPY

    def done(self) -> bool:
        return self._clock.time >= self._until

    def synchronize(self) -> None:
        assert self.done()


class Write:
    """A write whose note is sent by the look that finds it done, as NIXL does."""

    def __init__(self, until: float, note: bytes) -> None:
        self.until, self.note = until, note


class Wire:
    """One direction: writes follow one another, each for as long as a chunk takes."""

    most_note = 1 << 16

    def __init__(self, clock: Clock, far: Process, name: str, seconds: float) -> None:
        self._clock, self._far, self._name, self._seconds = clock, far, name, seconds
        self._free_at = 0.0

    def ring(self, address: int, nbytes: int, device: str) -> None:
        pass

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        self._free_at = max(self._free_at, self._clock.time) + self._seconds
        return Write(self._free_at, note)

    def state(self, handle: Write) -> str:
        if self._clock.time < handle.until:
            return "moving"
        if handle.note:
            self.send(handle.note)
            handle.note = b""
        return "done"

    def release(self, handle: Write) -> bool:
        return True

    def send(self, note: bytes) -> None:
        self._far.mail.append((self._clock.time + NOTE, self._name, note))

    def close(self) -> None:
        pass


class Process:
    """A process: its end, and a thread that looks and naps."""

    def __init__(
        self, name: str, clock: Clock, slots: int, *, patient: bool, together: bool, slot_nbytes: int, leg_units: int
    ) -> None:  # fmt: skip
        self.name, self.clock = name, clock
        self.pool = np.zeros(slots * slot_nbytes + ALIGNMENT - 1, np.uint8)
        memory = Memory(self.pool.ctypes.data, self.pool.nbytes, "cpu", self.pool)
        given = {"now": clock, "threaded": lambda: True, "together": together, "leg_units": leg_units}
        self.end = End(name, memory, slot_nbytes, self, self.read, **given)
        self.mail: list[tuple[float, str, bytes]] = []
        self.naps = Naps(clock.time)
        self.naps.patient = patient
        self.naps.ahead, self.naps.moved = lambda: self.end.ahead, lambda: self.end.moved
        self.naps.stages, self.naps.resting = lambda: self.end.stages, lambda: self.end.resting
        self.looks, self.submits, self.seconds = 0, 0, 0.0

    def submit(self, plan, after=None, *, priority="normal") -> Copy:
        self.submits += 1
        return Copy(self.clock, plan)

    def read(self) -> None:
        due = [one for one in self.mail if one[0] <= self.clock.time]
        self.mail = [one for one in self.mail if one[0] > self.clock.time]
        for _, peer, note in due:
            self.end.take(peer, note)

    def look(self) -> float:
        """Look once; return the time of the next look."""
        begun = self.clock.time
        moved = self.end.poll()
        took = FOUND if moved else EMPTY
        self.looks, self.seconds = self.looks + 1, self.seconds + took
        at = self.clock.time + took
        return at + self.naps.after(at, moved=moved, busy=moved or self.end.busy, begun=begun)


class Computed:
    """An event that passes at a time."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self._at = clock, at

    def query(self) -> bool:
        return self._clock.time >= self._at

    def synchronize(self) -> None:
        assert self.query()


class Two:
    """Two processes that move chunks over a wire.

    Args:
        seconds: how long a chunk is on the wire.
        slots: slots of each ring.
        patient: whether naps of transfers in flight may be long.
        together: whether one submit copies several chunks.
        larger: slots of the near process are so many times larger than chunks.
        leg_units: units of a leg of an order; a chunk has 16.
        layers: layers of the pools.
    """

    def __init__(
        self, seconds: float, slots: int = 16, *, patient: bool, together: bool = False, larger: int = 1,
        leg_units: int = LEG_UNITS, layers: int = 1,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        given = {"patient": patient, "together": together, "leg_units": leg_units}
        self.near = Process("near", self.clock, slots, slot_nbytes=larger * SLOT, **given)
        self.far = Process("far", self.clock, slots, slot_nbytes=SLOT, **given)
        self.chunks = 200
        mine, theirs = (np.zeros((layers, self.chunks * 16 // layers, 256), np.uint8) for _ in range(2))
        self.held = mine, theirs
        self.here, self.there = (kvplan.KVLayout.from_tensors("layer block dim", array) for array in self.held)
        self.near.end.add("far", Wire(self.clock, self.far, "near", seconds), [self.here])
        self.far.end.add("near", Wire(self.clock, self.near, "far", seconds), [self.there])
        self._queue: list[tuple[float, int, Process]] = []
        for number, process in enumerate((self.near, self.far)):
            heappush(self._queue, (self.clock.time + number * 1e-6, number, process))
        self.run(lambda: self.clock.time > 1.001)

    def run(self, over) -> None:
        """Go on until something holds."""
        while not over():
            self.clock.time, number, process = heappop(self._queue)
            heappush(self._queue, (process.look(), number, process))

    def move(self, chunks: int, *, reading: bool = True) -> float:
        """Pull or push some chunks; return the seconds that it takes."""
        ids = range(chunks * 16)
        src, dst = (self.there, self.here) if reading else (self.here, self.there)
        plan = kvplan.compile(src, dst).plan(ids, ids)
        begun = self.clock.time
        transfer = self._moved(plan, reading=reading)
        assert transfer.chunks == chunks
        return self.clock.time - begun

    def push_by_layer(self, chunks: int, compute: Sequence[float], *, every: int = 1) -> float:
        """Push so many chunks of each layer once it is computed; return the seconds from the last event.

        With ``every``, the first of so many layers has an event, which is that of all of them.
        """
        blocks, ends = range(chunks * 16), [*accumulate(compute, initial=self.clock.time)][1:]
        plan = kvplan.compile(self.here, self.there).plan(blocks, blocks)
        after = {layer: Computed(self.clock, ends[layer]) for layer in range(0, len(ends), every)}
        self._moved(plan, reading=False, by_layer=True, after=after)
        return self.clock.time - ends[max(after)]

    def _moved(self, plan: kvplan.Plan, **given: Any) -> PackedTransfer:
        """Submit in the near process, and go on until the end."""
        begun = self.clock.time
        for process in (self.near, self.far):
            process.looks, process.submits, process.seconds = 0, 0, 0.0
        transfer = self.near.end.submit("far", plan, **given)
        self._queue = [(begun if one is self.near else at, number, one) for at, number, one in self._queue]
        self._queue.sort()  # the submit wakes the thread
        self.near.naps.wake(begun)
        self.run(lambda: transfer.over)
        transfer.synchronize()
        return transfer

"""Plain data that all files of one GPU's executor share: made once, handed down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvplan.base.latch import Wake
from kvplan.base.process import generation
from kvplan.base.threads import aside
from kvplan.cost.policy import CHUNK_NBYTES, SMALL_CHUNK_NBYTES, SMALL_CHUNKS, Policy
from kvplan.cuda.device import Device
from kvplan.cuda.reach import Reach
from kvplan.execute.gpu.arena import Arena, Held, Piece
from kvplan.execute.gpu.tables import Tables
from kvplan.execute.stats import Tally


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and counts at which a GPU's executor changes what it does.

    The defaults are right for every GPU that was measured. Tests hand in others, so that small transfers meet them.

    Attributes:
        batch_copies: copies of one batched call. The engine begins when the call returns, so large batches go in
            slices; and 52,000 copies in one call have crashed a driver (580).
        batch_nbytes: copies from host memory of fewer bytes than this go by a call each. Batches lose bytes of copies
            of up to 24 KiB from host memory, or end the context or the process, where such sizes differ within a call:
            the driver writes them into its queue of commands, and past its end. Seen of 580 on H100 and H200
            (``benchmarks/gpu/batch_bytes.py``). The size is the same on every GPU that was looked at.
        calls_in_flight: calls of one transfer in flight on a stream; twice that at most. The driver's queue ends at
            about a thousand. A call that finds it full waits for the GPU with the driver's lock held, and all other
            threads' calls wait for it.
        lane_calls: calls in flight on a lane. With more of them, the lane's own thread issues, which may wait.
        slow_calls: 2-D copies and single copies, at 2 to 3 us each. The lane's own thread issues more of them.
        slow_copies: copies in batches, at 0.4 to 3 us each. The lane's own thread issues more of them.
        slow_chunks: chunks of a staged transfer. The lane's own thread issues more of them.
        launch_groups: run groups of the kernel path that get a launch each. More of them go as flat descriptors in one
            launch: every launch costs the CPU as much as 100 of them.
        launch_rows: rows of one launch. They are counted in 32 bits, with room for the steps of all programs.
        flat_nbytes: bytes of a flat descriptor of the kernel path. Longer ones are cut, so that programs share the
            work; the kernel loops over the rest.
        layer_groups: groups of layers that a transfer by layers is cut into, at most; each is issued by itself.
        layer_group_nbytes: bytes of such a group, at least.
        chunk_nbytes: bytes of a chunk of the staged path, at most, where the policy names no number.
        small_chunks: chunks that a small staged transfer is cut into.
        small_chunk_nbytes: bytes of each of those, at least.
        few_chunks: with more chunks than this, kernels of the staged path find their units in GPU memory.
        decisions: choices of a path that are remembered.
        exit_seconds: seconds that the interpreter's exit waits for transfers and calls of ``prepare``.
    """

    batch_copies: int = 4096
    batch_nbytes: int = 28 << 10
    calls_in_flight: int = 256
    lane_calls: int = 256
    slow_calls: int = 256
    slow_copies: int = 2048
    slow_chunks: int = 256
    launch_groups: int = 4
    launch_rows: int = 1 << 30
    flat_nbytes: int = 64 << 10
    layer_groups: int = 16
    layer_group_nbytes: int = 2 << 20
    chunk_nbytes: int = CHUNK_NBYTES
    small_chunks: int = SMALL_CHUNKS
    small_chunk_nbytes: int = SMALL_CHUNK_NBYTES
    few_chunks: int = 3
    decisions: int = 4096
    exit_seconds: float = 30.0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """The data that transfers and paths of one executor share. It has no behaviour.

    Attributes:
        generation: of the process that made it; see :mod:`kvplan.base.process`.
        device: the GPU.
        policy: what the caller asked for.
        limits: sizes and counts at which paths change what they do.
        lock: guards what all lanes share; taken inside a lane's lock, never around it.
        events: events that no transfer uses; the last one given back is taken first.
        slots: pinned host memory.
        memory: GPU memory.
        tables: run tables and kernels.
        reach: which host memory the GPU reaches.
        tally: sums of ended transfers.
        wakes: a queue of each lane's thread; what is put in wakes the thread.
        inside: identifiers of the executor's own threads, which cannot wait for its end.
    """

    generation: int
    device: Device
    policy: Policy
    limits: Limits
    lock: Any
    events: list[int]
    slots: Arena
    memory: Arena
    tables: Tables
    reach: Reach
    tally: Tally
    wakes: list[Wake]
    inside: set[int]


def resources_of(device: Device, policy: Policy, limits: Limits) -> Resources:
    """Resources of one executor; no memory is taken before the first transfer."""
    lock, events = threading.RLock(), list[int]()
    slots = Arena(partial(_allocate, device, device.allocate_host), device.free_host, visible=True)
    memory = Arena(partial(_allocate, device, device.allocate), device.free, visible=False)
    tables = Tables(device, lock, events, slots, memory)
    return Resources(
        generation(), device, policy, limits, lock, events, slots, memory, tables, Reach(device), Tally(), [], set()
    )


def _allocate(device: Device, allocate: Callable[[int], int], nbytes: int) -> int:
    with device.current():
        return allocate(nbytes)


class Loans:
    """Memory and events that a transfer borrows until its end.

    Attributes:
        resources: of the executor that lends them.
    """

    resources: Resources
    _pieces: list[Held]
    _borrowed: list[int]  # events

    def slot(self, nbytes: int) -> Piece:
        """Borrow at least ``nbytes`` bytes of pinned memory."""
        return self.resources.slots.take(nbytes, self._pieces)

    def scratch(self, nbytes: int, *, exact: bool = False) -> Piece:
        """Borrow at least ``nbytes`` bytes of GPU memory, or exactly ``nbytes``."""
        return self.resources.memory.take(nbytes, self._pieces, exact=exact)

    def event(self) -> int:
        """Borrow an event."""
        events, borrowed = self.resources.events, self._borrowed
        while True:
            if events:
                event = events[-1]
                del events[-1]  # from here to the end of append neither a signal nor another thread comes between
                borrowed.append(event)
                return event
            aside(self._make_event)

    def _make_event(self) -> None:
        device = self.resources.device
        with device.current():
            self.resources.events.append(device.event())

    def exchange(
        self, events: int, old_events: Iterable[int], old_pieces: Iterable[Held], place: dict[str, Any], key: str,
        owner: object,
    ) -> None:  # fmt: skip
        """Give the last borrowed piece and events to a new owner, and take what the owner before it had.

        Args:
            events: how many events the new owner keeps.
            old_events, old_pieces: what the owner before it had; this transfer gives it back at its end.
            place, key: the dictionary and the key under which the new owner is stored.
            owner: the new owner.
        """
        pieces, borrowed = [*self._pieces[:-1], *old_pieces], [*self._borrowed[:-events], *old_events]
        place[key] = owner  # from here to the end of the next line no signal is looked at
        self._pieces, self._borrowed = pieces, borrowed

    def _return_loans(self) -> None:
        """Give everything back. If the call is interrupted at any point, it can be repeated."""
        pieces, events, empty = self._pieces, self.resources.events, list[int]()
        while True:
            if not pieces:  # asked behind the jump back, where a handler may have given them back
                break
            held = pieces[-1]
            del pieces[-1]  # from here to the end of append no signal is looked at
            held[0].append(held)
        borrowed = self._borrowed
        self._borrowed = empty  # likewise
        events.extend(borrowed)

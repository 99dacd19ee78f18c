"""The limits, memory and events that all parts of one GPU's executor share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvplan.base.latch import Wake
from kvplan.base.process import generation
from kvplan.cost.policy import (
    CHUNK_NBYTES,
    HALVED_NBYTES,
    HALVED_PIECE_NBYTES,
    LAYER_GROUP_NBYTES,
    LAYER_GROUPS,
    SMALL_CHUNK_NBYTES,
    SMALL_CHUNKS,
    Policy,
)
from kvplan.cuda.device import Device
from kvplan.cuda.reach import Reach
from kvplan.execute.gpu.arena import Arena, Handles, Held, Piece
from kvplan.execute.gpu.tables import Tables
from kvplan.execute.stats import Tally


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and counts at which a GPU's executor changes what it does.

    The defaults are right for every GPU that was measured. Tests use lower limits, so that small transfers reach them.

    Attributes:
        batch_copies: most copies per batched call. The copy engine begins when a call returns, so it waits for the
            whole first batch; and the model's launches wait for the driver's lock, which a call holds. Smaller batches
            are slower beside compute (H200). A call of 52,000 copies has crashed a driver (580).
        batch_nbytes: copies of fewer bytes from host memory get one driver call each. If a batch has copies of up to
            24 KiB in several sizes, it loses bytes, or ends the context or the process. The driver writes these
            bytes into its queue of commands, and past its end. Seen with driver 580 on H100 and H200.
            The size was the same on every GPU measured.
        calls_in_flight: calls of one transfer between two events; at most twice as many are in flight on a stream. The
            driver's queue holds about 1,000. If it is full, a call waits for the GPU and holds the driver's lock, so
            the calls of all other threads wait, too.
        lane_calls: calls in flight on a lane, without events and copies of addresses: up to four for each launch. If
            there are more, a thread that needs no interpreter makes the calls, since it may wait.
        inline_effort: most calls, and copies in batches, that the submitting thread makes itself, about a microsecond
            each. A longer list goes to a thread that needs no interpreter.
        launch_groups: most run groups that the kernel path copies from run tables. If a plan has more, one launch
            copies flat descriptors: a run group costs the CPU as much as 30 flat descriptors.
        launch_rows: most rows per header, or of flat descriptors per launch. The kernel counts rows in 32 bits, and
            adds the step of all programs.
        near_rows: most rows of a launch within a GPU, or between GPUs, that reads the addresses of its units from host
            memory. Within a GPU, to copy them to the GPU first takes as long as such reads of 1,000 rows (H200).
        flat_nbytes: most bytes per flat descriptor of the kernel path. Longer descriptors are cut, so that programs
            share the work; the kernel loops over the bytes of one descriptor.
        layer_groups: most groups of layers of the same size that a transfer by layers is cut into; each is issued by
            itself. The first and the last are halved (:func:`kvplan.cost.policy.layer_groups`).
        layer_group_nbytes: least bytes of such a group.
        halved_nbytes: least bytes of a halved group.
        halved_piece_nbytes: least bytes that a halved group has of each unit.
        layer_batch_copies: most copies per batched call of a staged transfer by layers, which runs while the model's
            layers are launched.
        chunk_nbytes: most bytes per chunk of the staged path, if the policy names no number.
        small_chunks: chunks that a small staged transfer is cut into.
        small_chunk_nbytes: least bytes of such a chunk.
        few_chunks: if a staged transfer has more chunks, its kernels read their unit addresses from GPU memory.
        decisions: number of path choices that are remembered.
        exit_seconds: seconds that the interpreter's exit waits for transfers and calls of ``prepare``.
    """

    batch_copies: int = 256
    batch_nbytes: int = 28 << 10
    calls_in_flight: int = 256
    lane_calls: int = 192
    inline_effort: int = 96
    launch_groups: int = 16
    launch_rows: int = 1 << 30
    near_rows: int = 1024
    flat_nbytes: int = 64 << 10
    layer_groups: int = LAYER_GROUPS
    layer_group_nbytes: int = LAYER_GROUP_NBYTES
    halved_nbytes: int = HALVED_NBYTES
    halved_piece_nbytes: int = HALVED_PIECE_NBYTES
    layer_batch_copies: int = 64
    chunk_nbytes: int = CHUNK_NBYTES
    small_chunks: int = SMALL_CHUNKS
    small_chunk_nbytes: int = SMALL_CHUNK_NBYTES
    few_chunks: int = 3
    decisions: int = 4096
    exit_seconds: float = 20.0  # agents and the host path wait 5 s each before: 30 s in all


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """The data that transfers and paths of one executor share. It has no behaviour.

    Attributes:
        generation: generation of the process that made the executor; see :mod:`kvplan.base.process`.
        device: the GPU.
        policy: the caller's policy.
        limits: sizes and counts at which paths change what they do.
        lock: guards the data that all lanes share. A thread that needs a lane's lock, too, takes the lane's lock first.
        handles: its streams and events.
        slots: pinned host memory.
        memory: GPU memory.
        tables: run tables and kernels.
        reach: tells which host memory the GPU reaches.
        tally: sums over ended transfers.
        wakes: one queue for the thread of each lane; any object put in wakes the thread.
        inside: identifiers of the executor's own threads, which cannot wait for its end.
        lent: returns the caller's stream for all kernels, or None; called when a lane needs its first such stream.
    """

    generation: int
    device: Device
    policy: Policy
    limits: Limits
    lock: Any
    handles: Handles
    slots: Arena
    memory: Arena
    tables: Tables
    reach: Reach
    tally: Tally
    wakes: list[Wake]
    inside: set[int]
    lent: Callable[[], int | None]


def resources_of(
    device: Device, policy: Policy, limits: Limits, lent: Callable[[], int | None] = lambda: None
) -> Resources:
    """Make the resources of one executor. No memory is allocated before the first transfer."""
    lock, handles = threading.RLock(), Handles(device)
    slots = Arena(partial(allocated, device, device.allocate_host), device.free_host, visible=True)
    memory = Arena(partial(allocated, device, device.allocate), device.free, visible=False)
    tables = Tables(device, lock, handles, slots, memory)
    return Resources(
        generation(),
        device,
        policy,
        limits,
        lock,
        handles,
        slots,
        memory,
        tables,
        Reach(device),
        Tally(),
        [],
        set(),
        lent,
    )


def allocated(device: Device, allocate: Callable[[int], int], nbytes: int) -> int:
    """Allocate memory while the device is current, and return its address."""
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
        event = self.resources.handles.event()
        self._borrowed.append(event)
        return event

    def inherit(self, events: list[int], piece: Piece) -> None:
        """Give events and a piece of GPU memory back at the end, too, whose owner needs them no more."""
        self._borrowed += events
        self._pieces.append(self.resources.memory.held(piece))

    def _return_loans(self) -> None:
        """Give everything back. A second call does nothing."""
        (pieces, self._pieces), (events, self._borrowed) = (self._pieces, []), (self._borrowed, [])
        for held in pieces:
            held[0].append(held)
        self.resources.handles.unused.extend(events)

"""A second process, which owns a pool: this one starts it, asks it, and moves blocks from and to its memory.

A question is a line of JSON, and so is an answer. :mod:`kvplan.measure.child` is the other side.
"""

from __future__ import annotations

import base64
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.baselines import Baseline, Maker
from kvplan.measure.rig import Begin, Line
from kvplan.measure.rows import Missing
from kvplan.measure.workload import TO_CACHE, Buffers, Geometry, Side, Work, side_of, work
from kvplan.plan.copy_program import compile
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from kvplan.agents.peer import Peer

CHILD = "kvplan.measure.child"
TWO, NIXL = "two processes", {"pull": "NIXL READ", "push": "NIXL WRITE"}
LOCAL, BY_NIXL = ("cuda_ipc", "shm"), ("nixl",)
END_SECONDS = 30.0
MEETINGS, NOTES, WARM_NOTES = 5, 200, 20
BLOCK_RUN_NBYTES = 8 << 10  # of the block whose time is measured


class OtherProcess:
    """A process of kvplan that this one starts, asks and ends.

    Args:
        first: the first question: its role, and what that takes.

    Attributes:
        offered: the answer to it.

    Raises:
        PathError: the process refuses, and why.
        TransferError: the process has ended.
    """

    def __init__(self, **first: Any) -> None:
        command = [sys.executable, "-m", CHILD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.offered = self.ask(**first)
        except BaseException:
            self.close()
            raise
        if "refused" in self.offered:
            self.close()
            raise PathError(f"the other process: {self.offered['refused']}")

    def ask(self, **question: Any) -> Any:
        """Send a question, and return its answer."""
        self.tell(**question)
        return self.answer()

    def tell(self, **question: Any) -> None:
        """Send a question; :meth:`answer` returns its answer."""
        assert self._process.stdin is not None  # it is a pipe
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TransferError("the other process has ended; its error is above") from None

    def answer(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None  # it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise TransferError("the other process has ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PoolOwner(OtherProcess):
    """A process that owns a pool, and has agents that offer it.

    Args:
        device: ``"cuda:1"`` as the other process sees it, or ``"cpu"``.
        nbytes: bytes of the pool.
        geometries: the transfers that need a layout over it.
        transports: those of each agent.
        slots: the ring of packed transfers; None for the default.
    """

    def __init__(
        self, device: str, nbytes: int, geometries: Iterable[Geometry], *transports: Sequence[str],
        slots: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        shapes = sorted({(one.run_nbytes, one.block_runs, one.host) for one in geometries})
        super().__init__(role="pool", device=device, nbytes=nbytes, shapes=shapes, transports=transports, slots=slots)

    def card(self, agent: int = 0) -> bytes:
        """Return the card of an agent.

        Raises:
            PathError: it could not be made, and why.
        """
        card, refused = self.offered["cards"][agent]
        if refused:
            raise PathError(refused)
        return base64.b64decode(card)

    def expect_notes(self, count: int) -> None:
        """Let the process poll its notes, until it has seen a number of them; :meth:`arrivals` returns them."""
        self.tell(ask="notes", count=count)

    def arrivals(self) -> dict[str, int]:
        """Return the notes that the process has seen, with the times in nanoseconds at which it saw them."""
        return dict(self.answer())


def pool_name(geometry: Geometry) -> str:
    """Return the name of a transfer's pool on the card of the other process.

    >>> pool_name(Geometry("push", "scattered", 8192, 320, 160))
    '8192 x 160, scattered'
    """
    return f"{geometry.run_nbytes} x {geometry.block_runs}, {geometry.host}"


def pools(flat: Tensor, shapes: Iterable[tuple[int, int, str]]) -> dict[str, Side]:
    """Return pools over flat bytes by their names, each from the first byte on.

    Args:
        flat: the bytes.
        shapes: bytes per run, runs per block, and order of each pool.
    """
    found = {}
    for run_nbytes, block_runs, host in shapes:
        geometry = Geometry("push", host, run_nbytes, block_runs, block_runs)
        blocks = flat.numel() // (run_nbytes * block_runs)
        found[pool_name(geometry)] = side_of(flat, geometry, blocks, paged=host == "contiguous")
    return found


@dataclass
class Findings:
    """Times between two processes, beside the rows.

    Attributes:
        transport: the transport that they have agreed on.
        meet: seconds of each meeting.
        block_nbytes: bytes of the block whose time is measured.
        seen: seconds from each submit until the other process has seen the note.
        submit: seconds of the CPU for each submit.
    """

    transport: str = ""
    meet: list[float] = field(default_factory=list)
    block_nbytes: int = 0
    seen: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the findings for JSON: medians, and the longest of ten or a hundred."""
        return {**vars(self), "seen": _spread(self.seen), "submit": _spread(self.submit)}


def _spread(taken: Sequence[float]) -> dict[str, float | int | None]:
    shares = {"median": 0.5, "tenth": 0.9, "hundredth": 0.99}
    found = {name: float(np.quantile(taken, share)) if taken else None for name, share in shares.items()}
    return {**found, "samples": len(taken)}


class Remote:
    """The other process's pool, and a copy of it here, with the same bytes.

    Args:
        peer: the other process.
        mirror: the copy, as flat bytes.
        line: the GPU that copies between both; or the CPU.
    """

    def __init__(self, peer: Peer, mirror: Tensor, line: Line) -> None:
        self.peer, self._mirror, self._line = peer, mirror, line
        regions = [region for layout in peer.layouts.values() for region in layout.regions]
        self._address = min(region.address for region in regions)

    def write(self) -> None:
        """Copy the mirror to the other process."""
        self._copy(self._address, self._mirror.data_ptr())

    def read(self) -> None:
        """Copy the other process's bytes to the mirror."""
        self._copy(self._mirror.data_ptr(), self._address)

    def _copy(self, dst: int, src: int) -> None:
        nbytes, line = self._mirror.numel(), self._line
        if line.name == "cpu":
            ctypes.memmove(dst, src, nbytes)
            return
        import torch

        torch.cuda.synchronize(self._mirror.device)
        with line.device.current():
            line.device.copy(dst, src, nbytes, line.handle)
        line.stream.synchronize()

    def plan(self, moved: Work, peer: Peer) -> Plan:
        """Plan the same blocks, with a pool of a peer in the place of the mirror."""
        pool, near = peer.layouts[pool_name(moved.geometry)], _cache(moved)
        src, dst = (pool, near) if moved.geometry.direction in TO_CACHE else (near, pool)
        return compile(src, dst).plan(moved.src_ids, moved.dst_ids)

    def way(self, name: str, peer: Peer, way: str, moved: Work) -> Baseline:
        """Return a way that moves blocks from or to a peer, with the comparison of every byte."""
        begin: Begin = partial(peer.submit, self.plan(moved, peer), way=way)

        def move() -> None:
            self.write()
            begin().synchronize()
            if moved.geometry.direction not in TO_CACHE:
                self.read()

        return Baseline(begin, lambda: moved.verify(name, move))


def other_process(
    stack: ExitStack, device: str, buffers: Buffers, geometries: Sequence[Geometry], line: Line, findings: Findings
) -> tuple[dict[str, Maker], list[Missing]]:
    """Start a process that owns a pool, and time meetings and one block.

    Args:
        stack: ends the process.
        device: memory of the pool, as the other process sees it.
        buffers: the memory here; its pool becomes a mirror of the other one.
        geometries: the transfers.
        line: the GPU that copies the mirror.
        findings: the times.

    Returns:
        The ways to move blocks between the processes by name, and those that are missing.

    Raises:
        KVPlanError: the processes cannot meet, or a note is lost.
    """
    from kvplan.agents.agent import Agent, NixlAgent

    runs = geometries[0].block_runs
    single = Geometry(
        "push", "contiguous", min(BLOCK_RUN_NBYTES, max(one.run_nbytes for one in geometries)), runs, runs
    )
    by_nixl = find_spec("nixl") is not None
    transports = (LOCAL, BY_NIXL) if by_nixl else (LOCAL,)
    other = PoolOwner(device, buffers.host.numel(), [*geometries, single], *transports)
    stack.callback(other.close)
    executor = stack.enter_context(Executor(buffers.device))
    agent = stack.enter_context(Agent("bench", {}, transports=LOCAL, executor=executor))
    for _ in range(MEETINGS):
        start = time.perf_counter()
        peer = agent.meet(other.card())
        findings.meet.append(time.perf_counter() - start)
        agent.forget(peer)
    peer = agent.meet(other.card())
    findings.transport = peer.transport
    remote = Remote(peer, buffers.host, line)
    remote.write()
    _time_notes(remote, other, work(buffers, single), findings)
    makers: dict[str, Maker] = {TWO: partial(remote.way, TWO, peer, "auto")}
    try:
        if not by_nixl:
            raise PathError("NIXL is not installed: pip install nixl")
        caches = {f"{pool_name(one)}, {one.direction}": _cache(work(buffers, one)) for one in geometries}
        far = stack.enter_context(NixlAgent("nixl bench", caches)).meet(other.card(1))
    except (KVPlanError, RuntimeError) as error:
        return makers, [Missing(" and ".join(NIXL.values()), " ".join(str(error).split()))]
    return makers | {name: partial(remote.way, name, far, "direct") for name in NIXL.values()}, []


def _cache(moved: Work) -> KVLayout:
    return (moved.dst if moved.geometry.direction in TO_CACHE else moved.src).layout


def _time_notes(remote: Remote, other: PoolOwner, moved: Work, findings: Findings) -> None:
    """Time one block, again and again: from the submit here until the other process has seen the note."""
    plan, begun = remote.plan(moved, remote.peer), dict[str, int]()
    findings.block_nbytes = plan.nbytes
    other.expect_notes(WARM_NOTES + NOTES)
    for k in range(WARM_NOTES + NOTES):
        start = time.monotonic_ns()
        transfer = remote.peer.submit(plan, note=str(k).encode())
        submitted = time.monotonic_ns()
        transfer.synchronize()
        if k >= WARM_NOTES:
            begun[str(k)] = start
            findings.submit.append((submitted - start) / 1e9)
    seen: Mapping[str, int] = other.arrivals()
    if lost := [note for note in begun if note not in seen]:
        raise KVPlanError(f"of {len(begun)} notes, the other process has not seen {len(lost)}")
    findings.seen += [(seen[note] - start) / 1e9 for note, start in begun.items()]

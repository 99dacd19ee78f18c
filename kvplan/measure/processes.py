"""A second process, which owns memory: this one starts it, asks it, and moves blocks from and to its memory."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.rig import Line, in_a_line
from kvplan.measure.rows import Missing
from kvplan.measure.workload import TO_CACHE, Baseline, Buffers, Geometry, Maker, Tensor, Work, side_of, work
from kvplan.plan.copy_program import compile
from kvplan.plan.plan import Plan

TWO, NIXL = "two processes", "NIXL"  # ways; NIXL reads to pull, and writes to push
LOCAL, BY_NIXL = ("cuda_ipc", "shm"), ("nixl",)
END_SECONDS = 30.0
MEETINGS, NOTES, WARM_NOTES = 5, 200, 20
BLOCK_RUN_NBYTES = 8 << 10  # of the block whose time is measured
PATIENCE = 60.0  # seconds after which no further note is awaited


class OtherProcess:
    """A process of kvplan that this one starts, asks and ends.

    Args:
        role: what it does: a function of an exit stack, of its end of a pipe, and of ``args``. It sends what it offers,
            and then an answer to each question, until the pipe is closed.
        args: further arguments of it.

    Attributes:
        offered: what it offers.

    Raises:
        KVPlanError: the process refuses, and why.
        TransferError: the process has ended.
    """

    def __init__(self, role: Callable[..., None], *args: Any) -> None:
        spawn = get_context("spawn")
        self._pipe, far = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(far, role, *args), daemon=True)
        self._process.start()
        far.close()
        self.offered = self.answer()

    def ask(self, question: Any) -> Any:
        """Send a question, and return its answer."""
        self._pipe.send(question)
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise TransferError("the other process has ended; its error is above") from None
        if isinstance(answer, KVPlanError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(END_SECONDS)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection[Any, Any], role: Callable[..., None], *args: Any) -> None:
    """Be the other process. What libraries print to standard output, as UCX does, goes to its error."""
    os.dup2(2, 1)
    with ExitStack() as stack:
        try:
            role(stack, pipe, *args)
        except KVPlanError as error:
            pipe.send(error)
        except EOFError:
            return


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
        super().__init__(own_pool, device, nbytes, list(geometries), transports, slots)

    def card(self, agent: int = 0) -> bytes:
        """Return the card of an agent."""
        return bytes(self.offered[agent])

    def expect_notes(self, count: int) -> None:
        """Let the process poll its notes, until it has seen a number of them; :meth:`answer` returns them, by the times
        in nanoseconds at which it saw them."""
        self._pipe.send(count)


def pool_name(geometry: Geometry) -> str:
    """Return the name of a transfer's pool on the card of the other process.

    >>> pool_name(Geometry("push", "scattered", 8192, 320, 160))
    '8192 x 160, scattered'
    """
    return f"{geometry.run_nbytes} x {geometry.block_runs}, {geometry.host}"


def pools(flat: Tensor, geometries: Iterable[Geometry]) -> dict[str, KVLayout]:
    """Return layouts of pools over flat bytes by their names, each from the first byte on."""
    nbytes = flat.numel()
    return {pool_name(one): side_of(flat, one, nbytes // (one.run_nbytes * one.block_runs),
                                    paged=one.host == "contiguous").layout for one in geometries}  # fmt: skip


def _spread(taken: Sequence[float]) -> dict[str, float]:
    shares = {"median": 0.5, "tenth": 0.9, "hundredth": 0.99}
    return {name: float(np.quantile(taken, share)) for name, share in shares.items()} | {"samples": len(taken)}


class Remote:
    """The other process's pool, and a copy of it here, with the same bytes.

    Args:
        peer: the other process.
        mirror: the copy, as flat bytes.
        line: the GPU that copies between both; or the CPU.
    """

    def __init__(self, peer: Any, mirror: Tensor, line: Line) -> None:
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
        line.start(nbytes, partial(line.device.copy, dst, src, nbytes, line.handle)).synchronize()

    def plan(self, moved: Work, peer: Any) -> Plan:
        """Plan the same blocks, with a pool of a peer in the place of the mirror."""
        pool, near = peer.layouts[pool_name(moved.geometry)], _cache(moved)
        src, dst = (pool, near) if moved.geometry.direction in TO_CACHE else (near, pool)
        return compile(src, dst).plan(moved.src_ids, moved.dst_ids)

    def way(self, name: str, peer: Any, way: str, moved: Work) -> Baseline:
        """Return a way that moves blocks from or to a peer, with the comparison of every byte."""
        begin = partial(peer.submit, self.plan(moved, peer), way=way)

        def move() -> None:
            self.write()
            begin().synchronize()
            if moved.geometry.direction not in TO_CACHE:
                self.read()

        return Baseline(begin, lambda: moved.verify(name, move))


def _cache(moved: Work) -> KVLayout:
    return (moved.dst if moved.geometry.direction in TO_CACHE else moved.src).layout


def other_process(
    stack: ExitStack, device: str, buffers: Buffers, geometries: Sequence[Geometry], line: Line
) -> tuple[dict[str, Maker], dict[str, Any], list[Missing]]:
    """Start a process that owns a pool, and time meetings and one block.

    Args:
        stack: ends the process.
        device: memory of the pool, as the other process sees it.
        buffers: the memory here; its pool becomes a mirror of the other one.
        geometries: the transfers.
        line: the GPU that copies the mirror.

    Returns:
        The ways to move blocks between the processes by name; ``transport``, on which they have agreed, seconds of each
        meeting (``meet``), and of :func:`_notes`; and the ways that are missing.

    Raises:
        KVPlanError: the processes cannot meet, or a note is lost.
    """
    from kvplan.agents.agent import Agent

    runs, run_nbytes = geometries[0].block_runs, max(one.run_nbytes for one in geometries)
    single = Geometry("push", "contiguous", min(BLOCK_RUN_NBYTES, run_nbytes), runs, runs)
    other = PoolOwner(device, buffers.host.numel(), [*geometries, single], LOCAL, BY_NIXL)
    stack.callback(other.close)
    executor = stack.enter_context(Executor(buffers.device))
    agent = stack.enter_context(Agent("bench", {}, transports=LOCAL, executor=executor))
    meet = []
    for _ in range(MEETINGS):
        start = time.perf_counter()
        peer = agent.meet(other.card())
        meet.append(time.perf_counter() - start)
        agent.forget(peer)
    peer = agent.meet(other.card())
    remote = Remote(peer, buffers.host, line)
    remote.write()
    times = {"transport": peer.transport, "meet": meet, **_notes(remote, other, work(buffers, single))}
    makers: dict[str, Maker] = {TWO: partial(remote.way, TWO, peer, "auto")}
    try:
        caches = {f"{pool_name(one)}, {one.direction}": _cache(work(buffers, one)) for one in geometries}
        with redirect_stdout(sys.stderr):  # NIXL would write its log between the words of an answer
            by_nixl = stack.enter_context(Agent("nixl bench", caches, transports=BY_NIXL)).meet(other.card(1))
    except (KVPlanError, RuntimeError) as error:
        return makers, times, [Missing(NIXL, in_a_line(error))]
    return makers | {NIXL: partial(remote.way, NIXL, by_nixl, "direct")}, times, []


def _notes(remote: Remote, other: PoolOwner, moved: Work) -> dict[str, Any]:
    """Time one block, again and again: seconds until the other process has ``seen`` the note, and to ``submit``."""
    plan, times = remote.plan(moved, remote.peer), list[tuple[int, int]]()
    other.expect_notes(WARM_NOTES + NOTES)
    for k in range(WARM_NOTES + NOTES):
        start = time.monotonic_ns()
        transfer = remote.peer.submit(plan, note=str(k).encode())
        times.append((start, time.monotonic_ns()))
        transfer.synchronize()
    arrived = other.answer()
    if len(arrived) < len(times):
        raise KVPlanError(f"of {len(times)} notes, the other process has seen {len(arrived)}")
    seen = [(arrived[str(k)] - start) / 1e9 for k, (start, _) in enumerate(times)]
    submit = [(submitted - start) / 1e9 for start, submitted in times]
    return {"block_nbytes": plan.nbytes, "seen": _spread(seen[WARM_NOTES:]), "submit": _spread(submit[WARM_NOTES:])}


# The role of the other process.


def own_pool(
    stack: ExitStack, pipe: Connection[Any, Any], device: str, nbytes: int, geometries: Sequence[Geometry],
    transports: Sequence[Sequence[str]], slots: tuple[int, int] | None,
) -> None:  # fmt: skip
    """Own a pool, offer it by agents, meet whose card comes, and tell when notes arrive."""
    import torch

    from kvplan.agents.agent import Agent
    from kvplan.memory.allocate import allocate

    if device == "cpu":
        like = KVLayout.from_tensors("block dim", torch.empty(1, nbytes, dtype=torch.uint8))
        flat = allocate("block dim", like=like, num_blocks=1, shared=True).tensors[0]
    else:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    layouts = pools(flat, geometries)
    agents = [stack.enter_context(Agent("pool", layouts, transports=some, slots=slots)) for some in transports]
    pipe.send([agent.card() for agent in agents])
    while True:
        question = pipe.recv()
        if isinstance(question, bytes):
            pipe.send(agents[0].meet(question).name)
        else:
            pipe.send(dict(_arrivals(agents[0], question)))


def _arrivals(agent: Any, count: int) -> Iterator[tuple[str, int]]:
    """Yield each note with the time in nanoseconds at which it was seen; all processes of a machine share the clock."""
    until = time.monotonic() + PATIENCE
    while count and time.monotonic() < until:
        for _, note in agent.notes():
            yield note.decode(), time.monotonic_ns()
            count -= 1

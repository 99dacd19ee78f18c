"""The bench of two processes: GB/s beside one process and other ways, the time of one block, and of a meeting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from kvplan.base.numbers import rounded
from kvplan.cost.policy import PEER_ROUTES, Policy
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure import baselines, ceilings
from kvplan.measure.baselines import BATCH, COPY, MEMCPY, Baseline, one_line, proven, timed_rows
from kvplan.measure.flights import Begin, Line
from kvplan.measure.peers import peer_baselines
from kvplan.measure.peers.peer_baselines import MOST_COPIES
from kvplan.measure.processes.pool_layouts import LAYERS_NAME, PoolSpec, name_of
from kvplan.measure.processes.pool_owner import PoolOwner
from kvplan.measure.processes.process_cases import NIXL, ONE, TWO, Remote, by_nixl, one_process, two_processes
from kvplan.measure.rows import Ceilings, Missing, Row, named
from kvplan.measure.timing import Progress, silent
from kvplan.measure.workload import TO_CACHE, Buffers, Geometry, Work, work

KIB, MIB = 1 << 10, 1 << 20
SIZES = (2 * KIB, 8 * KIB, 64 * KIB, MIB)
BLOCK_RUNS = 160  # 80 layers with K and V
NBYTES = 320 * MIB
# Between host pools. The ways take turns on three buffers of this size, which together are far larger than a CPU's
# cache. Otherwise a way would be faster for the bytes that the one before it has left in the cache.
HOST_NBYTES = 512 * MIB
SAMPLES, CASE_SECONDS, WARM_UPS = 15, 0.05, 1
MEETINGS, NOTES, WARM_NOTES = 5, 200, 20
BLOCK_RUN_NBYTES = 8 * KIB  # the block whose time is measured: 1.3 MB


@dataclass(frozen=True)
class ProcessBench:
    """The measurements of a bench of two processes.

    Attributes:
        device: ``"cuda:N"``, the GPU of this process; or ``"cpu"``.
        peer: the GPU of the other process, by this process's number; it may be the same. ``"cpu"`` on the CPU.
        sizes: bytes per run.
        directions: of ``"push"`` and ``"pull"``, as this process sees them.
        hosts: orders of the pool; see :class:`kvplan.measure.workload.Geometry`.
        seconds: time in seconds after which no measurement begins.
        most_nbytes: bytes per transfer.
        block_runs: runs per block.
        layers, layer_nbytes: separate allocations with which a meeting is timed.

    Raises:
        KVPlanError: an attribute is wrong.

    >>> ProcessBench("cuda:0", "cpu")
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: device 'cuda:0', peer 'cpu'; expected two GPUs, or the CPU twice
    """

    device: str = "cuda:0"
    peer: str = "cuda:1"
    sizes: tuple[int, ...] = SIZES
    directions: tuple[str, ...] = PEER_ROUTES
    hosts: tuple[str, ...] = ("contiguous",)
    seconds: float = 120.0
    most_nbytes: int = NBYTES
    block_runs: int = BLOCK_RUNS
    layers: int = 80
    layer_nbytes: int = 12 * MIB

    def __post_init__(self) -> None:
        if ("cpu" in (self.device, self.peer)) and self.device != self.peer:
            raise KVPlanError(f"device {self.device!r}, peer {self.peer!r}; expected two GPUs, or the CPU twice")
        for one in self.directions:
            if one not in PEER_ROUTES:
                raise KVPlanError(f"unknown direction {one!r}; expected one of {', '.join(PEER_ROUTES)}")
        for geometry in self.geometries():
            geometry.check()
            if 2 * geometry.run_nbytes * self.block_runs > self.most_nbytes:
                raise KVPlanError(
                    f"two blocks of {self.block_runs} runs of {rounded(geometry.run_nbytes)} do not fit into "
                    f"{rounded(self.most_nbytes)}; give more memory"
                )

    def geometries(self) -> list[Geometry]:
        """Return the transfers, each of as many whole blocks as the memory holds, and the driver's batch call takes."""
        block, most = self.block_runs, self.most_nbytes if self.device == "cpu" else MOST_COPIES
        runs = {size: max(min(self.most_nbytes // max(size, 1), most) // max(block, 1), 1) * block
                for size in self.sizes}  # fmt: skip
        return [Geometry(direction, host, size, runs[size], block)
                for size in self.sizes for host in self.hosts for direction in self.directions]  # fmt: skip

    def one_block(self) -> Geometry:
        """Return the transfer of one block, whose time is measured."""
        return Geometry("push", "contiguous", min(BLOCK_RUN_NBYTES, max(self.sizes)), self.block_runs, self.block_runs)

    def document(self) -> dict[str, Any]:
        """Return the attributes for JSON, with the keys that other benches have."""
        return {
            "device": self.device, "sizes": list(self.sizes), "counts": [0], "directions": list(self.directions),
            "hosts": list(self.hosts), "paths": [], "beside": [], "seconds": self.seconds,
            "most_nbytes": self.most_nbytes, "peer": "process", "beside_on": [],
        }  # fmt: skip


@dataclass
class Findings:
    """Times that are measured beside the rows.

    Attributes:
        transport: the transport that the two processes have agreed on.
        meet: seconds of each meeting, with one allocation.
        meet_layers: seconds of each meeting, with an allocation for each layer.
        block_nbytes: bytes of the block whose time is measured.
        seen: seconds from each submit until the other process has seen the note.
        submit: seconds of the CPU for each submit.
    """

    transport: str = ""
    meet: list[float] = field(default_factory=list)
    meet_layers: list[float] = field(default_factory=list)
    block_nbytes: int = 0
    seen: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the findings for JSON: medians, and the longest of ten or a hundred."""
        return {
            "transport": self.transport,
            "meet": self.meet, "meet_layers": self.meet_layers, "block_nbytes": self.block_nbytes,
            "seen": _spread(self.seen), "submit": _spread(self.submit),
        }  # fmt: skip


class ProcessRun:
    """One run. :meth:`rows` measures, and sets the attributes.

    Args:
        bench: the measurements to make.
        progress: function that is called with the share that is done, and the step that begins.
        clock: function that returns seconds; tests replace it.

    Attributes:
        ceilings: GB/s of one large copy within one process; None before the first row.
        findings: the times of a meeting and of one block.
        missing: measurements that were not made, and why.
    """

    def __init__(
        self, bench: ProcessBench, progress: Progress | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.bench, self.clock = bench, clock
        self.progress = progress or silent
        self.ceilings: Ceilings | None = None
        self.findings = Findings()
        self.missing: list[Missing] = []

    def rows(self) -> Iterator[Row]:
        """Measure, and yield a row for each transfer and way.

        Raises:
            KVPlanError: a device does not exist, or the processes cannot meet.
        """
        from kvplan.agents.agent import Agent

        bench, until = self.bench, self.clock() + self.bench.seconds
        geometries = bench.geometries()
        on_cpu, nixl = bench.device == "cpu", find_spec("nixl") is not None
        self.progress(0.0, "memory")
        spec = PoolSpec.of(bench.peer, bench.most_nbytes, [*geometries, bench.one_block()], nixl=nixl)
        with ExitStack() as stack:
            other = stack.enter_context(PoolOwner(
                spec._replace(layers=bench.layers, layer_nbytes=bench.layer_nbytes)))  # fmt: skip
            pair = None if on_cpu else stack.enter_context(peer_baselines.Pair(bench.device, bench.peer))
            buffers = Buffers(bench.most_nbytes, bench.device, peer=None if on_cpu else bench.peer)
            self.ceilings = ceilings.measured(buffers, PEER_ROUTES)
            executor = stack.enter_context(Executor(bench.device, Policy()))
            agent = stack.enter_context(Agent("bench", {}, transports=("cuda_ipc", "shm"), executor=executor))
            self.progress(0.05, "meetings")
            self._meet(agent, other)
            peer = agent.meet(other.card)
            self.findings.transport = peer.transport
            remote = Remote(peer, buffers.host, None if on_cpu else Line(bench.device))
            remote.write()
            works = [work(buffers, geometry) for geometry in geometries]
            read_write = self._nixl(stack, other, works) if nixl else None
            if not nixl:
                self.missing.append(Missing(" and ".join(NIXL.values()), "NIXL is not installed: pip install nixl"))
            self.progress(0.1, "one block")
            self._one_block(remote, other, work(buffers, bench.one_block()))
            for k, moved in enumerate(works):
                self.progress(0.2 + 0.8 * k / len(works), named(moved.geometry))
                if self.clock() > until:
                    self.missing.append(Missing(named(moved.geometry), f"{bench.seconds:g} seconds were over"))
                    continue
                ways = self._ways(remote, executor, pair, moved)
                if read_write is not None:
                    met, caches = read_write
                    name = NIXL[moved.geometry.direction]
                    ways[name] = partial(by_nixl, met, caches[_cache_name(moved)], remote, moved)
                yield from self._measure(moved, ways)
        self.progress(1.0, "done")

    def _meet(self, agent: Any, other: PoolOwner) -> None:
        for card, found in ((other.card, self.findings.meet), (other.layers, self.findings.meet_layers)):
            for _ in range(MEETINGS):
                start = time.perf_counter()
                peer = agent.meet(card)
                found.append(time.perf_counter() - start)
                assert peer.layouts.keys() - {LAYERS_NAME} or len(peer.layouts) == 1  # it is used
                agent.forget(peer)

    def _one_block(self, remote: Remote, other: PoolOwner, moved: Work) -> None:
        """Time one block, again and again: from the submit here until the other process has seen the note."""
        plan, peer, begun = remote.plan(moved, remote.peer.layouts), remote.peer, dict[str, int]()
        self.findings.block_nbytes = plan.nbytes
        other.expect_notes(WARM_NOTES + NOTES)
        for k in range(WARM_NOTES + NOTES):
            note = str(k)
            start = time.monotonic_ns()
            transfer = peer.submit(plan, note=note.encode())
            submitted = time.monotonic_ns()
            transfer.synchronize()
            begun[note] = start
            if k >= WARM_NOTES:
                self.findings.submit.append((submitted - start) / 1e9)
        seen = other.arrivals()
        if len(seen) != len(begun):
            raise KVPlanError(f"of {len(begun)} notes, the other process has seen {len(seen)}")
        self.findings.seen += [(seen[note] - start) / 1e9 for note, start in begun.items() if int(note) >= WARM_NOTES]

    def _nixl(self, stack: ExitStack, other: PoolOwner, works: list[Work]) -> Any:
        from kvplan.nixl import NixlAgent

        caches = {_cache_name(moved): (moved.dst if moved.geometry.direction in TO_CACHE else moved.src).layout
                  for moved in works}  # fmt: skip
        try:
            if other.nixl is None:
                raise PathError(other.nixl_refused)
            agent = stack.enter_context(NixlAgent("bench", caches))
            return agent.meet(other.nixl), caches
        except (KVPlanError, RuntimeError) as error:
            self.missing.append(Missing(" and ".join(NIXL.values()), one_line(error)))
            return None

    def _ways(
        self, remote: Remote, executor: Executor, pair: peer_baselines.Pair | None, moved: Work
    ) -> dict[str, Callable[[], Baseline]]:
        found: dict[str, Callable[[], Baseline]] = {
            TWO: partial(two_processes, remote, moved),
            ONE: partial(one_process, executor, moved),
        }
        if pair is None:
            return found | {MEMCPY: partial(baselines.makers("cpu")[MEMCPY], moved)}
        others = peer_baselines.makers(pair)
        return found | {name: partial(others[name], moved) for name in (COPY, BATCH)}

    def _measure(self, moved: Work, ways: dict[str, Callable[[], Baseline]]) -> Iterator[Row]:
        """Check and time all ways of one transfer, alternating between them."""
        assert self.ceilings is not None  # measured first
        begun: dict[str, tuple[Row, Begin]] = {}
        for name, make in ways.items():
            row = Row(**moved.geometry._asdict(), path=name)
            made = proven(make, row, named(moved.geometry), self.missing)
            if isinstance(made, Row):
                yield made
            elif made is not None:
                begun[name] = row, made.begin
        yield from timed_rows(begun, self.ceilings, seconds=CASE_SECONDS, most=SAMPLES, warm_ups=WARM_UPS)


def _cache_name(moved: Work) -> str:
    return f"{name_of(moved.geometry)}, {'pull' if moved.geometry.direction in TO_CACHE else 'push'}"


def _spread(taken: list[float]) -> dict[str, float | int | None]:
    if not taken:
        return {"median": None, "tenth": None, "hundredth": None, "samples": 0}
    ordered = sorted(taken)
    return {
        "median": statistics.median(ordered),
        "tenth": ordered[(len(ordered) * 9) // 10],
        "hundredth": ordered[min((len(ordered) * 99) // 100, len(ordered) - 1)],
        "samples": len(ordered),
    }

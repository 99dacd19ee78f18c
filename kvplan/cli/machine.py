"""``kvplan backends``, ``doctor``, ``calibrate`` and ``bench``: what is installed here, what slows it, its speed."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from kvplan.base.numbers import duration, exact, rate, rounded
from kvplan.base.values import quoted
from kvplan.cli.arguments import amounts, check_file, gpu, names, write_file
from kvplan.cli.screen import Answer, Part, Table, Tell, json_text, note, plain, table, words
from kvplan.cost.profile import TERMS, DeviceProfile, route_paths
from kvplan.cost.wire import WireProfile
from kvplan.errors import KVPlanError, TransferError
from kvplan.measure.doctor import Facts, Finding, examine, gather
from kvplan.measure.rows import IDLE, SUFFIXES, Ceilings, Missing, Row, grouped, pooled, where
from kvplan.measure.wire_calibration import Posted

NAMED = 4  # most measurements that are named if several were left out for one reason
PROCESS = "process"


class Adapter(Part):
    """A module of kvplan.backends.

    Attributes:
        name: of the module.
        summary: the first line of its docstring.
        signature: of its describe.
    """

    name: str
    summary: str
    signature: str


class BackendsAnswer(Answer):
    """The engines whose tensors kvplan can describe.

    Attributes:
        backends: in order of their names.
    """

    schema = "backends/2"
    backends: tuple[Adapter, ...]

    def blocks(self) -> Iterable[Any]:
        """Return a row for each adapter."""
        return [Table([(each.name, f"{each.summary}\n{each.signature}") for each in self.backends])]


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan backends\n  kvplan backends --json"


def run_backends(args: argparse.Namespace, tell: Tell) -> BackendsAnswer:
    """Return every adapter."""
    names = (module.name for module in pkgutil.iter_modules(import_module("kvplan.backends").__path__))
    return BackendsAnswer(tuple(adapter(name) for name in sorted(names) if name[0] != "_"))


def adapter(name: str) -> Adapter:
    """Return the summary and signature of one adapter."""
    module = import_module(f"kvplan.backends.{name}")
    signature = inspect.signature(module.describe)
    names = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return Adapter(name, (module.__doc__ or "").partition("\n")[0], f"describe{inspect.Signature(names)}")


class DoctorAnswer(Answer):
    """What slows transfers on this machine.

    Attributes:
        device: the GPU.
        healthy: whether there is no problem.
        findings: of each check.
        facts: by which they were judged; null if not known.
    """

    schema = "doctor/3"
    device: str
    healthy: bool
    findings: tuple[Finding, ...]
    facts: Facts

    def blocks(self) -> Iterable[Any]:
        """Return a row for each finding, with its advice below."""
        return [Table([row for one in self.findings for row in (
            (one.state, one.name, one.what), *([("", "", one.advice)] if one.advice else []))])]  # fmt: skip


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = """examples:
  kvplan doctor --device cuda:1
  numactl --cpunodebind=1 --membind=1 kvplan doctor    as an engine would run"""
    parser.add_argument("--device", default="cuda:0", type=gpu, help="the GPU to look at (default: cuda:0)")


def run_doctor(args: argparse.Namespace, tell: Tell) -> DoctorAnswer:
    """Examine the machine; a finding if there is a problem."""
    return doctor(args.device, busy=True)


def doctor(device: str = "cuda:0", *, busy: bool) -> DoctorAnswer:
    """Return the findings on this machine; ``busy`` wakes the link of an idle GPU."""
    found = gather(device, busy=busy)
    findings = tuple(examine(found))
    healthy = all(one.state != "problem" for one in findings)
    return DoctorAnswer(found.device, healthy, findings, found, status=int(not healthy))


class CalibrateAnswer(Answer):
    """The profile of a GPU, or of a GPU and its peer.

    Attributes:
        path: file of the profile.
        seconds: that it took.
        profile: what was measured.
    """

    schema = "calibrate/2"
    path: str
    seconds: float
    profile: DeviceProfile

    def blocks(self) -> Iterable[Any]:
        """Return the GPU with its ceilings, and the costs of each path."""
        profile, ceilings = self.profile, self.profile.ceilings
        named = ((name, getattr(profile, name)) for name in ("gpu", "peer", "driver", "link", "how", "made", "note"))
        yield Table([*((name, value) for name, value in named if value), *(
            (route, f"{rate(ceilings[route])} by the copy engine, {ceilings[f'sm_{route}']:.1f} by SMs")
            for route in profile.costs)])  # fmt: skip
        costs = []
        for route, path in [(way, path) for way in profile.costs for path in route_paths(way)]:
            cost, (*_, piece, byte) = profile.costs[route][path], TERMS[path]
            speed = f"{1 / cost.seconds[byte]:,.1f}" if cost.seconds[byte] else "-"
            both = (profile.beside[kind][route][path] for kind in ("decode", "prefill"))
            beside = (f"{_us(each)} x{each.slower:.2f}" for each in both)
            costs.append((f"{route}, {path}", _us(cost), f"{cost.seconds[piece]:,.0f} ns", speed, *beside))
        yield Table(costs, ("", "fixed", "a piece", "GB/s", "beside decode", "beside prefill"), range(1, 6))


class WireAnswer(Answer):
    """The profile of NIXL between two processes.

    Attributes:
        path: file of the profile.
        seconds: that it took.
        profile: what was measured.
        measured: the lists that were posted.
    """

    schema = "calibrate-wire/2"
    path: str
    seconds: float
    profile: WireProfile
    measured: tuple[Posted, ...]

    def blocks(self) -> Iterable[Any]:
        """Return the costs of the wire, and the lists."""
        costs = {
            name: duration(one) if isinstance(one, float) else words(name, one)
            for name, one in vars(self.profile).items()
        }
        return [Table([*costs.items()]), table(self.measured, "operation, descriptors, each: nbytes, seconds")]


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = """examples:
  kvplan calibrate --device cuda:0 --peer cuda:1 --output my-pair.json
  UCX_TLS=tcp kvplan calibrate --wire"""
    parser.add_argument("--device", type=gpu, metavar="cuda:N", help="the GPU (default cuda:0)")
    which = parser.add_mutually_exclusive_group()
    peer = "measure copies from the GPU to this peer and back; the GPU makes them"
    which.add_argument("--peer", type=gpu, metavar="cuda:M", help=peer)
    wire = "measure NIXL between two processes: host memory, or that of --device"
    which.add_argument("--wire", action="store_true", help=wire)
    where = "file of the profile (default: in the user's cache folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=where)


def run_calibrate(args: argparse.Namespace, tell: Tell) -> CalibrateAnswer | WireAnswer:
    """Measure, and save the profile.

    Raises:
        KVPlanError: torch is missing, the file cannot be written, or the measurement failed.
    """
    path, measure = _wire(args) if args.wire else _gpu(args)
    path = args.output or path
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_file("--output", path)  # before seconds of measuring
    start = time.perf_counter()
    profile, *more = measure(tell)
    write_file("--output", path, profile.to_json().encode())
    seconds = time.perf_counter() - start
    if not args.json:
        note(f"saved {path} ({exact(path.stat().st_size)}) after {seconds:.1f} seconds")
    answer: Any = WireAnswer if args.wire else CalibrateAnswer
    return answer(str(path), round(seconds, 2), profile, *more)  # type: ignore[no-any-return]


def _wire(args: argparse.Namespace) -> tuple[Path, Callable[[Tell], Any]]:
    """Return the usual file of a wire's profile, and what measures it."""
    from kvplan.cost.wire import wire_name, wire_path
    from kvplan.measure.wire_calibration import calibrate_wire

    device = args.device or "cpu"
    path = wire_path(wire_name("UCX"), "DRAM" if device == "cpu" else "VRAM")
    return path, lambda tell: calibrate_wire(device, tell=tell)


def _gpu(args: argparse.Namespace) -> tuple[Path, Callable[[Tell], Any]]:
    """Return the usual file of a GPU's profile, or of a GPU and its peer, and what measures it."""
    from kvplan.cost.store import path_of
    from kvplan.cuda.machine import machine
    from kvplan.measure import calibrate

    device, peer = args.device or "cuda:0", args.peer
    if peer == device:
        raise KVPlanError(f"--peer is {peer}, the GPU itself; a pair has two GPUs, as in --device cuda:0 --peer cuda:1")
    machines = [machine(_ordinal(each)) for each in (device, peer) if each]
    need_torch("cpu")  # for buffers, and for the compute that runs at the same time
    if not peer:
        return path_of(machines[0]), lambda tell: [calibrate.calibrate(machines[0], device, tell)]
    link, (here, there) = _link(device, peer), machines
    return path_of(here, there, link), lambda tell: [calibrate.calibrate_pair(
        here, device, peer, tell, peer_name=there.gpu, nvlinks=link.nvlinks)]  # fmt: skip


def _ordinal(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def _link(device: str, peer: str) -> Any:
    """Return the link between two GPUs.

    Raises:
        KVPlanError: the device cannot reach the peer's memory.
    """
    from kvplan.cuda.peers import link_between

    link = link_between(_ordinal(device), _ordinal(peer))
    if not link.reachable:
        raise KVPlanError(link.refused)
    return link


def need_torch(device: str) -> None:
    """Check that torch is installed and can use the device.

    Raises:
        KVPlanError: torch is missing, or can use no GPU.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise KVPlanError("measuring needs torch; pip install torch triton") from None
    if device != "cpu" and not torch.cuda.is_available():
        raise KVPlanError(f"torch {torch.__version__} reaches no GPU; install a build with CUDA, or give --device cpu")


def _us(cost: Any) -> str:
    return f"{cost.wall['fixed'] / 1e3:.0f} us"


class BenchAnswer(Answer):
    """Paths and baselines, timed.

    Attributes:
        device: cuda:0, or cpu.
        name: of the GPU, or CPU.
        seconds: that it took.
        asked: the measurements that were asked for.
        ceilings: of one large copy; null if nothing was measured.
        broken: number of broken rows.
        rows: the figures.
        missing: measurements that were not made.
        peer: the GPU that holds the pool, or process if another process does; absent for host memory.
        peer_name: of the peer.
        link: to the peer, in words; absent within one GPU.
        peer_device: the other process's device, by this process's number; only with peer process.
        processes: times of a meeting and of one block, in seconds; only with peer process.
    """

    schema = "bench/2"
    device: str
    name: str
    seconds: float
    asked: dict[str, Any]
    ceilings: Ceilings | None
    broken: int
    rows: tuple[Row, ...]
    missing: tuple[Missing, ...]
    peer: str | None = None
    peer_name: str | None = None
    link: str | None = None
    peer_device: str | None = None
    processes: dict[str, Any] | None = None

    def blocks(self) -> Iterable[Any]:
        """Return tables of each direction and host layout, alone and beside compute, and what has no figure."""
        return [*self._tables()] or ["nothing was measured"]

    def _tables(self) -> Iterator[Any]:
        rows, ceilings = self.rows, self.ceilings
        if ceilings is not None:
            far = f" and {self.peer_name} ({self.peer_device or self.peer}), {self.link}" if self.link else ""
            far += "; the pool is another process's" if self.processes else ""
            rates = ", ".join(f"{route} {rate(gbps)}" for route, gbps in ceilings.measured.items())
            each = rates if ceilings.hard else rate(next(iter(ceilings.measured.values()), 0.0))
            yield Table([(f"{self.name} ({self.device}){far}; {ceilings.what}: {each}",)])
        for direction, host in sorted({(row.direction, row.host) for row in rows if row.beside == IDLE}):
            yield f"{direction}, {pooled(direction, host)}: GB/s"
            yield _alone([row for row in rows if (row.direction, row.host, row.beside) == (direction, host, IDLE)])
        for kind, on in sorted({(row.beside, row.beside_on) for row in rows if row.beside != IDLE}):
            some = [row for row in rows if (row.beside, row.beside_on) == (kind, on)]
            moved = f"{some[0].runs:,} runs of {rounded(some[0].run_nbytes)}, {pooled(some[0].direction, some[0].host)}"
            yield f"beside {where(kind, on)}: GB/s, and how much slower compute gets;\n{moved}"
            lines = [(row.label, row.direction, _figure(row), _slower(row)) for row in some]
            yield Table(lines, ("path, programs", "way", "GB/s", "compute"), (2, 3))
        broken = [f"broken: {row.label}, {row.direction}, {row.host}, {rounded(row.run_nbytes)} x {row.runs:,}"
                  f"{'' if row.beside == IDLE else f', beside {where(row.beside, row.beside_on)}'}: {row.broken}"
                  for row in rows if row.broken]  # fmt: skip
        left = []
        for why, what in grouped(self.missing).items():
            more = f" and {len(what) - NAMED} more" * (len(what) > NAMED)
            left.append(f"not measured: {why}: {'; '.join(what[:NAMED])}{more}")
        yield from (Table([(line,) for line in lines]) for lines in (broken, left) if lines)
        if self.processes:
            yield _process_words(self.processes)


def _alone(rows: Sequence[Row]) -> Table:
    """Return a row for each transfer, and a column for each path."""
    paths = list(dict.fromkeys(row.path for row in rows))
    by_case = {(row.run_nbytes, row.runs, row.path): row for row in rows}
    lines = [(rounded(size), f"{runs:,}", *(_figure(by_case.get((size, runs, path))) for path in paths))
             for size, runs in sorted({case[:2] for case in by_case})]  # fmt: skip
    titles = (re.sub(r"[_ ]|(?<=cuMem)|(?<=cpy)", "\n", path) for path in paths)
    return Table(lines, ("run", "runs", *titles), range(len(paths) + 2))


def _figure(row: Row | None) -> str:
    if row is None or row.broken or row.gbps is None:
        return "-" if row is None else "broken"
    return f"{row.gbps:.1f}" if row.gbps >= 9.995 else f"{row.gbps:.2f}"


def _slower(row: Row) -> str:
    return "-" if row.broken or row.slowdown is None else f"x{row.slowdown:.2f}"


def _process_words(times: dict[str, Any]) -> str:
    """Return the times of a meeting and of one block in words."""
    block = f"a block of {rounded(times['block_nbytes'])}"
    medians = (f"{block} until {name}: {duration(times[name]['median'])}"
               for name in ("seen", "submit") if times[name]["samples"])  # fmt: skip
    meeting = f"transport {times['transport']}; a meeting: {duration(median(times['meet']))}"
    return "\n".join([meeting, *medians])


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kvplan.measure.bench import paths_of

    parser.epilog = """examples:
  kvplan bench --quick --device cpu
  kvplan bench --beside decode --seconds 120 --plot bench.svg
  kvplan bench --peer process --output processes.json"""
    paths = f"by default all: {', '.join(paths_of('cuda:0'))}; on the CPU {', '.join(paths_of('cpu'))}"
    for name, kind, metavar, text in (
        ("device", _device, "cuda:N|cpu", "default: cuda:0; cpu where there is no GPU"),
        ("peer", _peer_name, "cuda:M|process", "the pool is memory of this GPU, or of another process "
         "(process:cuda:M names its GPU); default: host memory"),
        ("sizes", amounts, "BYTES,...", "of a run (default 512,2K,8K,32K,128K,1M; with --peer 512,2K,8K,64K,1M)"),
        ("counts", partial(amounts, least=0), "RUNS,...", "of a transfer; 0: as many as --memory holds (default "
         "16,1024,65536; with --peer 160,0)"),
        ("directions", names, "WAY,...", "default: load,store; with --peer push,pull, or device within one GPU"),
        ("hosts", names, "LAYOUT,...", "default: contiguous,scattered"),
        ("paths", names, "PATH,...", paths),
        ("beside", names, "KIND,...", "compute that runs at the same time (default: decode,prefill on a GPU), or none"),
        ("beside-on", names, "GPU,...", "GPU of that compute: device, which runs the transfers, or peer "
         "(default: both)"),
        ("seconds", float, "S", "start no measurement after this time (default 60)"),
        ("memory", amounts, "BYTES", "of the largest transfer (default 256M; with --peer 1G)"),
        ("output", Path, "FILE", "also write the JSON object to a file"),
        ("plot", _plot, "FILE", "draw the bandwidth, .png or .svg; figures beside compute become FILE-frontier, where "
         "FILE has no suffix"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    quick = "two sizes, one count, decode: a few seconds; other options override it"
    parser.add_argument("--quick", action="store_true", help=quick)


def run_bench(args: argparse.Namespace, tell: Tell) -> BenchAnswer:
    """Measure, save and draw; a finding if bytes did not arrive or a figure is broken."""
    from kvplan.measure.bench import Run

    plots = {}
    if args.plot:
        plots = {"bandwidth": args.plot, "frontier": args.plot.with_stem(f"{args.plot.stem}-frontier")}
    for option, path in (("--output", args.output), *(("--plot", path) for path in plots.values())):
        if path is not None:
            check_file(option, path)
    if plots:
        try:
            from kvplan.measure import plots as drawn
        except ModuleNotFoundError:
            raise KVPlanError("plots need matplotlib; pip install matplotlib") from None
    other = (args.peer or "").startswith(PROCESS)
    device, name = _found(args.device or (None if other else args.peer and "cuda:0"))
    bench = _asked(args, device, other=other)
    peer = _peer(bench.device, bench.pool)
    need_torch(device)
    start = time.perf_counter()
    measured = Run(bench)
    measured.progress = tell
    rows = tuple(measured.rows())
    if other:
        peer |= {"peer": PROCESS, "peer_device": bench.pool, "processes": measured.processes}
    broken = sum(bool(row.broken) for row in rows)
    answer = BenchAnswer(
        bench.device, name, round(time.perf_counter() - start, 2), plain(bench), measured.ceilings, broken, rows,
        tuple(measured.missing), **peer, status=int(bool(broken)),
    )  # fmt: skip
    if args.output:
        write_file("--output", args.output, f"{json_text(answer)}\n".encode())
        note(f"saved {args.output}")
    for kind, path in plots.items():
        if kind == "bandwidth" or any(row.beside != IDLE for row in rows):
            try:
                drawn.save(getattr(drawn, kind)(rows, measured.ceilings), path)
                note(f"drawn {path}")
            except KVPlanError as error:
                note(f"kvplan: {path} was not drawn: {error}")
    return answer


def _found(device: str | None) -> tuple[str, str]:
    """Return the device and its name. Without a GPU and --device it is the CPU, and a note says so."""
    from kvplan.cuda.machine import machine

    if device == "cpu":
        return device, "CPU"
    try:
        return device or "cuda:0", machine(_ordinal(device or "cuda:0")).gpu
    except TransferError as error:
        if device:
            raise
        note(f"kvplan: {error}; measuring the CPU")
        return "cpu", "CPU"


def _peer(device: str, peer: str | None) -> dict[str, Any]:
    """Return the peer, its name and the link to it, of a bench between GPUs.

    Raises:
        KVPlanError: the device cannot reach the peer's memory.
    """
    if peer is None or peer == "cpu":
        return {}
    named = {"peer": peer, "peer_name": _found(peer)[1]}
    return named if peer == device else named | {"link": _link(device, peer).words}


def _asked(args: argparse.Namespace, device: str, *, other: bool) -> Any:
    """Return the bench that the arguments ask for."""
    from kvplan.cuda.driver import driver
    from kvplan.measure import bench as measure

    named = ("sizes", "counts", "directions", "hosts", "paths", "beside", "seconds", "beside_on")
    options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    options |= {} if args.memory is None else {"most_nbytes": args.memory[0]}
    peer = args.peer
    if other:
        for name in ("counts", "paths", "beside", "beside_on", "plot"):
            if getattr(args, name) is not None:
                raise KVPlanError(f"--{name.replace('_', '-')} does not go with --peer {peer}")
        if ":" not in peer and device != "cpu":  # a GPU beside the device, if there is one
            gpus = [f"cuda:{k}" for k in range(driver().devices())]
            peer = f"{PROCESS}:{next((gpu for gpu in gpus if gpu != device), device)}"
    if options.get("beside") == ("none",):
        options["beside"] = ()
    if args.plot and not args.counts and not args.peer:
        options["equal_nbytes"] = measure.EQUAL_NBYTES  # a plot compares transfers of equal bytes
    return measure.Bench(device, **(measure.usual(device, peer, quick=args.quick) | options))


def _device(text: str) -> str:
    return text if text == "cpu" else gpu(text)


def _peer_name(text: str) -> str:
    """Read a peer: a GPU, another process, or another process with its GPU.

    >>> _peer_name("cuda:1"), _peer_name("process"), _peer_name("process:cuda:1")
    ('cuda:1', 'process', 'process:cuda:1')
    """
    head, _, rest = text.partition(":")
    return gpu(text) if head != PROCESS else f"{PROCESS}:{gpu(rest)}" if rest else PROCESS


def _plot(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{quoted(text)} does not end in {' or '.join(SUFFIXES)}")
    return path

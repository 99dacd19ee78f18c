"""``kvplan bench``: time every path on this machine, and other programs that move the same blocks."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kvplan.base.numbers import duration, rate, rounded
from kvplan.base.values import quoted
from kvplan.cli.answer import Answer, Number, Table, json_text, plain, table
from kvplan.cli.arguments import amounts, gpu, names
from kvplan.cli.machine import need_torch
from kvplan.cli.screen import Tell, check_file, note, write_file
from kvplan.errors import KVPlanError, TransferError
from kvplan.measure.rows import IDLE, SUFFIXES, Ceilings, Missing, Row, grouped, pooled, where

EXAMPLES = """examples:
  kvplan bench --quick --device cpu
  kvplan bench --beside decode --seconds 120 --plot bench.svg
  kvplan bench --peer process --output processes.json"""

NAMED = 4  # most measurements that are named if several were left out for one reason
PROCESS = "process"


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
            apart = ", ".join(f"{route} {rate(gbps)}" for route, gbps in ceilings.measured.items())
            each = apart if ceilings.hard else rate(next(iter(ceilings.measured.values()), 0.0))
            yield Table([(f"{self.name} ({self.device}){far}; {ceilings.what}: {each}",)])
        for direction, host in sorted({(row.direction, row.host) for row in rows if row.beside == IDLE}):
            yield f"{direction}, {pooled(direction, host)}: GB/s"
            yield _alone([row for row in rows if (row.direction, row.host, row.beside) == (direction, host, IDLE)])
        for kind, on in sorted({(row.beside, row.beside_on) for row in rows if row.beside != IDLE}):
            some = [row for row in rows if (row.beside, row.beside_on) == (kind, on)]
            moved = f"{some[0].runs:,} runs of {rounded(some[0].run_nbytes)}, {pooled(some[0].direction, some[0].host)}"
            yield f"beside {where(kind, on)}: GB/s, and how much slower compute gets;\n{moved}"
            yield table(some, {"path, programs": "label", "way": "direction", "GB/s": _figure, "compute": _slower})
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
        return Number("-" if row is None else "broken")
    return Number(f"{row.gbps:.1f}" if row.gbps >= 9.995 else f"{row.gbps:.2f}")


def _slower(row: Row) -> str:
    return Number("-" if row.broken or row.slowdown is None else f"x{row.slowdown:.2f}")


def _process_words(times: dict[str, Any]) -> str:
    """Return the times of a meeting and of one block in words."""
    meeting = duration(median(times["meet"]))
    block = f"a block of {rounded(times['block_nbytes'])}"
    medians = (
        f"{block} until {name}: {duration(times[name]['median'])}"
        for name in ("seen", "submit")
        if times[name]["samples"]
    )
    return "\n".join([f"transport {times['transport']}; a meeting: {meeting}", *medians])


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kvplan.measure.bench import paths_of

    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--device", type=_device, metavar="cuda:N|cpu", help="default: cuda:0; cpu where there is no GPU")
    peer = "the pool is memory of this GPU, or of another process (process:cuda:M names its GPU); default: host memory"
    add("--peer", type=_peer_name, metavar="cuda:M|process", help=peer)
    sizes = "of a run (default 512,2K,8K,32K,128K,1M; with --peer 512,2K,8K,64K,1M)"
    add("--sizes", type=amounts, metavar="BYTES,...", help=sizes)
    runs = "of a transfer; 0: as many as --memory holds (default 16,1024,65536; with --peer 160,0)"
    add("--counts", type=partial(amounts, least=0), metavar="RUNS,...", help=runs)
    ways = "default: load,store; with --peer push,pull, or device within one GPU"
    add("--directions", type=names, metavar="WAY,...", help=ways)
    add("--hosts", type=names, metavar="LAYOUT,...", help="default: contiguous,scattered")
    paths = f"by default all: {', '.join(paths_of('cuda:0'))}; on the CPU {', '.join(paths_of('cpu'))}"
    add("--paths", type=names, metavar="PATH,...", help=paths)
    beside = "compute that runs at the same time (default: decode,prefill on a GPU), or none"
    add("--beside", type=names, metavar="KIND,...", help=beside)
    on = "GPU of that compute: device, which runs the transfers, or peer (default: both)"
    add("--beside-on", type=names, metavar="GPU,...", help=on)
    add("--seconds", type=float, metavar="S", help="start no measurement after this time (default 60)")
    add("--memory", type=amounts, metavar="BYTES", help="of the largest transfer (default 256M; with --peer 1G)")
    add("--quick", action="store_true", help="two sizes, one count, decode: a few seconds; other options override it")
    add("--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    plot = "draw the bandwidth, .png or .svg; figures beside compute become FILE-frontier, where FILE has no suffix"
    add("--plot", type=_plot, metavar="FILE", help=plot)


def run_bench(args: argparse.Namespace, tell: Tell) -> BenchAnswer:
    """Measure, save and draw; a finding if bytes did not arrive or a figure is broken."""
    from kvplan.measure.bench import Run

    plots = {"bandwidth": args.plot, "frontier": args.plot and _frontier_of(args.plot)}
    for option, path in (("--output", args.output), *(("--plot", path) for path in plots.values())):
        if path is not None:
            check_file(option, str(path))
    drawn = _plots() if args.plot else None
    other = (args.peer or "").startswith(PROCESS)
    device, name = _found(args.device or (None if other else args.peer and "cuda:0"))
    bench = _asked(args, device, other=other)
    peer = _peer(bench.device, bench.pool)
    need_torch(device)
    start = time.perf_counter()
    measured = Run(bench)
    measured.progress = tell
    rows = tuple(measured.rows())
    more: dict[str, Any] = {}
    if other:
        more = {"peer": PROCESS, "peer_device": bench.pool, "processes": measured.processes}
    answer = BenchAnswer(
        bench.device,
        name,
        round(time.perf_counter() - start, 2),
        plain(bench),
        measured.ceilings,
        sum(bool(row.broken) for row in rows),
        rows,
        tuple(measured.missing),
        **(peer | more),
        status=int(any(row.broken for row in rows)),
    )
    if args.output:
        write_file("--output", str(args.output), f"{json_text(answer)}\n".encode())
        note(f"saved {args.output}")
    for kind, path in plots.items():
        if drawn is not None and (kind == "bandwidth" or any(row.beside != IDLE for row in rows)):
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
        return device or "cuda:0", machine(int((device or "cuda:0").removeprefix("cuda:"))).gpu
    except TransferError as error:
        if device:
            raise
        note(f"kvplan: {error}; measuring the CPU")
        return "cpu", "CPU"


def _peer(device: str, peer: str | None) -> dict[str, str]:
    """Return the peer, its name and the link to it, of a bench between GPUs.

    Raises:
        KVPlanError: the device cannot reach the peer's memory.
    """
    from kvplan.cuda.peers import link_between

    if peer in (None, "cpu"):
        return {}
    found = {"peer": str(peer), "peer_name": _found(peer)[1]}
    if peer == device:
        return found
    link = link_between(*(int(str(one).removeprefix("cuda:")) for one in (device, peer)))
    if not link.reachable:
        raise KVPlanError(link.refused)
    return found | {"link": link.words}


def _asked(args: argparse.Namespace, device: str, *, other: bool) -> Any:
    """Return the bench that the arguments ask for."""
    from kvplan.measure import bench as measure

    named = ("sizes", "counts", "directions", "hosts", "paths", "beside", "seconds", "beside_on")
    told = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    told |= {} if args.memory is None else {"most_nbytes": args.memory[0]}
    peer = args.peer
    if other:
        for name in ("counts", "paths", "beside", "beside_on", "plot"):
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise KVPlanError(f"--{option} does not go with --peer {quoted(args.peer).strip(chr(39))}")
        peer = peer if ":" in peer or device == "cpu" else f"{PROCESS}:{_other_gpu(device)}"
    if told.get("beside") == ("none",):
        told["beside"] = ()
    if args.plot and not args.counts and not args.peer:
        told["equal_nbytes"] = measure.EQUAL_NBYTES  # a plot compares transfers of equal bytes
    return measure.Bench(device, **(measure.usual(device, peer, quick=args.quick) | told))


def _other_gpu(device: str) -> str:
    """Return a GPU that is not the device, or the device if there is no other."""
    from kvplan.cuda.driver import driver

    gpus = [] if device == "cpu" else [f"cuda:{k}" for k in range(driver().devices())]
    return next((other for other in gpus if other != device), device)


def _plots() -> Any:
    """Import the module that draws.

    Raises:
        KVPlanError: matplotlib is not installed.
    """
    try:
        from kvplan.measure import plots
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise KVPlanError("plots need matplotlib; pip install matplotlib") from None
    return plots


def _frontier_of(path: Path) -> Path:
    """Return the file of the plot beside compute.

    >>> _frontier_of(Path("made/bench.svg"))
    PosixPath('made/bench-frontier.svg')
    """
    return path.with_name(f"{path.stem}-frontier{path.suffix}")


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

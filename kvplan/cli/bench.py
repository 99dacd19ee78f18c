"""``kvplan bench``: time every path on this machine, and other programs that move the same blocks."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import rate, rounded
from kvplan.base.quoting import quoted
from kvplan.cli.answers.process_findings import in_words, is_process, peer_name, process_bench
from kvplan.cli.arguments.values import gpu
from kvplan.cli.screen.documents import check_file, json_text, print_json, write_file
from kvplan.cli.screen.printing import note, number_table, progress, show
from kvplan.errors import KVPlanError, TransferError
from kvplan.measure.rows import IDLE, SUFFIXES, Ceilings, Missing, Row, grouped, pooled, where

if TYPE_CHECKING:
    from kvplan.measure.grid import Bench

EXAMPLES = """examples:
  kvplan bench
  kvplan bench --quick --device cpu
  kvplan bench --paths "staged,kernel,torch indexing" --sizes 4K,28K \\
      --plot bench.svg
  kvplan bench --beside decode --seconds 120 --output bench.json
  kvplan bench --peer cuda:1 --plot peers.svg
  kvplan bench --peer process --output processes.json"""

# The lines of a column's title, each at most as long as "broken": so eight columns fit into 80 characters.
TITLES = {
    "copy_engine": "copy_\nengine",
    "copy_engine_2d": "copy_\nengine\n_2d",
    "cuMemcpyBatchAsync": "cuMem\ncpy\nBatch",
    "cuMemcpyAsync a run": "cuMem\ncpy\na run",
    "torch indexing": "torch\nindex-\ning",
    "numpy memcpy": "numpy\nmemcpy",
    "host on 1 thread": "host\non 1\nthread",
    "one large copy": "one\nlarge\ncopy",
    "NCCL send/recv": "NCCL\nsend/\nrecv",
}
UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
NAMED = 4  # most measurements that are named if several were left out for one reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kvplan.measure.grid import paths_of

    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--device", type=_device, metavar="cuda:N|cpu", help="default: cuda:0; cpu where there is no GPU")
    add("--peer", type=peer_name, metavar="cuda:M|process", help="the pool is memory of this GPU, which may be "
        "--device itself, or of another process (process:cuda:M names its GPU); default: host memory")  # fmt: skip
    add("--sizes", type=_sizes, metavar="BYTES,...",
        help="of a run (default 512,2K,8K,32K,128K,1M; with --peer 512,2K,8K,64K,1M)")  # fmt: skip
    add("--counts", type=_counts, metavar="RUNS,...",
        help="of a transfer; 0: as many as --memory holds (default 16,1024,65536; with --peer 160,0)")  # fmt: skip
    add("--directions", type=_names, metavar="WAY,...",
        help="default: load,store; with --peer push,pull, or device within one GPU")  # fmt: skip
    add("--hosts", type=_names, metavar="LAYOUT,...", help="default: contiguous,scattered")
    add("--paths", type=_names, metavar="PATH,...",
        help=f"by default all: {', '.join(paths_of('cuda:0'))}; on the CPU {', '.join(paths_of('cpu'))}")  # fmt: skip
    add("--beside", type=_names, metavar="KIND,...",
        help="compute that runs at the same time (default: decode,prefill on a GPU), or none")  # fmt: skip
    add("--beside-on", type=_names, metavar="GPU,...",
        help="GPU of that compute: device, which runs the transfers, or peer (default: both)")  # fmt: skip
    add("--seconds", type=float, metavar="S", help="start no measurement after this time (default 60)")
    add("--memory", type=_size, metavar="BYTES", help="of the largest transfer (default 256M; with --peer 1G)")
    add("--quick", action="store_true", help="two sizes, one count, decode: a few seconds; other options override it")
    add("--json", action="store_true", help="one JSON object (schema kvplan.bench)")
    add("--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    add("--plot", type=_plot, metavar="FILE", help="draw the bandwidth, .png or .svg; figures beside compute become "
        "FILE-frontier, where FILE has no suffix")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print, save and draw. Return 1 if bytes did not arrive or a figure is broken."""
    from kvplan.measure.bench import Run
    from kvplan.measure.processes.process_bench import ProcessBench, ProcessRun

    for option, path in (
        ("--output", args.output),
        ("--plot", args.plot),
        ("--plot", args.plot and _frontier_of(args.plot)),
    ):
        if path is not None:
            check_file(option, str(path))
    if args.plot:
        _plots()
    other = is_process(args.peer)
    device, name = _found(args.device or (None if other else args.peer and "cuda:0"))
    bench = process_bench(args, device, _visible) if other else _asked(args, device)
    peer = _peer(bench.device, bench.peer)
    _need_torch(device)
    start = time.perf_counter()
    measured: Any = ProcessRun(bench) if isinstance(bench, ProcessBench) else Run(bench)
    with progress() as measured.progress:
        rows = list(measured.rows())
    found = {
        "device": bench.device,
        "name": name,
        **peer,
        "seconds": round(time.perf_counter() - start, 2),
        "asked": bench.document() if isinstance(bench, ProcessBench) else asdict(bench),
        "ceilings": measured.ceilings.document() if measured.ceilings else None,
        "broken": sum(bool(row.broken) for row in rows),
        "rows": [row.document() for row in rows],
        "missing": [asdict(one) for one in measured.missing],
    }
    if other:
        found |= {"peer": "process", "peer_device": bench.peer, "processes": measured.findings.document()}
    if args.json:
        print_json("bench", found)
    else:
        far = f" and {peer['peer_name']} ({bench.peer}), {peer['link']}" if "link" in peer else ""
        far += "; the pool is another process's" if other else ""
        shown = screen(f"{name} ({device}){far}", measured.ceilings, rows, measured.missing)
        show(*shown, *([in_words(measured.findings)] if other else []))
    if args.output:
        write_file("--output", str(args.output), f"{json_text('bench', found)}\n".encode())
        note(f"saved {args.output}")
    if args.plot:
        _draw(args.plot, rows, measured.ceilings)
    return int(any(row.broken for row in rows))


def screen(name: str, ceilings: Ceilings | None, rows: Sequence[Row], missing: Sequence[Missing]) -> list[Any]:
    """Return the results as tables and sentences of at most 80 columns."""
    shown: list[Any] = []
    if ceilings is not None:
        apart = [f"{route} {rate(gbps)}" for route, gbps in ceilings.measured.items()]
        same = rate(next(iter(ceilings.measured.values()), 0.0))
        shown.append(f"{name}; {ceilings.what}: {', '.join(apart) if ceilings.hard else same}")
    panels = list(dict.fromkeys((row.direction, row.host) for row in rows if row.beside == IDLE))
    for direction, host in sorted(panels):
        some = [row for row in rows if (row.direction, row.host, row.beside) == (direction, host, IDLE)]
        shown += [f"{direction}, {pooled(direction, host)}: GB/s", _alone(some)]
    for kind, on in sorted({(row.beside, row.beside_on) for row in rows if row.beside != IDLE}):
        some = [row for row in rows if (row.beside, row.beside_on) == (kind, on)]
        first = some[0]
        moved = f"{first.runs:,} runs of {rounded(first.run_nbytes)}, {pooled(first.direction, first.host)}"
        shown += [f"beside {where(kind, on)}: GB/s, and how much slower compute gets;\n{moved}", _beside(some)]
    broken = [f"broken: {row.label}, {row.direction}, {row.host}, {rounded(row.run_nbytes)} x {row.runs:,}"
              f"{'' if row.beside == IDLE else f', beside {where(row.beside, row.beside_on)}'}: {row.broken}"
              for row in rows if row.broken]  # fmt: skip
    left = [f"not measured: {why}: {_some(what)}" for why, what in grouped(missing).items()]
    shown += ["\n".join(lines) for lines in (broken, left) if lines]
    return shown or ["nothing was measured"]


def _some(what: Sequence[str]) -> str:
    more = f" and {len(what) - NAMED} more" if len(what) > NAMED else ""
    return "; ".join(what[:NAMED]) + more


def _ordered(rows: Iterable[Row]) -> list[str]:
    """Return the paths in order: kvplan's paths, then the baselines."""
    from kvplan.measure import baselines
    from kvplan.measure.grid import paths_of

    pairs = (("cuda:0", None), ("cuda:0", "cuda:1"), ("cpu", None))
    known = dict.fromkeys(path for pair in pairs for path in paths_of(*pair))
    others = {path for pair in pairs for path in baselines.names(*pair)}
    order = [path for path in known if path not in others] + [path for path in known if path in others]
    there = {row.path for row in rows}
    return [path for path in order if path in there] + sorted(there - set(order))


def _alone(rows: Sequence[Row]) -> Any:
    paths = _ordered(rows)
    by_case = {(row.run_nbytes, row.runs, row.path): row for row in rows}
    cases = sorted({(row.run_nbytes, row.runs) for row in rows})
    lines = [(rounded(size), f"{runs:,}", *(_figure(by_case.get((size, runs, path))) for path in paths))
             for size, runs in cases]  # fmt: skip
    return number_table(("run", "runs", *(TITLES.get(path, path) for path in paths)), lines,
                        right=range(len(paths) + 2))  # fmt: skip


def _beside(rows: Sequence[Row]) -> Any:
    ways = sorted({row.direction for row in rows})
    by_case = {(row.label, row.direction): row for row in rows}
    # Rows of one path keep the order in which they were measured: by programs.
    labels = [label for path in _ordered(rows) for label in dict.fromkeys(
        row.label for row in rows if row.path == path)]  # fmt: skip
    lines = []
    for label in labels:
        found = [by_case.get((label, way)) for way in ways]
        lines.append((label, *(cell for row in found for cell in (_figure(row), _slower(row)))))
    header = ("path, programs", *(title for way in ways for title in (way, "compute")))
    return number_table(header, lines, right=range(1, 2 * len(ways) + 1))


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.broken or row.gbps is None:
        return "broken"
    return f"{row.gbps:.1f}" if row.gbps >= 9.995 else f"{row.gbps:.2f}"


def _slower(row: Row | None) -> str:
    return "-" if row is None or row.broken or row.slowdown is None else f"x{row.slowdown:.2f}"


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


def _visible() -> int:
    from kvplan.cuda.driver import driver

    return driver().devices()


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


def _need_torch(device: str) -> None:
    """Check that torch is installed and can use the device.

    Raises:
        KVPlanError: torch is missing, or can use no GPU.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise KVPlanError("a bench needs torch; pip install torch") from None
    if device != "cpu" and not torch.cuda.is_available():
        raise KVPlanError(f"torch {torch.__version__} reaches no GPU; install a build with CUDA, or give --device cpu")


def _asked(args: argparse.Namespace, device: str) -> Bench:
    from kvplan.measure.grid import EQUAL_NBYTES, Bench, usual

    told: dict[str, Any] = {name: value for name, value in (
        ("sizes", args.sizes), ("counts", args.counts), ("directions", args.directions), ("hosts", args.hosts),
        ("paths", args.paths), ("beside", args.beside), ("seconds", args.seconds), ("most_nbytes", args.memory),
        ("beside_on", args.beside_on),
    ) if value is not None}  # fmt: skip
    if told.get("beside") == ("none",):
        told["beside"] = ()
    if args.plot and not args.counts and not args.peer:
        told["equal_nbytes"] = EQUAL_NBYTES  # a plot compares transfers of equal bytes
    return Bench(device, **(usual(device, args.peer, quick=args.quick) | told))


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


def _draw(path: Path, rows: Sequence[Row], ceilings: Ceilings | None) -> None:
    plots = _plots()
    made = [("bandwidth", path)]
    if any(row.beside != IDLE for row in rows):
        made.append(("frontier", _frontier_of(path)))
    for name, to in made:
        try:
            figure = getattr(plots, name)(rows, ceilings)
        except KVPlanError as error:
            note(f"kvplan: {to} was not drawn: {error}")
            continue
        plots.save(figure, to)
        note(f"drawn {to}")


def _frontier_of(path: Path) -> Path:
    """Return the file of the plot beside compute.

    >>> _frontier_of(Path("made/bench.svg"))
    PosixPath('made/bench-frontier.svg')
    """
    return path.with_name(f"{path.stem}-frontier{path.suffix}")


def _device(text: str) -> str:
    return text if text == "cpu" else gpu(text)


def _size(text: str) -> int:
    """Read a number of bytes.

    >>> _size("512"), _size("28K"), _size("1MiB")
    (512, 28672, 1048576)
    """
    found = re.fullmatch(r"(\d{1,15})([KMG]?)(?:iB)?", text.strip(), re.ASCII | re.IGNORECASE)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a size; give bytes, as in 512, 4K or 1M")
    return int(found[1]) << UNITS[found[2].upper()]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(one) for one in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d{1,12}\s*(,\s*\d{1,12}\s*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a list of runs; give numbers, as in 16,1024")
    return tuple(int(one) for one in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.strip() for one in text.split(",") if one.strip()))


def _plot(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{quoted(text)} does not end in {' or '.join(SUFFIXES)}")
    return path

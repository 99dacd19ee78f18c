"""``python -m benchmarks.wires``: packed transfers between two processes by NIXL, over each wire of this machine.

Each wire gets two processes of its own, since UCX reads its variables once. All bytes are compared before anything is
timed. ``--beside decode`` measures what compute of both processes loses instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.record import Row, cpu_model, document, machine, save, table
from benchmarks.wires.beside import ROW as BESIDE_ROW
from benchmarks.wires.limits import BESIDE, FULL, SMOKE, WIRES, Scale, Wire, add_slots, slots_of
from benchmarks.wires.wire_rows import beside_rows, rows_of
from kvplan.cli.arguments import positive

SECONDS = 200.0  # for one wire
RESULTS = Path(__file__).parents[1] / "results" / "wires"


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wires", description=__doc__)
    parser.add_argument(
        "wires", nargs="*", metavar="wire", help=f"of {', '.join(WIRES)}; by default those that are here"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny problems: shows that it runs, and nothing else")
    parser.add_argument("--rows", type=int, nargs="+", metavar="BYTES", help="bytes of the rows")
    parser.add_argument("--repeats", type=int, help="samples of each way")
    parser.add_argument("--mib", type=positive, metavar="MIB", help="most MiB of a transfer; by default the wire's own")
    parser.add_argument(
        "--packed-only", action="store_true", help="leave the transfers with a descriptor for each row out, and limits"
    )
    parser.add_argument(
        "--beside",
        choices=list(BESIDE),
        help="measure compute and transfers at once, and nothing else: what decode loses in both processes",
    )
    add_slots(parser)
    parser.add_argument(
        "--output", type=Path, help="JSON file; by default in benchmarks/results/wires, none for --smoke"
    )
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.wires) - set(WIRES)):
        parser.error(f"no wire {', '.join(unknown)}; wires are {', '.join(WIRES)}")
    return chosen


def devices() -> tuple[str, ...]:
    """Return the GPUs of both processes: two if there are two, else one, or none."""
    if find_spec("torch") is None:
        return ()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{min(k, count - 1)}" for k in (0, 1)) if count else ()


def measured(wire: Wire, scale: Scale, places: Sequence[str], what: str = "all") -> dict[str, Any]:
    """Measure one wire in two new processes, which end with this call.

    Args:
        wire: the wire.
        scale: sizes.
        places: devices of both processes.
        what: one of :data:`benchmarks.wires.near.WHAT`.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    from benchmarks.wires.far import serve
    from benchmarks.wires.near import measure

    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    answer, told = spawn.Pipe(duplex=False)
    other = spawn.Process(target=serve, args=(wire, scale, places[1], far, what), daemon=True)
    this = spawn.Process(target=measure, args=(wire, scale, places[0], near, told, what), daemon=True)
    try:
        other.start()
        this.start()
        told.close()
        until = time.monotonic() + SECONDS
        while not answer.poll(0.1):
            if not this.is_alive() and not answer.poll(0):
                raise RuntimeError(f"the measuring process ended with {this.exitcode}")
            if time.monotonic() > until:
                raise RuntimeError(f"it took over {SECONDS:.0f} seconds")
        kind, found = answer.recv()
        if kind != "found":
            raise RuntimeError(found)
        this.join(5)
        other.join(5)
        made: dict[str, Any] = found
        return made
    finally:
        for process in (this, other):
            if process.pid is not None:
                process.kill()
                process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not or a wire failed, 2 without NIXL."""
    chosen = arguments_of(arguments)
    if find_spec("nixl") is None:
        print("NIXL is not installed: pip install 'kvplan[nixl]'", file=sys.stderr)
        return 2
    gpus = devices()
    names = chosen.wires or _usual(gpus, beside=chosen.beside)
    if not names:
        print(f"this machine has no GPU for a wire beside {chosen.beside}; name a wire of host memory", file=sys.stderr)
        return 1
    started, rows, failed = machine(), list[Row](), dict[str, str]()
    for name in names:
        wire = WIRES[name]
        try:
            made = rows_for(wire, chosen, gpus if wire.memory == "gpu" else ("cpu", "cpu"))
        except RuntimeError as error:
            failed[name] = str(error)
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        rows += made
        print(table(made), end="\n\n", flush=True)
    slug = f"{_slug(gpus)}-beside-{chosen.beside}" if chosen.beside else _slug(gpus)
    output = chosen.output or (None if chosen.smoke else RESULTS / f"{slug}.json")
    if output is not None and rows:
        made_document = document(rows, scale=_base_scale(chosen), started=started)
        made_document["machine"]["gpus"] = list(gpus)
        made_document["versions"] |= {"nixl": version("nixl")}
        scales = {name: asdict(scale_of(WIRES[name], chosen)) for name in names}
        save(output, made_document | {"scales": scales, "failed": failed})
        print(f"saved {output}")
    return int(bool(failed) or any(row.ok is False for row in rows))


def _usual(gpus: Sequence[str], *, beside: str | None) -> list[str]:
    """Return the wires that are measured by default; beside compute, a wire as fast as a network card."""
    here = [name for name, wire in WIRES.items() if wire.memory == "host" or gpus]
    return [name for name in here if WIRES[name].paced or not beside]


def rows_for(wire: Wire, chosen: argparse.Namespace, places: Sequence[str]) -> list[Row]:
    """Measure one wire as the user has chosen, and return its rows; raise RuntimeError if it failed."""
    if not places:
        raise RuntimeError("this machine has no GPU that torch can use")
    scale = scale_of(wire, chosen)
    if chosen.beside:
        return beside_rows(wire, measured(wire, scale, places, chosen.beside))
    if wire.paced or chosen.packed_only:  # a descriptor each would not be paced
        return rows_of(wire, measured(wire, scale, places, "packed"))
    posted = measured(wire, scale, places, "NIXL")["rows"]
    return rows_of(wire, measured(wire, scale, places, "all") | {"NIXL as it comes": posted})


def scale_of(wire: Wire, chosen: argparse.Namespace) -> Scale:
    """Return how large the run of a wire is."""
    scale = _base_scale(chosen) if chosen.smoke else _base_scale(chosen).on(wire, chosen.mib)
    return replace(scale, rows=(BESIDE_ROW,)) if chosen.beside else scale


def _base_scale(chosen: argparse.Namespace) -> Scale:
    changed = {"rows": chosen.rows and tuple(chosen.rows), "repeats": chosen.repeats, "slots": slots_of(chosen)}
    return replace(SMOKE if chosen.smoke else FULL, **{name: value for name, value in changed.items() if value})


def _slug(gpus: Sequence[str]) -> str:
    name = cpu_model()
    if gpus:
        import torch

        name = torch.cuda.get_device_name(0) + (" one gpu" if len(set(gpus)) == 1 else "")
    return "-".join("".join(mark if mark.isalnum() else " " for mark in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.wires``: packed transfers between two processes by NIXL, over each wire of this machine.

Each wire gets two processes of its own, since UCX reads its variables once. All bytes are compared before anything is
timed. ``--beside decode`` measures what compute of both processes loses instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.groups import conclude, parse, parser_for, run
from benchmarks.record import Row, cpu_model, default_path, document, machine, save
from benchmarks.wires.beside import ROW as BESIDE_ROW
from benchmarks.wires.rows import beside_rows, rows_of
from benchmarks.wires.sizes import DECODE, FULL, MIB, NIXL, NO_THREAD, PACKED, SMOKE, WIRES, Scale, Wire
from kvplan.cli.arguments import positive

SECONDS = 200.0  # for one wire


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse."""
    parser = parser_for("benchmarks.wires", __doc__, WIRES)
    parser.add_argument("--rows", type=int, nargs="+", metavar="BYTES", help="bytes of the rows")
    parser.add_argument("--repeats", type=int, help="samples of each way")
    parser.add_argument("--mib", type=positive, metavar="MIB", help="most MiB of a transfer; by default the wire's own")
    parser.add_argument("--packed-only", action="store_true", help="leave out a descriptor for each row")
    parser.add_argument("--beside", choices=(DECODE,), help="measure compute and transfers at once, and nothing else")
    parser.add_argument(
        "--slots", type=positive, nargs=2, metavar=("NUMBER", "MIB"), help="slots of a ring, their size"
    )
    return parse(parser, arguments, WIRES)


def devices() -> tuple[str, ...]:
    """Return the GPUs of both processes: two if there are two, else one, or none."""
    if find_spec("torch") is None:
        return ()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{min(k, count - 1)}" for k in (0, 1)) if count else ()


def measured(wire: Wire, scale: Scale, places: Sequence[str], what: str = PACKED) -> dict[str, Any]:
    """Measure one wire in two new processes, which end with this call.

    Args:
        wire: the wire.
        scale: sizes.
        places: devices of both processes.
        what: what they measure.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    from benchmarks.wires.far import serve
    from benchmarks.wires.near import measure

    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    answers, reply = spawn.Pipe(duplex=False)
    other = spawn.Process(target=serve, args=(wire, scale, places[1], far, what), daemon=True)
    this = spawn.Process(target=measure, args=(wire, scale, places[0], near, reply, what), daemon=True)
    try:
        other.start()
        this.start()
        reply.close()
        until = time.monotonic() + SECONDS
        while not answers.poll(0.1):
            if not this.is_alive() and not answers.poll(0):
                raise RuntimeError(f"the measuring process ended with {this.exitcode}")
            if time.monotonic() > until:
                raise RuntimeError(f"it took over {SECONDS:.0f} seconds")
        figures, error = answers.recv()
        if error:
            raise RuntimeError(error)
        this.join(5)
        other.join(5)
        return dict(figures)
    finally:
        for process in (this, other):
            if process.pid is not None:
                process.kill()
                process.join()


def rows_for(wire: Wire, chosen: argparse.Namespace, gpus: Sequence[str], _rig: object = None) -> Iterator[Row]:
    """Measure one wire as the user has chosen, and return its rows; raise RuntimeError if it failed."""
    places = gpus if wire.memory == "gpu" else ("cpu", "cpu")
    if not places:
        raise RuntimeError("this machine has no GPU that torch can use")
    scale = scale_for(wire, chosen)
    if chosen.beside:
        return beside_rows(wire, measured(wire, scale, places, chosen.beside))
    packed = measured(wire, scale, places)
    kinds = () if wire.paced or chosen.packed_only else (NIXL, NO_THREAD)  # a descriptor each would not be paced
    return rows_of(wire, packed, {kind: measured(wire, scale, places, kind) for kind in kinds})


def scale_for(wire: Wire, chosen: argparse.Namespace) -> Scale:
    """Return how large the run of a wire is."""
    slots = chosen.slots and (chosen.slots[0], chosen.slots[1] * MIB)
    changed = {"rows": chosen.rows and tuple(chosen.rows), "repeats": chosen.repeats, "slots": slots}
    if chosen.beside:
        changed["rows"] = (BESIDE_ROW,)
    scale = SMOKE if chosen.smoke else FULL.on(wire, chosen.mib)
    return replace(scale, **{name: value for name, value in changed.items() if value})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all wires ran, 1 where one failed, 2 without NIXL."""
    chosen = arguments_of(arguments)
    if find_spec("nixl") is None:
        print("NIXL is not installed: pip install 'kvplan[nixl]'", file=sys.stderr)
        return 2
    gpus = devices()
    here = [name for name, wire in WIRES.items() if wire.memory == "host" or gpus]
    names = chosen.groups or [name for name in here if WIRES[name].paced or not chosen.beside]
    if not names:
        print(f"this machine has no GPU for a wire beside {chosen.beside}; name a wire of host memory", file=sys.stderr)
        return 1
    started = machine() | {"gpus": list(gpus)}
    output = chosen.output or (None if chosen.smoke else _default_path(gpus, chosen.beside))
    scales = {name: asdict(scale_for(WIRES[name], chosen)) for name in names}

    def report(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
        if output is not None:
            save(output, document(rows, started=started, packages=("nixl",), scales=scales, failed=dict(failed)))

    groups = {name: partial(rows_for, WIRES[name], chosen, gpus) for name in names}
    return conclude(run(groups, None, budget=chosen.budget, report=report), output, smoke=chosen.smoke)


def _default_path(gpus: Sequence[str], beside: str | None) -> Any:
    name = cpu_model()
    if gpus:
        import torch

        name = torch.cuda.get_device_name(0) + (" one gpu" if len(set(gpus)) == 1 else "")
    return default_path("wires/packed", name, *(["beside", beside] if beside else []))


if __name__ == "__main__":
    sys.exit(main())

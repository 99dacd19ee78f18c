"""``python -m benchmarks.wires.chosen shm tcp``: whether ``auto`` takes the faster way, direct or packed, by size.

Each wire is run twice, each time by two processes of its own: by the guess that kvplan comes with, and by a profile of
``kvplan calibrate --wire``, which is made first. Both ways of a transfer take turns, after a short rest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kvplan
from benchmarks.record import Row, document, machine, save, table
from benchmarks.wires.far import FAR, NEAR, Side
from benchmarks.wires.limits import FULL, SMOKE, WIRES, Scale

BLOCKS = (1, 2, 4, 8, 16, 64, 256, 1024)
ROWS = (576, 8 << 10, 64 << 10)
REST_SECONDS, SECONDS = 2e-3, 200.0
MOST = 1.1  # of the best way of each transfer, summed over all of them
WAYS = ("direct", "packed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if the limits hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wires.chosen", description=__doc__)
    parser.add_argument("wires", nargs="+", choices=[name for name, wire in WIRES.items() if wire.memory == "host"])
    parser.add_argument("--smoke", action="store_true", help="tiny problems: shows that it runs, and nothing else")
    parser.add_argument("--repeats", type=int, default=7, help="samples of each way")
    parser.add_argument("--output", type=Path, help="JSON file")
    chosen = parser.parse_args(arguments)
    whole = SMOKE if chosen.smoke else FULL
    repeats = 1 if chosen.smoke else chosen.repeats
    scale = Scale(ROWS, whole.nbytes, whole.most_rows, whole.layers, repeats, whole.single)
    started, rows = machine(), list[Row]()
    for name in chosen.wires:
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder, "wire.json")
            _processes(_calibrate, (name, 1.0 if chosen.smoke else 20.0, profile))
            for how, path in (("guess", None), ("calibrated", profile)):
                rows += _rows(name, how, _processes(_near, (name, scale, path), (_far, (name, scale, path))))
                print(table(rows[-1:]), flush=True)
    print(table(rows))
    if chosen.output is not None:
        made = document(rows, scale=scale, started=started)
        made["versions"] |= {"nixl": version("nixl")}
        save(chosen.output, made)
    return int(any(row.ok is False for row in rows) and not chosen.smoke)


def _processes(
    call: Callable[..., None], given: Sequence[Any], beside: tuple[Callable[..., None], Sequence[Any]] | None = None
) -> Any:  # fmt: skip
    """Call a function in a process of its own, beside another one that it has a pipe to; return what it sends."""
    spawn = multiprocessing.get_context("spawn")
    answer, told = spawn.Pipe(duplex=False)
    near, far = spawn.Pipe()
    made = [spawn.Process(target=call, args=(*given, near, told), daemon=True)]
    if beside is not None:
        made.append(spawn.Process(target=beside[0], args=(*beside[1], far), daemon=True))
    try:
        for process in made:
            process.start()
        told.close()
        if not answer.poll(SECONDS):
            raise RuntimeError(f"no answer in {SECONDS:.0f} seconds")
        return answer.recv()
    finally:
        for process in made:
            process.kill()
            process.join()


def _calibrate(name: str, seconds: float, path: Path, pipe: Connection, told: Connection) -> None:
    from kvplan.cost.wires.wire_store import save_wire
    from kvplan.measure.wires.wire_calibration import calibrate_wire

    del pipe
    if WIRES[name].transports:
        os.environ["UCX_TLS"] = WIRES[name].transports
    save_wire(calibrate_wire(seconds=seconds)[0], path)
    told.send(None)


def _side(who: str, order: str, name: str, scale: Scale, path: Path | None) -> Side:
    os.environ.pop("KVPLAN_WIRE", None)
    if path is not None:
        os.environ["KVPLAN_WIRE"] = str(path)
    else:
        os.environ["XDG_CACHE_HOME"] = tempfile.gettempdir() + "/no-profiles"
    return Side(who, order, WIRES[name], scale, "cpu")


def _far(name: str, scale: Scale, path: Path | None, pipe: Connection) -> None:
    side = _side(FAR, "block layer dim", name, scale, path)
    pipe.send(side.agent.card())
    side.agent.meet(pipe.recv())
    pipe.recv()


def _near(name: str, scale: Scale, path: Path | None, pipe: Connection, told: Connection) -> None:
    side = _side(NEAR, "layer block dim", name, scale, path)
    card = pipe.recv()
    pipe.send(side.agent.card())
    peer = side.agent.meet(card)
    found = []
    for row in scale.rows:
        mine, theirs = side.agent.layouts[str(row)], peer.layouts[str(row)]
        programs = {"pull": kvplan.compile(theirs, mine), "push": kvplan.compile(mine, theirs)}
        rng = np.random.default_rng(row)
        for count in (one for one in BLOCKS if one <= scale.blocks(row)):
            for direction, program in programs.items():
                plan = program.plan(*(rng.permutation(scale.blocks(row))[:count] for _ in range(2)))
                taken: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(scale.repeats + 1):
                    for way in WAYS:
                        time.sleep(REST_SECONDS)
                        begun = time.perf_counter()
                        peer.submit(plan, way=way).synchronize()
                        taken[way].append(time.perf_counter() - begun)
                seconds = {way: median(times[1:]) for way, times in taken.items()}
                way = "packed" if "packed: packed takes" in peer.explain(plan) else "direct"
                found.append((row, count * scale.layers, direction, way, seconds))
    told.send(found)


def _rows(name: str, how: str, found: Sequence[tuple[int, int, str, str, dict[str, float]]]) -> list[Row]:
    group = f"{name}, {how}"
    made = [
        Row(group, f"{count:,} rows of {row:,} bytes, {direction}", "us", seconds[way] * 1e6,
            {other: seconds[other] * 1e6 for other in WAYS}, detail={"way": way})
        for row, count, direction, way, seconds in found
    ]  # fmt: skip
    taken, best = (sum(one) for one in zip(*((s[way], min(s.values())) for *_, way, s in found), strict=True))
    worst = max(seconds[way] / min(seconds.values()) for *_, way, seconds in found)
    limit = MOST if how == "calibrated" else None
    made.append(
        Row(group, "all of them, against the faster way of each", "x", taken / best, {}, limit,
            f"at most {MOST}" if limit else "", detail={"worst": worst})
    )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(main())

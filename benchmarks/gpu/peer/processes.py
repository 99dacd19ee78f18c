"""``python -m benchmarks.gpu.peer.processes``: between two processes with GPU memory, beside NIXL if it is installed.

It runs ``kvplan bench --peer process``, without NIXL and with it, then ``benchmarks.gpu.peer.nixl_interface``, then the
bench of host pools, then ``benchmarks.gpu.peer.layered``; each in a process of its own, since NIXL's threads slow other
transfers of their process down. It takes some 100 seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import PACKAGES, gpu
from benchmarks.record import Row, default_path, document, machine, save, speed_row, table
from kvplan.base.numbers import rounded

ROOT = Path(__file__).parents[3]
SECONDS = 300  # for one of the commands
WITHOUT_NIXL = "import sys; sys.modules['nixl'] = None; from kvplan.cli.main import main; sys.exit(main(sys.argv[1:]))"
BENCH = ["bench", "--peer", "process", "--output"]
ALONE, WITH_NIXL, INTERFACE, HOST, LAYERED = "alone", "beside", "interface", "host", "layered"
COMMANDS = {
    ALONE: ["-c", WITHOUT_NIXL, *BENCH],
    WITH_NIXL: ["-m", "kvplan", *BENCH],
    INTERFACE: ["-m", "benchmarks.gpu.peer.nixl_interface", "--json"],
    HOST: ["-c", WITHOUT_NIXL, "bench", "--device", "cpu", *BENCH[1:]],
    LAYERED: ["-m", "benchmarks.gpu.peer.layered", "--json"],
}
NEED_NIXL = (WITH_NIXL, INTERFACE)
TWO, ONE, COPY, NIXL = "two processes", "one process", "one large copy", "NIXL"
Document = Mapping[str, Any]


def measured(folder: Path) -> dict[str, Document]:
    """Run the commands that can run here; return their documents."""
    names = [name for name in COMMANDS if find_spec("nixl") is not None or name not in NEED_NIXL]
    return {name: _document([sys.executable, *COMMANDS[name]], folder / f"{name}.json") for name in names}


def _document(command: Sequence[str], path: Path) -> Document:
    done = subprocess.run([*command, str(path)], cwd=ROOT, timeout=SECONDS, check=False)
    if not path.exists():
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    read: Document = json.loads(path.read_text())
    return read


def rows(documents: Mapping[str, Document]) -> Iterator[Row]:
    """The rows of a run, by what each command wrote."""
    alone = documents[ALONE]["processes"]
    yield from _rates("between", documents.get(WITH_NIXL, documents[ALONE]))
    for name, words in ((ALONE, ""), (WITH_NIXL, ", with NIXL's agents in both processes")):
        if name in documents:
            yield from _one_block(documents[name]["processes"], words)
    meetings = sorted(alone["meet"])
    yield Row("meeting", "one allocation", "ms", meetings[len(meetings) // 2] * 1e3,
              detail={"longest": meetings[-1] * 1e3})  # fmt: skip
    if INTERFACE in documents:
        yield from _interface(documents[INTERFACE])
    layered = documents[LAYERED]
    what = f"last of {layered['layers']} layers of {layered['layer_nbytes'] / 1e6:.3g} MB, from its compute to seen"
    yield Row("by layer", what, "us", layered["tail_us"], {"one layer alone": layered["alone_us"]})
    yield from _rates("host pools", documents[HOST])


def _rates(group: str, made: Document) -> Iterator[Row]:
    cases: dict[tuple[str, int], dict[str, float]] = {}  # GB/s by direction and bytes of a run, and by way
    for row in made["rows"]:
        if row["gbps"] is not None and not row["broken"]:
            cases.setdefault((row["direction"], row["run_nbytes"]), {})[row["path"]] = row["gbps"]
    for (direction, nbytes), ways in cases.items():
        others = {name: ways[name] for name in (ONE, *sorted(ways)) if name in ways and name != TWO}
        yield speed_row(group, f"{direction}, {rounded(nbytes)}", ways[TWO], others)


def _one_block(processes: Document, words: str) -> Iterator[Row]:
    for what, key in (("submit to seen", "seen"), ("submit", "submit")):
        taken = processes[key]
        yield Row("one block", what + words, "us", taken["median"] * 1e6,
                  detail={name: taken[name] * 1e6 for name in ("tenth", "hundredth")})  # fmt: skip


def _interface(made: Document) -> Iterator[Row]:
    group, copy = "NIXL's interface", {COPY: made["large_copy_gbps"]}
    speeds = {"4 in flight": "gbps_in_flight", "after the make": "gbps_after_make",
              "to the last byte": "gbps_to_last_byte", "one at a time": "gbps"}  # fmt: skip
    for operation, ours in made["kvplan"].items():
        nixl = made["nixl"][operation]
        for words, key in speeds.items():
            beside = {NIXL: nixl[key]} if key in nixl else {}
            yield speed_row(group, f"{operation}, {words}", ours[key], beside | copy)
        for words in ("post", "make"):
            key = f"{words}_us"
            yield Row(group, f"{operation}: {words}", "us", ours[key], {NIXL: nixl[key]})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.peer.processes", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="also keep the documents of the commands")
    chosen = parser.parse_args(arguments)
    import torch

    started, about = machine(), gpu(min(torch.cuda.device_count(), 2))
    with tempfile.TemporaryDirectory() as folder:
        kept = chosen.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        made = list(rows(measured(kept)))
    print(table(made))
    output = chosen.output or default_path("gpu", about["name"], "processes")
    packages = (*PACKAGES, "nixl", "nixl-cu12", "nixl-cu13")
    save(output, document(made, started=started | {"gpu": about}, packages=packages))
    print(f"saved {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import default_path, gpu, versions
from benchmarks.gpu.peer.process_rows import Document, Scale, rows_of
from benchmarks.record import document, machine, save, table

ROOT = Path(__file__).parents[3]
PACKAGES = ("torch", "triton", "nixl", "nixl-cu12", "nixl-cu13")
SECONDS = 300  # for one of the commands
WITHOUT_NIXL = "import sys; sys.modules['nixl'] = None; from kvplan.cli.main import main; sys.exit(main(sys.argv[1:]))"


def measured(folder: Path) -> tuple[Document, Document | None, Document | None, Document, Document]:
    """Run the commands; return their documents."""
    bench = ["bench", "--peer", "process", "--output"]
    alone = _document([sys.executable, "-c", WITHOUT_NIXL, *bench], folder / "alone.json")
    beside = interface = None
    if find_spec("nixl") is not None:
        beside = _document([sys.executable, "-m", "kvplan", *bench], folder / "beside.json")
        command = [sys.executable, "-m", "benchmarks.gpu.peer.nixl_interface", "--json"]
        interface = _document(command, folder / "interface.json")
    host = [sys.executable, "-c", WITHOUT_NIXL, "bench", "--device", "cpu", "--peer", "process", "--output"]
    by_layer = _document([sys.executable, "-m", "benchmarks.gpu.peer.layered", "--json"], folder / "layered.json")
    return alone, beside, interface, _document(host, folder / "host.json"), by_layer


def _document(command: Sequence[str], path: Path) -> Document:
    done = subprocess.run([*command, str(path)], cwd=ROOT, timeout=SECONDS, check=False)  # noqa: S603
    if not path.exists():
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    found: Document = json.loads(path.read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; 0 where every limit holds, and 1 where one does not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.peer.processes", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="also keep the documents of the commands")
    chosen = parser.parse_args(arguments)
    import torch

    from kvplan.cuda.peers import link_between

    started, count = machine(), torch.cuda.device_count()
    link = link_between(0, 1).words if count > 1 else "one GPU"
    about: dict[str, Any] = gpu() | {"devices": min(count, 2), "link": link}
    with tempfile.TemporaryDirectory() as folder:
        kept = chosen.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        rows = rows_of(*measured(kept))
    for group in dict.fromkeys(row.group for row in rows):
        print(table([row for row in rows if row.group == group]), end="\n\n")
    made = document(rows, scale=Scale(), started=started)
    made["machine"]["gpu"] = about
    made["versions"] |= versions(PACKAGES)
    output = chosen.output or default_path(about["name"], ["processes"])
    save(output, made)
    print(f"saved {output}")
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

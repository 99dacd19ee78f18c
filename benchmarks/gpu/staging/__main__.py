"""``python -m benchmarks.gpu.staging``: gather and scatter of packed transfers, alone on one GPU.

kvplan's halves of a packed transfer against one contiguous copy of as many bytes within the GPU, and against SGLang's
staging kernels, in turn, in one run. GB/s count each byte once; the copy and all others read it and write it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.staging.sglang_files import Staging

MIB = 1 << 20


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.staging", description=__doc__)
    parser.add_argument("--sglang", type=Path, metavar="PATH", help="folder with the folder sglang: an unzipped wheel")
    parser.add_argument("--mib", type=float, nargs="+", default=[256, 1024], help="MiB of a transfer (256 1024)")
    parser.add_argument("--rows", type=int, nargs="+", help="bytes of the rows; by default all kinds")
    parser.add_argument("--layers", type=int, default=32, help="layers of the pools (32)")
    parser.add_argument("--repeats", type=int, default=25, help="samples of each way (25)")
    parser.add_argument("--path", default="auto", help="kvplan's path (auto)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: shows that it runs, with Triton's interpreter, and nothing else")  # fmt: skip
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not, 2 without a GPU. The CPU holds no limits."""
    chosen = arguments_of(arguments)
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: give --device cpu to see whether it runs", file=sys.stderr)
        return 2
    from benchmarks.gpu.environment import gpu, gpu_document
    from benchmarks.gpu.required import missed
    from benchmarks.gpu.staging.measured import measure
    from benchmarks.gpu.staging.pools import KINDS, Scale
    from benchmarks.gpu.staging.ways import Bench
    from benchmarks.record import Row, machine, save, table

    started, about = machine(), gpu() if chosen.device == "cuda" else {"name": "cpu"}
    files, why = files_of(chosen.sglang)
    about["sglang"] = why or (files.version if files else "")
    print(f"{about}\n", flush=True)
    bench = Bench("cuda:0" if chosen.device == "cuda" else "cpu")
    scale = Scale(tuple(chosen.mib), chosen.layers, chosen.repeats, chosen.path)
    rows: list[Row] = []
    for mib in chosen.mib:
        for kind in KINDS:
            if chosen.rows and kind.row not in chosen.rows:
                continue
            rows += measure(bench, kind, int(mib * MIB), scale, files)
            if chosen.output is not None:
                save(chosen.output, gpu_document(rows, scale=scale, started=started, about=about, failed={}))  # type: ignore[arg-type]
    for group in dict.fromkeys((row.group, row.unit) for row in rows):
        print(table([row for row in rows if (row.group, row.unit) == group]), end="\n\n", flush=True)
    return int(bench.line is not None and any(map(missed, rows)))


def files_of(root: Path | None) -> tuple[Staging | None, str]:
    """SGLang's files, or why they cannot be used."""
    from benchmarks.gpu.staging.sglang_files import load

    if root is None:
        return None, "not measured: give --sglang"
    try:
        return load(root), ""
    except (ImportError, OSError) as error:
        return None, f"not measured: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())

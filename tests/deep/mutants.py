"""Mutants: small changes that break kvplan, each of which a named test must find.

Run with `python -m tests.deep.mutants [--only NUMBER ...]`. Each mutant is made in a temporary copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PATIENCE = 900  # seconds
FOUND = ("failed", "hangs", "crashes")


class Mutant(NamedTuple):
    """One text of one file, the text that replaces it, and the tests, below `tests`, one of which must fail."""

    file: str
    text: str
    mutated: str
    tests: str


MUTANTS = (
    # The compiler's passes.
    Mutant("program/passes.py", "return bool((stretches - stretches[:, :1] == stretches[0]).all())", "return True",
           "laws/test_copying.py"),
    Mutant("program/passes.py", "src_head = pair.heads.start - a.head_start if", "src_head = 0 if",
           "laws/test_copying.py"),
    Mutant("program/passes.py", "offset(form.token, unit * each)", "offset(form.token, unit)",
           "laws/test_copying.py"),
    Mutant("program/fold.py", "(last.src + last.nbytes, last.dst + last.nbytes) == (run.src, run.dst)",
           "last.dst + last.nbytes == run.dst", "laws/test_copying.py"),
    Mutant("program/fold.py", "if (following.src - last.src, following.dst - last.dst) != step:",
           "if following.dst - last.dst != step[1]:", "laws/test_copying.py"),
    # The planner's loops: ids, addresses, merging, cutting.
    Mutant("plan/placing_numba.py", "last, signs = num_blocks - 1, np", "last, signs = num_blocks, np",
           "laws/test_planner_loops.py"),
    Mutant("plan/placing_numba.py", "if ids[at] <= ids[at - 1]:", "if ids[at] < ids[at - 1]:",
           "laws/test_fast_paths.py"),
    Mutant("plan/placing_numba.py", "    for at in range(done):\n", "    for at in range(done - 1):\n",
           "plan/test_seen_marks.py"),
    Mutant("plan/placing_numba.py", "ids[: (skip + count - 1) // units + 1].copy()",
           "ids[: (skip + count - 1) // units + 1]", "laws/test_planner_loops.py"),
    Mutant("plan/placement.py", "src_covers - count >= units[0]", "src_covers - count > units[0]",
           "plan/test_plan.py"),
    Mutant("plan/loops_numba.py", "if before >= 0 and units[0, before] == src - nbytes:", "if before >= 0:",
           "laws/test_planner_loops.py"),
    Mutant("plan/loops_numba.py", "last = min(first + TILE, count)", "last = min(first + TILE - 1, count)",
           "laws/test_planner_loops.py"),
    Mutant("plan/loops_numba.py", "for at in range(bounds.size - 1, -1, -1):", "for at in range(bounds.size):",
           "laws/test_planner_loops.py"),
    Mutant("plan/loops_numba.py", "stop = min(stop, _next_cut(dst[k], done, dst_seams))", "stop = min(stop, size[k])",
           "laws/test_minimal_descriptors.py"),
    Mutant("plan/loops_numba.py", "return seams[at] - start if", "return seams[at] - start + 1 if",
           "laws/test_minimal_descriptors.py"),
    Mutant("plan/merges.py", "own = (before == after) |", "own = (owner[before] == owner[after]) |",
           "laws/test_minimal_descriptors.py plan/test_merges.py"),
    # Rings of staged transfers.
    Mutant("plan/staging.py", "padded = -(-lengths // GRAIN) * GRAIN", "padded = lengths",
           "laws/test_staged_units.py"),
    Mutant("plan/staging.py", "if np.any(places != places[0] + moved[:, None]):", "if False:",
           "plan/test_staging.py"),
    Mutant("execute/gpu/ring_loops.py", "extents = head if granule == 0 else tail if granule == last else middle",
           "extents = head if granule == 0 else middle", "laws/test_staged_units.py"),
    Mutant("execute/gpu/by_layer/ring.py", "busy[k] = before is not None and not before._over", "busy[k] = False",
           "gpu_simulated/test_order.py laws/test_simulated_paths.py"),
    # Order and overlap.
    Mutant("plan/conflicts.py", "((WRITTEN, WRITTEN), (WRITTEN, READ), (READ, WRITTEN))",
           "((WRITTEN, WRITTEN), (WRITTEN, READ))", "plan/test_conflicts.py"),
    Mutant("plan/conflicts.py", 'np.searchsorted(ends, its_starts, side="right")',
           'np.searchsorted(ends, its_starts, side="left")', "plan/test_conflicts.py"),
    Mutant("plan/plan.py", "np.flatnonzero(start[1:] < end[:-1])", "np.flatnonzero(start[1:] < start[:-1])",
           "plan/test_plan.py"),
    Mutant("plan/plan.py", 'last = np.searchsorted(starts, made.dst + made.size, side="left") - 1',
           'last = np.searchsorted(starts, made.dst, side="left") - 1', "plan/test_plan.py"),
    Mutant("layout/disjoint.py", "active.append((start + reach[key] + 1, component))",
           "active.append((start + reach[key], component))", "layout/test_overlap.py"),
    Mutant("ranks/resharding.py", "                clash = True\n", "                clash = False\n",
           "ranks/test_resharding.py"),
    # Execution: the kernel, waits, a transfer's state.
    Mutant("execute/gpu/kernel.py", "over = item >= items", "over = item > items", "execute/test_copy_kernel.py"),
    Mutant("execute/gpu/shape.py", "pieces = -(-size // each)", "pieces = size // each", "execute/test_shape.py"),
    Mutant("execute/gpu/waits.py", "        device.record(mine, handle)\n", "", "gpu_simulated/test_order.py"),
    Mutant("execute/gpu/waits.py", "    device.wait(gate, event)\n", "", "gpu_simulated/test_waiting.py"),
    Mutant("execute/transfer.py", " or not dst.writable:", ":", "execute/test_bad_input.py"),
    Mutant("execute/host/tasks.py", "range(0, count, step)]", "range(0, count - 1, step)]", "laws/test_copying.py"),
)  # fmt: skip


def stale() -> list[str]:
    """List the mutants whose text is not in its file exactly once, or whose tests are gone."""
    found = []
    for number, mutant in enumerate(MUTANTS):
        path = ROOT / "kvplan" / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.text) if path.exists() else 0
        if count != 1:
            found.append(f"{number}: {mutant.text!r} stands {count} times in {mutant.file}")
        found += [f"{number}: no tests/{name}" for name in mutant.tests.split() if not (ROOT / "tests" / name).exists()]
    return found


def copy_of_the_tree(folder: Path) -> None:
    """Copy the files that git knows, links as links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def outcome(folder: Path, tests: str) -> str:
    """Run tests in a copy of the tree: "passed", "failed", "hangs", "crashes", or pytest's other exit status."""
    paths = [f"tests/{name}" for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode < 0:  # a signal: copies outside all memory
        return "crashes"
    return {0: "passed", 1: "failed"}.get(done.returncode, f"exit status {done.returncode}")


def killed(numbers: list[int], folder: Path) -> Iterator[tuple[int, str]]:
    """Make each mutant in turn; what its tests do."""
    for number in numbers:
        mutant = MUTANTS[number]
        path = folder / "kvplan" / mutant.file
        whole = path.read_text(encoding="utf-8")
        path.write_text(whole.replace(mutant.text, mutant.mutated), encoding="utf-8")
        yield number, outcome(folder, mutant.tests)
        path.write_text(whole, encoding="utf-8")


def main() -> int:
    """Run; 0 where every mutant is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these mutants, counted from 0")
    numbers = parser.parse_args().only or list(range(len(MUTANTS)))
    if gone := stale():
        print("\n".join(gone), file=sys.stderr)
        return 1
    survived = 0
    with tempfile.TemporaryDirectory(prefix="kvplan-mutants-") as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        begun = time.monotonic()
        named = " ".join(sorted({name for number in numbers for name in MUTANTS[number].tests.split()}))
        if (whole := outcome(folder, named)) != "passed":
            print(f"without any mutant, these tests end with {whole!r}: {named}", file=sys.stderr)
            return 1
        for number, found in killed(numbers, folder):
            survived += found not in FOUND
            mutant = MUTANTS[number]
            print(f"{number:2} {found:8} {mutant.file}: {mutant.text.strip()}", flush=True)
        print(f"{len(numbers) - survived} of {len(numbers)} found in {time.monotonic() - begun:.0f} s")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())

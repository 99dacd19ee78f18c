"""Broken files of every kind, each read under a bound of time and memory: ``python -m tests.deep.fuzz_files``.

A file is refused by a KVPlanError of a short message, or accepted as what does not contradict itself. Everything else
is a failure: another exception, too much memory or time, a wrong acceptance. The first line is the seed; ``--only``
reads one file of it again, and shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, NamedTuple

import kvplan
from kvplan import KVLayout, KVPlanError
from kvplan.catalogue.config import read_config
from kvplan.cost import profile, store
from kvplan.errors import MESSAGE
from kvplan.layout.dump import text_of as dump_text
from kvplan.memory import shared
from tests.deep import whole_files
from tests.deep.mutations import broken, text_of, toml_of, torn

FILES, WORKERS = 20_000, 2
SECONDS = 30.0  # for one file: far above what one takes, so that a busy machine is no failure
MEMORY_NBYTES = 3 << 30  # of addresses, above what the process has before the first file
GEOMETRY, POOL_NBYTES, PAGE = "format 1 | fuzzed", 5000, 4096
KINDS = ("dump", "dump", "dump", "spec", "spec", "toml", "config", "profile", "pool")


class Verdict(NamedTuple):
    """What became of one file; ``wrong`` is empty where that is right."""

    index: int
    kind: str
    outcome: str
    wrong: str = ""


def make(seed: int, index: int) -> tuple[str, bytes, Random]:
    """Kind and bytes of one file, and the dice for what is asked of it."""
    random = Random(f"{seed}/{index}")
    kind = random.choice(KINDS)
    if kind == "pool":
        return kind, torn(whole_files.pool(PAGE, GEOMETRY, 2 * PAGE), random), random
    whole: Callable[[], Any] = {
        "dump": lambda: random.choice(whole_files.dumps()),
        "spec": lambda: random.choice(whole_files.SPECS),
        "toml": lambda: random.choice(whole_files.SPECS),
        "config": lambda: random.choice(whole_files.CONFIGS),
        "profile": whole_files.profile,
    }[kind]
    write = toml_of if kind == "toml" else text_of
    document = whole()
    if random.random() < 0.75:
        document = broken(document, random)
        return kind, write(document) if random.random() < 0.9 else torn(write(document), random), random
    return kind, torn(write(document), random), random


def examine(seed: int, index: int, folder: Path) -> Verdict:
    """Read one file, and look at what was accepted."""
    kind, raw, random = make(seed, index)
    try:
        READERS[kind](raw, folder, random)
    except KVPlanError as error:
        long = f"a message of {len(str(error)):,} characters" if len(str(error)) > MESSAGE + 300 else ""
        return Verdict(index, kind, "refused", long)
    except BaseException as error:  # whatever it is, it is a finding
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict(index, kind, "failed", f"{type(error).__name__}: {str(error)[:300]}")
    return Verdict(index, kind, "accepted")


# ---- what reads them, and what is asked of what was accepted -----------------------------------------------------


def _layout_file(suffix: str) -> Callable[[bytes, Path, Random], None]:
    def read(raw: bytes, folder: Path, random: Random) -> None:
        path = folder / f"layout{suffix}"
        path.write_bytes(raw)
        check_layout(KVLayout.from_spec(path), random)

    return read


def check_layout(layout: KVLayout, random: Random) -> None:
    """It does not contradict itself."""
    assert layout.nbytes == layout.num_blocks * layout.block_nbytes
    assert str(layout).encode()
    assert layout.sizes.get("layer", len(layout.layers)) == len(layout.layers)
    assert layout.sizes.get("block", layout.num_blocks) == layout.num_blocks
    text = dump_text(layout.built)
    again = KVLayout.from_spec(json.loads(text))
    assert again == layout
    assert dump_text(again.built) == text
    seen: dict[int, tuple[Any, ...]] = {}
    for k in range(40):
        component = random.choice(layout.components)
        tokens = 1 if component.form.opaque else layout.block_tokens
        heads = component.form.heads
        where = (component.layer, component.part, random.randrange(layout.num_blocks), random.randrange(tokens),
                 random.randrange(heads.start, heads.stop))  # fmt: skip
        at = layout.address(**dict(zip(("layer", "part", "block", "token", "head"), where, strict=True)))
        assert any(region.address <= at < region.end for region in layout.regions), where
        assert seen.setdefault(at, where) == where
        if k < 4:
            held = kvplan.locate(layout, at)[0].row
            assert held is not None
            assert held[:3] == where[:3]
    try:
        program = kvplan.compile(layout, layout)
    except kvplan.IncompatibleLayoutsError as error:  # past the bounds of a program, which compile tells
        if "at most" in str(error):
            return
        raise TypeError(f"no program of a layout with itself: {error}") from error
    assert program.unit_nbytes == layout.block_nbytes


def _config(raw: bytes, folder: Path, random: Random) -> None:
    from kvplan.cli import main

    path = folder / "config.json"
    path.write_bytes(raw)
    model = read_config(path)
    for group in model.groups:
        assert group.layers == tuple(sorted(set(group.layers)))
        assert not group.layers or group.layers[-1] < model.layers
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as notes:
        status = main(["inspect", "--config", str(path), "--blocks", "64", "--peer", "nvlink", "--no-advice", "--json"])
    if status == 2:  # a model without attention, or elements that have no bytes
        raise kvplan.KVPlanError(notes.getvalue())
    assert all(group["block_nbytes"] > 0 for group in json.loads(out.getvalue())["groups"])


def _profile(raw: bytes, folder: Path, random: Random) -> None:
    path = folder / "profile.json"
    path.write_bytes(raw)
    made = store.read(path)
    assert profile.from_json(made.to_json()).costs.keys() == made.costs.keys()
    assert made.link


def _pool(raw: bytes, folder: Path, random: Random) -> None:
    path = folder / "pool"
    path.write_bytes(raw)
    path.chmod(0o600)
    peer = os.open(path, os.O_RDWR)
    try:
        if random.random() < 0.6:
            fcntl.flock(peer, random.choice((fcntl.LOCK_SH, fcntl.LOCK_SH, fcntl.LOCK_EX)))
        held = shared.share(path, "fuzzed", [POOL_NBYTES])
        assert path.read_bytes().startswith(b"kvplan.pool\nwhole.\n" + GEOMETRY.encode() + b"\n")
        assert [each.nbytes for each in held.tensors] == [POOL_NBYTES]
        held.tensors[0][:] = 1
        assert int(held.memory[held.page : held.page + POOL_NBYTES].sum()) == POOL_NBYTES
    finally:
        os.close(peer)
        path.unlink(missing_ok=True)


READERS: dict[str, Callable[[bytes, Path, Random], None]] = {
    "dump": _layout_file(".json"), "spec": _layout_file(".json"), "toml": _layout_file(".toml"),
    "config": _config, "profile": _profile, "pool": _pool,
}  # fmt: skip

# ---- workers -----------------------------------------------------------------------------------------------------


def bounded() -> None:
    """Limit this process's addresses, and how long a pool is asked for."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NBYTES,) * 2)
    shared.ATTEMPTS = 3


def work(seed: int, indices: Sequence[int], current: Any, results: Any) -> None:
    """Read some files in a process of its own; ``current`` tells which one, and since when."""
    bounded()
    with tempfile.TemporaryDirectory() as folder:
        for index in indices:
            current[:] = index, time.monotonic()
            results.put(examine(seed, index, Path(folder)))
    current[:] = -1, 0


def run(seed: int, files: int, workers: int = WORKERS) -> list[Verdict]:
    """Read so many files in worker processes; one that hangs or dies is replaced, and its file is a failure."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    todo = [list(range(k, files, workers)) for k in range(workers)]
    started: list[Any] = [None] * workers
    currents = [context.Array("d", [-1, 0]) for _ in range(workers)]
    verdicts: dict[int, Verdict] = {}
    while len(verdicts) < files:
        while not results.empty():
            verdict = results.get()
            verdicts.setdefault(verdict.index, verdict)
        for k in range(workers):
            process, current = started[k], currents[k]
            index, since = int(current[0]), current[1]
            hangs = process is not None and index >= 0 and time.monotonic() - since > SECONDS
            died = process is not None and not process.is_alive() and process.exitcode != 0
            if hangs or died:
                process.kill()
                process.join()
                why = f"hangs for over {SECONDS:g} s" if hangs else f"ends its process with {process.exitcode}"
                verdicts.setdefault(index, Verdict(index, make(seed, index)[0], "failed", why))
                todo[k] = [one for one in todo[k] if one > index]
                started[k] = None
            if started[k] is None and todo[k]:
                current[:] = -1, 0
                started[k] = context.Process(target=work, args=(seed, todo[k], current, results), daemon=True)
                started[k].start()
        time.sleep(0.05)
    for process in started:
        if process is not None:
            process.join()
    return [verdicts[index] for index in sorted(verdicts)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.fuzz_files", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="of all files (default: a new one)")
    parser.add_argument("--files", type=int, default=FILES, metavar="N", help=f"how many (default {FILES})")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"processes (default {WORKERS})")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this file alone, here, and show it")
    args = parser.parse_args(argv)
    seed = SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    if args.only is not None:
        bounded()
        print(make(seed, args.only)[1][:4000])
        with tempfile.TemporaryDirectory() as folder:
            verdict = examine(seed, args.only, Path(folder))
        print(verdict)
        return int(bool(verdict.wrong))
    verdicts = run(seed, args.files, args.workers)
    for verdict in verdicts:
        if verdict.wrong:
            print(f"file {verdict.index} ({verdict.kind}): {verdict.wrong}")
    counts = Counter((verdict.kind, verdict.outcome) for verdict in verdicts)
    print("; ".join(f"{kind} {outcome} {count:,}" for (kind, outcome), count in sorted(counts.items())))
    wrong = sum(bool(verdict.wrong) for verdict in verdicts)
    print(f"{len(verdicts):,} files, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""``kvplan demo``: take the KV cache from under a running engine, bring it back elsewhere, and compare its tokens."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from time import perf_counter

from kvplan.base.quoting import quoted
from kvplan.cli.demo_run import engine as demo_engine
from kvplan.cli.demo_run import round_trip as demo_tensors
from kvplan.cli.demo_run.round_trip import DemoError, MissingError, Note, Outcome, Tamper, Workload
from kvplan.cli.demo_run.story import facts_of, screen_of
from kvplan.cli.screen.documents import SCHEMAS, print_json
from kvplan.cli.screen.printing import show
from kvplan.errors import LayoutError
from kvplan.execute.host.path import MAX_THREADS

PATIENCE_SECONDS = 2.0  # a progress bar appears after so long
ENGINES = ("auto", "transformers", "torch", "numpy")

MOST_DIGITS = 6  # more than any machine holds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = "examples:\n  kvplan demo\n  kvplan demo --json | jq .speed"
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="transformers: the real engine; torch, numpy: plain tensors; auto: the first that is installed",
    )
    parser.add_argument("--requests", type=_positive, default=6, metavar="N", help="requests in flight (default 6)")
    parser.add_argument("--tokens", type=_positive, default=64, metavar="N", help="tokens each generates (default 64)")
    parser.add_argument(
        "--speed-mib", type=_positive, default=256, metavar="MIB", help="size of the timed copy (default 256)"
    )
    parser.add_argument("--json", action="store_true", help=f"one JSON object (schema kvplan.demo/{SCHEMAS['demo']})")


def run(args: argparse.Namespace, *, tamper: Tamper | None = None) -> int:
    """Run the demo and print what it found.

    Args:
        args: of :func:`add_arguments`.
        tamper: called with the host pool between store and load; shows in tests that the demo can fail.

    Returns:
        0 where everything came back, 1 where it did not or the engine failed, 2 where the engine asked for is missing.
    """
    start = perf_counter()
    workload = Workload(
        requests=args.requests,
        new_tokens=args.tokens,
        speed_nbytes=args.speed_mib << 20,
        threads=min(os.cpu_count() or 1, MAX_THREADS),
        tamper=tamper,
    )
    try:
        with _progress(silent=args.json) as note:
            outcome, missing = _first_that_runs(args.engine, workload, note)
    except DemoError as error:
        if args.json and not isinstance(error, MissingError):
            print_json("finding", {"command": "demo", "finding": str(error)})
        return _complain(str(error), 2 if isinstance(error, MissingError) else 1)
    for reason in missing:
        _complain(reason, 0)
    facts = facts_of(outcome, missing, perf_counter() - start)
    if args.json:
        print_json("demo", facts)
    else:
        show(*screen_of(outcome, facts))
    return 0 if outcome.passed else 1


def _first_that_runs(engine: str, workload: Workload, note: Note) -> tuple[Outcome, list[str]]:
    """The outcome, and why better engines were passed over.

    Raises:
        MissingError: the engine asked for by name cannot be imported.
    """
    missing = []
    if engine in ("auto", "transformers"):
        try:
            note("Importing torch and transformers")
            demo_engine.import_engine()
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            if engine != "auto":
                raise MissingError(f"--engine {engine} cannot be imported: {error}") from error
            missing.append(f"the engine cannot be imported ({error}); this is the plain demo, on tensors")
        else:
            try:
                return demo_engine.run(workload, note), missing
            except (AttributeError, TypeError, LayoutError) as error:  # another version, with other members
                raise DemoError(f"this engine is not as transformers {demo_engine.WRITTEN_FOR}: {error}") from error
    if engine in ("auto", "torch"):
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            if engine != "auto":
                raise MissingError(f"--engine {engine} cannot be imported: {error}") from error
            missing.append(f"torch cannot be imported ({error}); the tensors are numpy arrays")
        else:
            return demo_tensors.run(workload, note, framework="torch"), missing
    return demo_tensors.run(workload, note, framework="numpy"), missing


@contextmanager
def _progress(*, silent: bool) -> Iterator[Note]:
    """What takes a note of what is going on; shown as a bar on a terminal once it takes long."""
    if silent:
        yield _unheard
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("Starting", total=None)
    timer = Timer(PATIENCE_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda what, done=0, total=None: bar.update(task, description=what, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def _unheard(what: str, *, done: int = 0, total: int | None = None) -> None:
    """A note that nobody reads."""
    del what, done, total


def _positive(text: str) -> int:
    if len(text) > MOST_DIGITS or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no positive number of at most {MOST_DIGITS} digits")
    return int(text)


def _complain(message: str, code: int) -> int:
    print(f"kvplan: {message}", file=sys.stderr)
    return code

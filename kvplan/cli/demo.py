"""``kvplan demo``: move the KV cache of a running engine away and back, and compare the tokens."""

from __future__ import annotations

import argparse
import os
from functools import partial
from time import perf_counter

from kvplan.cli.arguments.values import whole
from kvplan.cli.demo_run import engine as demo_engine
from kvplan.cli.demo_run import round_trip as demo_tensors
from kvplan.cli.demo_run.round_trip import DemoError, MissingError, Outcome, Tamper, Workload
from kvplan.cli.demo_run.story import facts_of, screen_of
from kvplan.cli.screen.documents import SCHEMAS, print_json
from kvplan.cli.screen.printing import Tell, note, progress, show
from kvplan.errors import LayoutError
from kvplan.execute.host.path import MAX_THREADS

ENGINES = ("auto", "transformers", "torch", "numpy")
BAR_SECONDS = 2.0  # before a progress bar appears
INSTALL = (
    "To install the engine, about 250 MB: pip install torch --index-url https://download.pytorch.org/whl/cpu; "
    f"pip install transformers=={demo_engine.WRITTEN_FOR}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan demo\n  kvplan demo --json | jq .descriptors"
    number = partial(whole, least=1, most=999_999)
    engines = "transformers: the real engine; torch, numpy: plain tensors; auto: the first that is installed"
    parser.add_argument("--engine", choices=ENGINES, default="auto", help=engines)
    parser.add_argument("--requests", type=number, default=6, metavar="N", help="requests at once (default 6)")
    parser.add_argument("--tokens", type=number, default=64, metavar="N", help="tokens each generates (default 64)")
    timed = "size of the copy that --json times (default 256)"
    parser.add_argument("--speed-mib", type=number, default=256, metavar="MIB", help=timed)
    parser.add_argument("--json", action="store_true", help=f"one JSON object (schema kvplan.demo/{SCHEMAS['demo']})")


def run(args: argparse.Namespace, *, tamper: Tamper | None = None) -> int:
    """Run the demo and print its results.

    Args:
        args: values of the arguments of :func:`add_arguments`.
        tamper: called with the host pool between store and load; with it, tests show that the demo can fail.

    Returns:
        0 if all bytes came back, 1 if they did not or the engine failed, 2 if the engine that was named is missing.
    """
    start = perf_counter()
    workload = Workload(
        requests=args.requests,
        new_tokens=args.tokens,
        speed_nbytes=args.speed_mib << 20 if args.json else 0,  # other programs on the machine make it noisy
        threads=min(os.cpu_count() or 1, MAX_THREADS),
        tamper=tamper,
    )
    try:
        with progress(silent=args.json, after=BAR_SECONDS) as tell:
            outcome, missing = _first_that_runs(args.engine, workload, tell)
    except DemoError as error:
        if args.json and not isinstance(error, MissingError):
            print_json("finding", {"command": "demo", "finding": str(error)})
        note(f"kvplan: {error}")
        return 2 if isinstance(error, MissingError) else 1
    for reason in missing:
        note(f"kvplan: {reason}")
    facts = facts_of(outcome, missing, perf_counter() - start)
    if args.json:
        print_json("demo", facts)
    else:
        show(*screen_of(outcome, facts))
    return 0 if outcome.passed else 1


def _first_that_runs(engine: str, workload: Workload, tell: Tell) -> tuple[Outcome, list[str]]:
    """Return the outcome, and the reasons why better engines were not used.

    Raises:
        MissingError: the engine that was named cannot be imported.
    """
    missing = []
    if engine in ("auto", "transformers"):
        try:
            tell(None, "Importing torch and transformers")
            demo_engine.import_engine()
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            if engine != "auto":
                raise MissingError(f"--engine {engine} cannot be imported: {error}") from error
            missing.append(f"the engine cannot be imported ({error}); this is the plain demo, on tensors. {INSTALL}")
        else:
            try:
                return demo_engine.run(workload, tell), missing
            except (AttributeError, TypeError, LayoutError) as error:  # another version has other members
                raise DemoError(f"this engine differs from transformers {demo_engine.WRITTEN_FOR}: {error}") from error
    if engine in ("auto", "torch"):
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            if engine != "auto":
                raise MissingError(f"--engine {engine} cannot be imported: {error}") from error
            missing.append(f"torch cannot be imported ({error}); the tensors are numpy arrays")
        else:
            return demo_tensors.run(workload, tell, framework="torch"), missing
    return demo_tensors.run(workload, tell, framework="numpy"), missing

"""Run the command that was named, and turn its errors into exit codes.

Exit codes: 0 success, 1 a finding (the question was understood, and the answer is no), 2 usage.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from kvplan.base import __version__
from kvplan.errors import IncompatibleLayoutsError, KVPlanError, NotationError, bounded
from kvplan.plan.loops import sparing

OK, FINDING, USAGE, INTERRUPTED = 0, 1, 2, 130

# The module of each command, and its help. A module has `add_NAME(parser)` and `run_NAME(args, tell)`; only that of the
# command that was named is imported.
COMMANDS = {
    "demo": ("demo", "move the cache of a running engine away and back, and compare its tokens"),
    "inspect": ("catalogue", "print the facts of a layout and the place of its bytes"),
    "plan": ("pair", "print the copies that move some blocks from one layout to another"),
    "explain": ("pair", "compare two layouts: their copy program, better orders, the path of a plan"),
    "advise": ("pair", "find the best order of a host pool for a layout, by runs and extents"),
    "which": ("layouts", "print what lies at an address: layer, part, block, token, head, byte"),
    "report": ("report", "put all of this on one page, to attach to an issue"),
    "pairs": ("catalogue", "print how every device layout of the catalogue moves to every host layout"),
    "backends": ("machine", "list the engines whose tensors kvplan can describe"),
    "calibrate": ("machine", "measure this GPU, so that transfers take the fastest path"),
    "bench": ("machine", "time every path on this machine, and other programs that move the same blocks"),
    "doctor": ("machine", "name what slows transfers on this machine, and give advice"),
}

NOTATION_HINT = 'an example is "layer: kv block token head dim"'

# Commands that plan once and measure nothing: loading numba would take longer than planning in numpy.
SPARING = ("plan", "explain", "report")
RENAMED = {"diff": "'diff' is now 'kvplan explain SRC DST', which prints the comparison, too"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a hint."""

    named = ""  # the given command: argparse reports its unknown arguments to the parser of all commands

    def error(self, message: str) -> NoReturn:
        of = f" {self.named}" if self.named and message.startswith("unrecognized") else ""
        self.exit(USAGE, f"kvplan: {bounded(message)}; see '{self.prog}{of} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default those of this process.

    Returns:
        The exit code: 0 success, 1 a finding, 2 usage.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        code = _dispatch(arguments)
        print(end="", flush=True)  # also where the parent closed the stream
    except OSError as error:
        with suppress(OSError, ValueError):  # the stream has no file; otherwise Python prints an error at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            return OK
        return _complain(f"cannot write: {error.strerror or error}; is the disk full?", USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    return code


def _dispatch(arguments: list[str]) -> int:
    named = next((argument for argument in arguments if not argument.startswith("-")), "")
    if named in RENAMED:
        return _complain(RENAMED[named], USAGE)
    try:
        args = _parser(named).parse_args(arguments)
    except SystemExit as stop:  # argparse has printed help, the version or an error
        return int(stop.code or OK)
    from kvplan.cli.screen import Finding, json_text, progress, show

    try:
        with sparing(wanted=named in SPARING), progress(silent=args.json) as tell:
            try:
                answer = getattr(import_module(f"kvplan.cli.{COMMANDS[named][0]}"), f"run_{named}")(args, tell)
            except IncompatibleLayoutsError as error:
                answer = Finding(named, " ".join(str(error).split()), status=FINDING)
        if isinstance(answer, Finding):
            _complain(answer.finding, FINDING)
        if args.json:
            print(json_text(answer))
        else:
            show(answer.blocks())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        return _complain("needs rich; pip install rich", USAGE)
    except NotationError as error:
        return _complain(f"{error.one_line}; {NOTATION_HINT}", USAGE)
    except KVPlanError as error:
        return _complain(str(error), USAGE)
    except MemoryError:
        return _complain("not enough memory; ask for fewer blocks or smaller extents", USAGE)
    return int(answer.status)


def _parser(named: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvplan",
        description="Describe two KV-cache layouts, compile the pair, plan transfers.",
        epilog="examples:\n  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first\n"
        "  kvplan inspect examples/specs/gpu_split_kv.toml\n  kvplan advise examples/specs/gpu_split_kv.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvplan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == named:
            getattr(import_module(f"kvplan.cli.{module}"), f"add_{name}")(command)
            command.add_argument("--json", action="store_true", help=f"one JSON object (schema kvplan.{name})")
            parser.named = name
    return parser


def _complain(message: str, code: int) -> int:
    if sys.stderr is not None:  # print would write to standard output instead
        with suppress(OSError):
            print(f"kvplan: {' '.join(message.split())}", file=sys.stderr)
    return code

"""``kvplan doctor``: what of this machine is in the way of fast transfers, and what to do about it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvplan.base.quoting import quoted
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import show
from kvplan.measure.doctor import Finding, examine, gather

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """examples:
  kvplan doctor
  kvplan doctor --device cuda:1 --json
  numactl --cpunodebind=1 --membind=1 kvplan doctor    as an engine would run"""

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "unknown": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", default="cuda:0", type=_device, help="the GPU to look at (default: cuda:0)")
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.doctor)")


def run(args: argparse.Namespace) -> int:
    """Look, judge, print; a finding where there is a problem."""
    facts = gather(args.device, busy=True)
    findings = examine(facts)
    healthy = all(finding.state != "problem" for finding in findings)
    if args.json:
        found = [asdict(finding) for finding in findings]
        print_json("doctor", {"device": facts.device, "healthy": healthy, "findings": found, "facts": asdict(facts)})
    else:
        show(_table(findings))
    return int(not healthy)


def _table(findings: Sequence[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.name, finding.what)
        if finding.advice:
            table.add_row("", "", Text(finding.advice, "italic"))
    return table


def _device(text: str) -> str:
    if text == "cuda":
        return "cuda:0"
    if not re.fullmatch(r"cuda:\d{1,5}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no GPU, as in cuda:0")
    return text

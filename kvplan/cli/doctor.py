"""``kvplan doctor``: name what slows transfers on this machine, and give advice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvplan.cli.arguments.values import gpu
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
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", default="cuda:0", type=gpu, help="the GPU to look at (default: cuda:0)")
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.doctor)")


def run(args: argparse.Namespace) -> int:
    """Examine the machine and print the findings. Return 1 if there is a problem."""
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

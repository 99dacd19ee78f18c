"""``kvplan doctor``: name what slows transfers on this machine, and give advice."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from kvplan.cli.answer import Answer, Table
from kvplan.cli.arguments import gpu
from kvplan.cli.screen import Tell
from kvplan.measure.doctor import Facts, Finding, examine, gather

EXAMPLES = """examples:
  kvplan doctor --device cuda:1
  numactl --cpunodebind=1 --membind=1 kvplan doctor    as an engine would run"""


class DoctorAnswer(Answer):
    """What slows transfers on this machine.

    Attributes:
        device: the GPU.
        healthy: whether there is no problem.
        findings: of each check.
        facts: by which they were judged; null if not known.
    """

    schema = "doctor/2"
    device: str
    healthy: bool
    findings: tuple[Finding, ...]
    facts: Facts

    def blocks(self) -> Iterable[Any]:
        """Return a row for each finding, with its advice below."""
        return [Table([row for one in self.findings for row in (
            (one.state, one.name, one.what), *([("", "", one.advice)] if one.advice else []))])]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", default="cuda:0", type=gpu, help="the GPU to look at (default: cuda:0)")


def run(args: argparse.Namespace, tell: Tell) -> DoctorAnswer:
    """Examine the machine; a finding if there is a problem."""
    return doctor(args.device, busy=True)


def doctor(device: str = "cuda:0", *, busy: bool) -> DoctorAnswer:
    """Return the findings on this machine; ``busy`` wakes the link of an idle GPU."""
    found = gather(device, busy=busy)
    findings = tuple(examine(found))
    healthy = all(one.state != "problem" for one in findings)
    return DoctorAnswer(found.device, healthy, findings, found, status=int(not healthy))

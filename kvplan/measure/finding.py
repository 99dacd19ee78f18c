"""A finding of the doctor: the state of one part of a machine, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvplan.measure.facts import Facts

State = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True)
class Finding:
    """The finding of one check.

    Attributes:
        name: name of the check.
        state: ``"ok"``, ``"warning"``, ``"problem"`` or ``"unknown"``.
        what: the finding in one line.
        advice: the remedy in one line; ``""`` if the state is ok, or no remedy is known.
    """

    name: str
    state: State
    what: str
    advice: str = ""


def unknown(facts: Facts, name: str, fact: str) -> Finding:
    """Return the finding of a check whose fact is missing."""
    return Finding(name, "unknown", facts.missing.get(fact, "the system does not tell"))


def cuda_version(cuda: int) -> str:
    """Return a CUDA version in the form "12.8".

    >>> cuda_version(12080)
    '12.8'
    """
    return f"{cuda // 1000}.{cuda % 1000 // 10}"

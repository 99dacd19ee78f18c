"""Explain the choice of a path: every candidate, its expected time, and the terms of that time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any, NamedTuple

from kvplan.base.numbers import count_of, decimal, duration, rate
from kvplan.cost.model import NS, Candidate, beside_of, features
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, DeviceProfile
from kvplan.cost.statistics import Counted

ROW = "{:<15}{:>9}{:>8}{:>8}".format
NO_BREAK = "\N{NO-BREAK SPACE}"
ROUTE_WORDS = {
    "load": "from the host", "store": "to the host", "device": "within the GPU", "push": "to another GPU",
    "pull": "from another GPU",
}  # fmt: skip


class Explained(NamedTuple):
    """The plan, and what its choice depends on.

    Attributes:
        counts: counts of the plan; of a transfer by layers, those of all its groups of layers.
        route: route of the plan.
        profile: profile of the device, or of the GPU and its peer.
        policy: the policy.
    """

    counts: Sequence[Counted]
    route: str
    profile: DeviceProfile
    policy: Policy


def facts(found: Sequence[Candidate], plan: Explained) -> dict[str, Any]:
    """Return the explanation as a dict for JSON; times are in seconds. :func:`explain` is its text.

    Args:
        found: the candidates, of which at least two can move the plan.
        plan: the plan.
    """
    return {
        "overlap": plan.policy.overlap,
        "verdict": _verdict(found[0], found[1], plan.policy.overlap),
        "profile": {name: getattr(plan.profile, name) for name in ("gpu", "driver", "link", "how", "made", "note")},
        "candidates": [{**asdict(one), "score": one.score, "terms": _terms(one, plan)} for one in found],
    }


def _terms(one: Candidate, plan: Explained) -> list[dict[str, Any]]:
    """Split a candidate's wall time into terms, the largest first; the last term, "other", is the remaining time."""
    if one.refused:
        return []
    costs, counts = beside_of(one.path, *plan[1:]).wall, features(one.path, plan.counts)
    made: list[dict[str, Any]]
    made = [{"term": term, "times": times, "seconds": NS * times * costs[term]}
            for term, times in zip(TERMS[one.path], counts, strict=False)]  # fmt: skip
    made.sort(key=lambda term: -term["seconds"])
    return [*made, {"term": "other", "times": 1.0, "seconds": one.wall - sum(term["seconds"] for term in made)}]


def _verdict(first: Candidate, second: Candidate, overlap: str) -> str:
    """Return a sentence that says why the first candidate is taken."""
    ratio = second.score / max(first.score, 1e-12)
    if ratio < 1.0:
        return f"{first.path} is taken: {second.path} is as fast, within the 3 % that choices are not made by"
    losses = "" if overlap == "idle" else f", with what {overlap} loses beside it"
    return f"{first.path} is taken: {second.path}, the next, takes {ratio:.2f} times as long{losses}"


def explain(found: Sequence[Candidate], plan: Explained, width: int = 80) -> str:
    """Return candidates as text; see :meth:`kvplan.Executor.candidates`.

    Args:
        found: the candidates, of which at least two can move the plan.
        plan: the plan.
        width: most columns of the lines with terms, at least 60.
    """
    document, profile, overlap = facts(found, plan), plan.profile, plan.policy.overlap
    lines = [f"profile: {profile.kind}, {profile.link}, {profile.how}"]
    if profile.note:
        lines.append(f"note: {profile.note}")
    beside = "nothing" if overlap == "idle" else overlap
    lines += [f"route:   {ROUTE_WORDS[plan.route]}", f"beside:  {beside}", "", ROW("path", "in all", "GPU", "compute")]
    for row in document["candidates"]:
        lines += _lines(row, width)
    return "\n".join([*lines, "", document["verdict"]])


def _lines(row: dict[str, Any], width: int) -> list[str]:
    """Return the lines of a candidate: its figures, and the largest terms of its time, or why it cannot move it."""
    if row["refused"]:
        return [ROW(row["path"], "-", "-", "-"), f"    cannot: {row['refused']}"]
    lost = f"-{duration(row['compute_seconds'])}" if row["compute_seconds"] else "-"
    *terms, other = row["terms"]
    words = [_told(**term) for term in terms[:3] if term["seconds"] > 0]  # the largest are enough
    if other["seconds"] > row["wall"] / 100:
        words.append(f"+{duration(other['seconds'])} by the policy or narrow words")
    held = ", ".join(word.replace(" ", NO_BREAK) for word in words)  # lines break between terms
    wrapped = wrap(held, max(width, 60), initial_indent="    ", subsequent_indent="    ")
    figures = ROW(row["path"], duration(row["wall"]), duration(row["seconds"]), lost)
    return [figures, *(line.replace(NO_BREAK, " ") for line in wrapped)]


def _told(term: str, times: float, seconds: float) -> str:
    """Return a term in words.

    >>> _told("fixed", 1.0, 9e-5), _told("small_copy", 160, 176e-6), _told("byte", 1e9, 0.02)
    ('90 us to begin', '176 us: 160 small copies at 1.1 us', '20 ms: 1 GB at 50.0 GB/s')
    """
    if term == "fixed":
        return f"{duration(seconds)} to begin"
    if term == "byte":
        return f"{duration(seconds)}: {decimal(times)} at {rate(times / seconds / 1e9)}"
    noun = term.replace("call", "2-D copy").replace("extent", "piece").replace("_", " ")
    return f"{duration(seconds)}: {count_of(round(times), noun)} at {duration(seconds / times)}"

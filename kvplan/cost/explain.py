"""Explain the choice of a path: every candidate, its expected time, and the terms of that time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from kvplan.base.numbers import decimal, duration, rate
from kvplan.cost.model import NS, Candidate, beside_of, features
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, DeviceProfile
from kvplan.cost.statistics import Counted

LEAST_SHARE = 0.01  # smallest share of a candidate's time that is shown
PARTS = 3  # terms of a candidate's time that are shown, the largest first
WIDTH, LEAST_WIDTH = 80, 40  # columns of the text
COLUMNS = (15, 9, 8, 8)  # widths of the path and of its figures
NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=[0-9]) (?=\S+$)")  # between the last number and its unit
WORDS = {
    "fixed": "to begin", "run": "run", "byte": "byte", "small_copy": "small copy", "large_copy": "large copy",
    "call": "2-D copy", "row": "row", "small_extent": "small piece", "large_extent": "large piece",
}  # fmt: skip
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


class Share(NamedTuple):
    """The time that one term of the cost model adds to the time of a path.

    Attributes:
        term: name of the term, such as ``"run"`` or ``"byte"``; see :data:`kvplan.cost.profile.TERMS`.
        times: how many such runs, bytes or calls the plan has.
        seconds: the time that all of these take.
    """

    term: str
    times: float
    seconds: float


def shares(path: str, plan: Explained) -> list[Share]:
    """Split a path's time, from submit until the caller knows the end, into terms, the largest first.

    >>> from kvplan.cost.profile import default
    >>> from kvplan.cost.statistics import GroupFacts
    >>> counts = [(GroupFacts(1 << 16, 16, 0, {"kernel": (1, 1 << 16)}), 16)]
    >>> [(share.term, share.times) for share in shares("kernel", Explained(counts, "load", default(), Policy()))]
    [('fixed', 1.0), ('byte', 1048576), ('run', 16)]
    """
    costs, counts = beside_of(path, *plan[1:]).wall, features(path, plan.counts)
    made = [Share(term, times, NS * times * costs[term]) for term, times in zip(TERMS[path], counts, strict=False)]
    return sorted(made, key=lambda share: -share.seconds)


def told(share: Share) -> str:
    """Return a share in words.

    >>> told(Share("fixed", 1.0, 9e-5)), told(Share("small_copy", 160, 176e-6)), told(Share("byte", 1e9, 0.02))
    ('90 us to begin', '176 us: 160 small copies at 1.1 us', '20 ms: 1 GB at 50.0 GB/s')
    """
    if share.term == "fixed":
        return f"{duration(share.seconds)} {WORDS['fixed']}"
    if share.term.endswith("byte"):
        gbps = share.times / share.seconds / 1e9 if share.seconds else 0.0
        return f"{duration(share.seconds)}: {decimal(share.times)} at {rate(gbps)}"
    word = WORDS[share.term]
    plural = word if share.times == 1 else f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{duration(share.seconds)}: {share.times:,.0f} {plural} at {duration(share.seconds / share.times)}"


def reason(candidate: Candidate, plan: Explained) -> str:
    """Return the largest terms of a candidate's time in words, or the reason why it cannot move the plan."""
    if candidate.refused:
        return f"cannot: {candidate.refused}"
    found = [share for share in shares(candidate.path, plan) if share.times and share.seconds > 0]
    words = [told(share) for share in found[:PARTS]]
    other = candidate.wall - sum(share.seconds for share in found)
    if other > LEAST_SHARE * candidate.wall:
        words.append(f"+{duration(other)} by the policy or narrow words")
    return ", ".join(words)


def verdict(found: Sequence[Candidate], policy: Policy) -> str:
    """Return a sentence that says why the first candidate is taken.

    >>> a, b = Candidate("kernel", wall=1e-4), Candidate("staged", wall=1.5e-4)
    >>> verdict([a, b], Policy())
    'kernel is taken: staged, the next, takes 1.50 times as long'
    >>> verdict([b, a], Policy())
    'staged is taken: kernel is as fast, within the 3 % that choices are not made by'
    """
    able = [one for one in found if not one.refused]
    if not able:
        return "no path serves this plan"
    first, others = able[0], sorted(able[1:], key=lambda one: one.score)
    if not others:
        return f"{first.path} is taken: no other path serves this plan"
    ratio = others[0].score / max(first.score, 1e-12)
    if ratio < 1.0:
        return f"{first.path} is taken: {others[0].path} is as fast, within the 3 % that choices are not made by"
    if policy.overlap == "idle":
        return f"{first.path} is taken: {others[0].path}, the next, takes {ratio:.2f} times as long"
    return (
        f"{first.path} is taken: {others[0].path}, the next, costs {ratio:.2f} times as much, its time and what "
        f"{policy.overlap} loses beside it"
    )


def facts(found: Sequence[Candidate], plan: Explained) -> dict[str, Any]:
    """Return the explanation as a dict for JSON; times are in seconds."""
    return {
        "overlap": plan.policy.overlap,
        "verdict": verdict(found, plan.policy),
        "profile": {name: getattr(plan.profile, name) for name in ("gpu", "driver", "link", "how", "made", "note")},
        "candidates": [{**asdict(one), "score": one.score, "terms": _terms(one, plan)} for one in found],
    }


def _terms(one: Candidate, plan: Explained) -> list[dict[str, Any]]:
    """Return the terms of a candidate's wall time; the last term, "other", is the remaining time."""
    if one.refused or one.path not in TERMS:
        return []
    made = shares(one.path, plan)
    other = Share("other", 1.0, one.wall - sum(share.seconds for share in made))
    return [share._asdict() for share in (*made, other)]


def explain(found: Sequence[Candidate], plan: Explained, width: int = WIDTH) -> str:
    """Return candidates as text of ``width`` columns, at least 40; see :meth:`kvplan.Executor.candidates`."""
    width, profile = max(width, LEAST_WIDTH), plan.profile
    lines = _wrapped(f"profile: {profile.kind}, {profile.link}, {profile.how}", width)
    if profile.note:
        lines += _wrapped(f"note: {profile.note}", width)
    beside = "nothing" if plan.policy.overlap == "idle" else plan.policy.overlap
    lines += [f"route:   {ROUTE_WORDS[plan.route]}", f"beside:  {beside}", "", _row("path", "in all", "GPU", "compute")]
    for one in found:
        lost = f"-{duration(one.compute_seconds)}" if one.compute_seconds else "-"
        lines.append(_row(one.path, *("-" * 3 if one.refused else (duration(one.wall), duration(one.seconds), lost))))
        lines += _wrapped(reason(one, plan), width, "    ")
    return "\n".join([*lines, "", *_wrapped(verdict(found, plan.policy), width)])


def _row(*cells: str) -> str:
    """Return the line of a path and its figures.

    >>> _row("copy_engine_2d", "2.68 ms", "2.09 ms", "-")
    'copy_engine_2d   2.68 ms 2.09 ms       -'
    """
    return cells[0].ljust(COLUMNS[0]) + "".join(map(str.rjust, cells[1:], COLUMNS[1:]))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap text; it breaks at commas, unless the text between two commas is longer than a line.

    >>> _wrapped("20 ms: 1 GB at 50.0 GB/s, 90 us to begin", 28)
    ['20 ms: 1 GB at 50.0 GB/s,', '90 us to begin']
    """
    from textwrap import wrap

    fits = width - len(indent)
    held = (part.replace(" ", NO_BREAK) if len(part) < fits else _UNIT.sub(NO_BREAK, part) for part in text.split(", "))
    wrapped = wrap(", ".join(held), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in wrapped]

"""Explain the choice of a path: every candidate, its expected time, and the terms of that time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from kvplan.base.numbers import decimal, duration, rate
from kvplan.cost.model import NS, Candidate, features
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, DeviceProfile
from kvplan.cost.statistics import Statistics

LEAST_SHARE = 0.01  # smallest share of a candidate's time that is shown
PARTS = 3  # terms of a candidate's time that are shown, the largest first
WIDTH, LEAST_WIDTH = 80, 40  # columns of the text
# Widths of the path and of its five figures, the wide table first; 0 puts the path on a line of its own.
COLUMNS = ((20, 9, 9, 9, 7, 11), (15, 9, 8, 8, 7, 9), (0, 8, 8, 8, 7, 9))
NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=[0-9]) (?=\S+$)")  # between the last number and its unit
WORDS = {
    "fixed": "to begin", "run": "run", "byte": "byte", "small_copy": "small copy", "small_byte": "byte of small copies",
    "large_copy": "large copy", "large_byte": "byte of large copies", "call": "2-D copy", "row": "row",
    "small_extent": "small piece", "large_extent": "large piece",
}  # fmt: skip
ROUTE_WORDS = {
    "load": "from the host", "store": "to the host", "device": "within the GPU", "push": "to another GPU",
    "pull": "from another GPU",
}  # fmt: skip


# A plan as explanations take it: its statistics; or, by layers, the statistics of each group of layers.
Counts = Statistics | Sequence[Statistics]


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


def shares(path: str, plan: Counts, profile: DeviceProfile) -> list[Share]:
    """Split a path's time, from submit until the caller knows the end, into terms, the largest first.

    No compute runs beside the path. The plan is given by its statistics, or by those of its groups of layers.

    >>> from kvplan.cost.profile import default
    >>> from kvplan.cost.statistics import Pieces
    >>> plan = Statistics("load", 1 << 20, 1, 16, 16, Pieces.of(16, 1 << 20), 1, 16, Pieces(), Pieces(), 0)
    >>> [(share.term, share.times) for share in shares("kernel", plan, default())]
    [('fixed', 1.0), ('byte', 1048576), ('run', 16)]
    """
    pieces = [plan] if isinstance(plan, Statistics) else plan
    costs = profile.costs[pieces[0].route][path].wall
    begun, *counts = map(sum, zip(*(features(path, piece) for piece in pieces), strict=True))
    made = [Share(term, count, NS * count * costs[term])
            for term, count in zip(TERMS[path], (min(begun, 1.0), *counts), strict=True)]  # fmt: skip
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


def reason(candidate: Candidate, plan: Counts, profile: DeviceProfile) -> str:
    """Return the largest terms of a candidate's time in words, or the reason why it cannot move the plan."""
    if candidate.refused:
        return f"cannot: {candidate.refused}"
    first = [f"{duration(candidate.first_group)} until the first layers arrive"] if candidate.groups > 1 else []
    found = [share for share in shares(candidate.path, plan, profile) if share.times and share.seconds > 0]
    words = [told(share) for share in found[:PARTS]]
    other = candidate.wall - sum(share.seconds for share in found)
    if abs(other) > LEAST_SHARE * candidate.wall:
        why = "in the sequence of layers, by the policy" if candidate.groups > 1 else "by the policy"
        words.append(f"{'+' if other > 0 else '-'}{duration(abs(other))} {why}, narrow words or more groups")
    return ", ".join(words + first)


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


def facts(found: Sequence[Candidate], plan: Counts, profile: DeviceProfile, policy: Policy) -> dict[str, Any]:
    """Return the explanation as a dict for JSON; times are in seconds."""
    return {
        "overlap": policy.overlap,
        "verdict": verdict(found, policy),
        "profile": {name: getattr(profile, name) for name in ("gpu", "driver", "link", "how", "made", "note")},
        "candidates": [
            {**asdict(one), "score": one.score, "terms": _terms(one, plan, profile)}
            for one in found
        ],
    }  # fmt: skip


def _terms(one: Candidate, plan: Counts, profile: DeviceProfile) -> list[dict[str, Any]]:
    """Return the terms of a candidate's wall time; the last term, "other", is the remaining time."""
    if one.refused or one.path not in TERMS:
        return []
    made = shares(one.path, plan, profile)
    other = Share("other", 1.0, one.wall - sum(share.seconds for share in made))
    return [share._asdict() for share in (*made, other)]


def explain(
    found: Sequence[Candidate], plan: Counts, profile: DeviceProfile, policy: Policy, width: int = WIDTH
) -> str:
    """Return candidates as text of ``width`` columns, at least 40; see :meth:`kvplan.Executor.candidates`.

    Args:
        found: the candidates.
        plan: statistics of the plan; for a plan that is submitted ``by_layer``, those of each group of layers, as
            :func:`kvplan.cost.by_layer.statistics_by_layer` returns them.
        profile: profile of the device, or of the GPU and its peer.
        policy: the policy.
        width: columns of the text.
    """
    width = max(width, LEAST_WIDTH)
    lines = _wrapped(f"profile: {profile.kind}, {profile.link}, {profile.how}", width)
    if profile.note:
        lines += _wrapped(f"note: {profile.note}", width)
    beside = "nothing" if policy.overlap == "idle" else policy.overlap
    pieces = [plan] if isinstance(plan, Statistics) else plan
    lines.append(f"route:   {ROUTE_WORDS[pieces[0].route]}")
    if len(pieces) > 1:
        lines.append(f"layers:  {len(pieces)} groups, one after another")
    lines += [f"beside:  {beside}", ""]
    lines += _row("path", ("in all", "GPU", "CPU", "SMs", "compute"), width)
    for one in found:
        lost = f"-{duration(one.compute_seconds)}" if one.compute_seconds else "-"
        times = (duration(value) for value in (one.wall, one.seconds, one.cpu_seconds))
        lines += _row(one.path, ("-",) * 5 if one.refused else (*times, f"{one.sm_share:.1%}", lost), width)
        lines += _wrapped(reason(one, plan, profile), width, "    ")
    return "\n".join([*lines, "", *_wrapped(verdict(found, policy), width)])


def _row(path: str, figures: Sequence[str], width: int) -> list[str]:
    """Return the line of a path and its figures; if both do not fit, the path has a line of its own.

    >>> _row("copy_engine_2d", ("2.68 ms", "2.09 ms", "2.28 ms", "0.0%", "-"), 40)
    ['copy_engine_2d', ' 2.68 ms 2.09 ms 2.28 ms   0.0%        -']
    """
    named, *columns = next((one for one in COLUMNS if sum(one) <= width), COLUMNS[-1])
    told = "".join(f"{figure:>{column}}" for figure, column in zip(figures, columns, strict=True))
    return [f"{path:{named}}{told}"] if named else [path, told]


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

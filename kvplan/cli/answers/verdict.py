"""The verdict on a pair of layouts: runs, path, predicted time, whether bytes arrive, and which order is better."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvplan.advise.advise import NEAR
from kvplan.advise.host_order import pricing_for
from kvplan.base.numbers import binary, count_of, duration
from kvplan.cli.answers.difference import NAMES, Difference
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy
from kvplan.cost.store import profile_of
from kvplan.plan.plan import direction_of

PATHS = {"--sizes": "sizes", "--src-sizes": "src_sizes", "--dst-sizes": "dst_sizes", "--dtype": "dtype",
         "--src-device": "src_device", "--dst-device": "dst_device"}  # fmt: skip


class Times(NamedTuple):
    """The predicted times of a transfer of the pair.

    Attributes:
        what: the transfer in words.
        candidates: the paths, the taken one first; those that cannot move it are left out.
    """

    what: str
    candidates: tuple[Candidate, ...]


def times_of(found: Difference, profile_name: str | None, policy: Policy) -> Times | None:
    """Predict a transfer of the pair by every path; None if it does not compile, or no profile has its costs."""
    if found.made is None:
        return None
    profile, where = profile_of(profile_name)
    route = direction_of(found.src, found.dst)
    pricing = pricing_for(found.src, found.dst.device, profile, directions=(route,), policy=policy)
    if pricing is None or pricing.routes != (route,):
        return None
    ranked = pricing.ranked(route, found.made.program)
    what = f"{route} of {count_of(pricing.tokens, 'token')}, blocks in no order, {where or f'as on {profile.kind}'}"
    return Times(what, tuple(one for one in ranked if not one.refused))


def verdict_rows(found: Difference, times: Times | None, verified: bool | None) -> Iterator[tuple[str, str]]:
    """Return the verdict as rows of words.

    Args:
        found: the difference of the pair.
        times: the predicted times, or None.
        verified: whether every byte arrived; None if that was not tried.
    """
    if found.made is None:
        yield "compiles", f"no: {found.refused}"
    else:
        program = found.made.program
        low, high = program.run_nbytes
        size = binary(low) if low == high else f"{binary(low)} to {binary(high)}"
        yield "runs", f"{count_of(program.runs, 'run')} of {size} a unit of {program.unit_words}"
        if times is not None:
            best = times.candidates[0]
            yield "path", f"{best.path}, {duration(best.wall)}: {times.what}"
        else:
            yield "path", "no cost model for transfers between these devices"
        arrived = {True: "every byte arrived, there and back", False: "a byte did NOT arrive: see Verification"}
        yield "verified", "not tried: see Verification" if verified is None else arrived[verified]
    yield "better order", _better(found)


def _better(found: Difference) -> str:
    advice = found.advice
    if advice is None:
        return "not searched (--no-advice)"
    if not advice.orders:
        return f"none: {count_of(advice.tried, 'order')} tried for {NAMES[advice.change]}"
    best = advice.orders[0]
    said = f"for {NAMES[advice.change]}: {best.notation}, blocks of {count_of(best.block_tokens, 'token')}"
    if best.price is None or advice.price is None:
        return f"{said}; {count_of(best.numbers.runs, 'run')} a unit"
    saves = advice.price.seconds / best.price.seconds
    gain = f"{saves:.2f} times as fast" if saves > 1 + NEAR else "as fast, with fewer runs"
    return f"{said}; {duration(best.price.seconds)} instead of {duration(advice.price.seconds)}, {gain}"


Bar = tuple[str, float, str]  # a label, seconds, and seconds in words


def path_bars(times: Times | None) -> list[Bar]:
    """Return a bar for each path that can move the pair, the taken one first."""
    return [(one.path, one.wall, duration(one.wall)) for one in (() if times is None else times.candidates)]


def order_bars(found: Difference) -> list[Bar]:
    """Return a bar for the present order and for each better one; none if there is no better one, or no cost model."""
    advice = found.advice
    if advice is None or advice.price is None or not advice.orders:
        return []
    mine = getattr(found, advice.change)
    named = [(f"now: {mine.notation}, blocks of {mine.block_tokens}", advice.price)]
    named += [(f"{order.notation}, blocks of {order.block_tokens}", order.price) for order in advice.orders
              if order.price is not None]  # fmt: skip
    return [(label, price.seconds, duration(price.seconds)) for label, price in named]


def commands_of(args: argparse.Namespace) -> list[str]:
    """Return the commands that print the content of the page; folders of files are left out, which are private."""
    sides = [called(side) for side in (args.source, args.destination) if side is not None]
    options: list[str] = []
    for option, name in PATHS.items():
        value = getattr(args, name)
        if isinstance(value, dict):
            value = ",".join(f"{axis}={size}" for axis, size in value.items())
        options += [option, value] if value is not None else []
    if len(sides) == 1:
        return [shlex.join(["kvplan", "inspect", *sides])] if not options else []
    options += ["--reinterpret"] * args.reinterpret
    costs = [*(["--profile", args.profile] if args.profile else []),
             *(["--overlap", args.overlap] if args.overlap != "idle" else [])]  # fmt: skip
    blocks = [word for name in ("blocks", "src", "dst") for word in _ids(name, getattr(args, name))]
    made = [["diff"], ["explain", *blocks, *(costs if blocks else [])]]
    return [shlex.join(["kvplan", name, *sides, *options, *rest]) for name, *rest in made]


def _ids(name: str, given: list[range] | None) -> list[str]:
    if given is None:
        return []
    words = (f"{some.start}-{some.stop - 1}" if len(some) > 1 else str(some.start) for some in given)
    return [f"--{name}", ",".join(words)]


def called(source: str) -> str:
    """Return the name of a file without its folders, which are private; return a notation unchanged."""
    return Path(source).name if Path(source).is_file() else source

"""The results of the demo: facts for JSON, and a screen of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvplan.base.numbers import count_of, exact, number_ranges
from kvplan.cli.answers.layout_facts import UNIT, picked
from kvplan.cli.demo_run.round_trip import DESTROYED, Outcome, Speed
from kvplan.cli.screen.printing import fact_table, number_table
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.allocate import allocate
from kvplan.plan.copy_program import compile  # noqa: A004

NEIGHBOURS = 16  # blocks of the example that merges
LAYOUT = ("notation", "sizes", "dtype", "device", "block_tokens", "block_nbytes", "nbytes")


def facts_of(outcome: Outcome, missing: list[str], seconds: float) -> dict[str, Any]:
    """Return the results of the demo. Units are in the names; GB are 10^9 bytes.

    ``descriptors`` counts the copies per direction: by rows of one (layer, part, token, head), by runs of the
    program, and after merging. ``speed`` compares a larger copy of the same program with a memcpy.

    Args:
        outcome: outcome of the demo.
        missing: reasons why better engines were not used.
        seconds: duration of the whole demo.
    """
    trip, program = outcome.trip, outcome.trip.store
    transfers = {"store": trip.stored, "load": trip.loaded}
    return {
        "passed": outcome.passed,
        "engine": outcome.engine,
        "missing": missing,
        "versions": outcome.versions,
        "model": outcome.model or None,
        "compared": outcome.compared,
        "equal": all(outcome.equal.values()),
        "num_requests": len(trip.moves),
        "new_tokens": outcome.new_tokens or None,
        "requests": [
            {
                "id": move.request,
                "cached_tokens": move.cached_tokens,
                "generated_before": move.generated,
                "old_blocks": move.old,
                "host_blocks": move.host,
                "new_blocks": move.new,
                "equal": outcome.equal[move.request],
            }
            for move in trip.moves
        ],
        "old_blocks_destroyed": trip.destroyed,
        "control": None if outcome.control_changed is None else {"requests_changed": outcome.control_changed},
        "layouts": {"cache": picked(program.src, LAYOUT), "pool": picked(program.dst, LAYOUT)},
        "program": picked(program, (*UNIT, "alignment")),
        "units": trip.units,
        "nbytes": trip.stored.nbytes,
        "descriptors": {"rows": trip.rows, "before": program.runs * trip.units, "after": trip.descriptors},
        "neighbours": _neighbours(program.src),
        "transfers": {
            name: picked(result, ("nbytes", "seconds", "path"))
            for name, result in transfers.items()
            if result is not None
        },
        "speed": None if outcome.speed is None else _speed(outcome.speed),
        "seconds": seconds,
    }


def _speed(speed: Speed) -> dict[str, Any]:
    ours, plain = (speed.nbytes / seconds / 1e9 for seconds in (speed.kvplan_seconds, speed.memcpy_seconds))
    rates = {"kvplan_gb_per_s": ours, "memcpy_gb_per_s": plain, "ratio": ours / plain}
    return {**picked(speed, ("nbytes", "units", "threads")), "best_of": speed.repeats, **rates}


def _neighbours(cache: KVLayout) -> dict[str, int]:
    """Return the copies of consecutive blocks into a pool of the cache's own layout, before and after merging."""
    blocks = min(NEIGHBOURS, cache.num_blocks)
    program = compile(cache, allocate(cache.notation, like=cache, num_blocks=blocks))
    after = program.plan(range(blocks), range(blocks)).descriptors()
    return {"blocks": blocks, "before": program.runs * blocks, "after": len(after.size)}


def screen_of(outcome: Outcome, facts: dict[str, Any]) -> Iterator[Any]:
    """Yield the sections of the screen. This needs rich."""
    yield _section("What happened", fact_table((f"{k}.", step) for k, step in enumerate(_story(outcome, facts), 1)))
    moved = [
        (
            move.request,
            str(move.cached_tokens),
            _few(move.old),
            _few(move.host),
            _few(move.new),
            "yes" if outcome.equal[move.request] else "NO",
        )
        for move in outcome.trip.moves
    ]
    header = ("", "tokens", "in the cache", "in the host pool", "back in the cache", "same result")
    yield _section("Where the blocks were (block ids)", number_table(header, moved, right=[1]))
    layouts = fact_table((name, _layout_text(layout)) for name, layout in facts["layouts"].items())
    yield _section("The two layouts (dims from outermost to innermost)", layouts)
    yield _section("The copy program from cache to pool, compiled once", fact_table(_program_text(facts)))
    yield _verdict(outcome, facts)


def _story(outcome: Outcome, facts: dict[str, Any]) -> list[str]:
    trip, model = outcome.trip, outcome.model
    requests, blocks = count_of(len(trip.moves), "request"), count_of(trip.units, "block")
    moved = exact(trip.stored.nbytes)
    store = f"Stored their {blocks}, {moved}, into a host pool whose blocks hold {trip.store.dst.block_tokens} tokens "
    store += f"instead of {trip.store.src.block_tokens}."
    destroy = f"Overwrote the {blocks} with 0x{DESTROYED:02X}"
    if not model:
        return [
            f"Filled a cache of plain {outcome.engine} tensors with random numbers: {requests}, no engine.",
            store,
            f"{destroy}, and checked that nothing was left.",
            "Loaded the data back, into different blocks.",
            "Compared every byte with its old value.",
        ]
    start = f"Started continuous batching of transformers {outcome.versions['transformers']} on the CPU, with a small "
    start += f"Llama of random weights ({model['layers']} layers, {model['kv_heads']} KV heads of {model['head_dim']}, "
    start += f"{model['dtype']}),"
    made = sorted({move.generated for move in trip.moves})
    changed = f"{facts['control']['requests_changed']} of {requests}"
    generated = number_ranges(made, ", ")
    return [
        f"{start} and generated {count_of(outcome.new_tokens, 'token')} for {requests}.",
        f"Started it again, and paused it after {generated} of {outcome.new_tokens} tokens.",
        store,
        f"{destroy}: the engine would have read NaN.",
        "Loaded the data back into different blocks, wrote those into the engine's block tables, and let it continue.",
        "Compared the tokens with those of the undisturbed run.",
        f"As a control, did all of this again without the load: {changed} gave different tokens.",
    ]


def _layout_text(layout: dict[str, Any]) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in layout["sizes"].items())
    block = f"{layout['block_tokens']} tokens, {exact(layout['block_nbytes'])}"
    return f"{layout['notation']}\n{sizes}, {layout['dtype']}\na block: {block}"


def _program_text(facts: dict[str, Any]) -> list[tuple[str, str]]:
    program, descriptors, units = facts["program"], facts["descriptors"], facts["units"]
    low, high = program["run_nbytes"]
    none = " (here none are)" * (descriptors["before"] == descriptors["after"])
    near = facts["neighbours"]
    merging = f"{near['before']:,} before, {near['after']:,} after"
    runs = f"{count_of(program['runs'], 'run')} of {low:,}{f' to {high:,}' * (low != high)} bytes"
    return [
        (
            "unit",
            f"{program['unit_tokens']} tokens, {exact(program['unit_nbytes'])}: the largest piece of both blocks",
        ),
        ("runs", f"{runs} a unit, each contiguous on both sides"),
        ("this transfer", f"{count_of(units, 'unit')}, {exact(facts['nbytes'])}"),
        ("copies", f"{descriptors['rows']:,} if every (layer, part, token, head) were a copy of its own"),
        ("", f"{descriptors['before']:,} descriptors before merging, one a run"),
        ("", f"{descriptors['after']:,} descriptors after merging those adjacent on both sides{none}"),
        ("neighbours", f"{near['blocks']} neighbouring blocks into a pool of the cache's own layout: {merging}"),
    ]


def _verdict(outcome: Outcome, facts: dict[str, Any]) -> Any:
    from rich.text import Text

    equal, total = sum(outcome.equal.values()), len(outcome.equal)
    took = f" ({facts['seconds']:.1f} s)"
    if outcome.passed:
        return Text(f"PASS: {outcome.compared} are equal in all {count_of(total, 'request')}{took}", "bold green")
    if outcome.control_changed == 0:
        why = "nothing changed even without the load, so equal tokens prove nothing"
    else:
        why = f"{outcome.compared} are equal in only {equal} of {count_of(total, 'request')}"
    return Text(f"FAIL: {why}{took}", "bold red")


def _section(title: str, content: Any) -> Any:
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, "bold"), content)


def _few(ids: list[int]) -> str:
    """Return block ids as text, in order; of many ids only the first two and the last one."""
    return " ".join(map(str, ids if len(ids) <= 4 else [*ids[:2], "..", ids[-1]]))

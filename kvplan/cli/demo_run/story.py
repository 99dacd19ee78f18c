"""What the demo shows: its facts as JSON, and for people a screen of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kvplan
from kvplan.base.numbers import binary, count_of, exact, number_ranges
from kvplan.cli.demo_run.round_trip import DESTROYED, Outcome
from kvplan.cli.screen.printing import fact_table, number_table

NEIGHBOURS = 16  # blocks of the example that merges


def facts_of(outcome: Outcome, missing: list[str], seconds: float) -> dict[str, Any]:
    """Everything the demo found out; units are in the names, GB are 10^9 bytes.

    Args:
        missing: why better engines were passed over.
        seconds: that the whole demo took.

    The keys are the document that ``--json`` prints. ``descriptors`` counts the contiguous copies of one way: one a
    row of (layer, part, token, head), one a run of the program, and after merging. ``transfers`` are the ones that the
    requests made, ``speed`` is a larger copy of the same program beside a memcpy of as many bytes.
    """
    trip, speed = outcome.trip, outcome.speed
    program = trip.store
    transfers = {"store": trip.stored, "load": trip.loaded}
    kvplan_rate, memcpy_rate = (speed.nbytes / taken / 1e9 for taken in (speed.kvplan_seconds, speed.memcpy_seconds))
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
        "layouts": {"cache": _layout_facts(program.src), "pool": _layout_facts(program.dst)},
        "program": {
            "unit_tokens": program.unit_tokens,
            "unit_nbytes": program.unit_nbytes,
            "runs": program.runs,
            "run_nbytes": list(program.run_nbytes),
            "alignment": program.alignment,
        },
        "units": trip.units,
        "nbytes": trip.stored.nbytes,
        "descriptors": {"rows": trip.rows, "before": program.runs * trip.units, "after": trip.descriptors},
        "neighbours": _neighbours(program.src),
        "transfers": {
            name: {"nbytes": result.nbytes, "seconds": result.seconds, "path": result.path}
            for name, result in transfers.items()
            if result is not None
        },
        "speed": {
            "nbytes": speed.nbytes,
            "units": speed.units,
            "threads": speed.threads,
            "best_of": speed.repeats,
            "kvplan_gb_per_s": kvplan_rate,
            "memcpy_gb_per_s": memcpy_rate,
            "ratio": kvplan_rate / memcpy_rate,
        },
        "seconds": seconds,
    }


def _neighbours(cache: kvplan.KVLayout) -> dict[str, int]:
    """Neighbouring blocks into a pool of the cache's own layout: copies before merging and after."""
    blocks = min(NEIGHBOURS, cache.num_blocks)
    program = kvplan.compile(cache, kvplan.allocate(cache.notation, like=cache, num_blocks=blocks))
    after = program.plan(range(blocks), range(blocks)).descriptors()
    return {"blocks": blocks, "before": program.runs * blocks, "after": len(after.size)}


def _layout_facts(layout: kvplan.KVLayout) -> dict[str, Any]:
    return {
        "notation": layout.notation,
        "sizes": layout.sizes,
        "dtype": layout.dtype,
        "device": layout.device,
        "block_tokens": layout.block_tokens,
        "block_nbytes": layout.block_nbytes,
        "nbytes": layout.nbytes,
    }


def screen_of(outcome: Outcome, facts: dict[str, Any]) -> Iterator[Any]:
    """What a person is shown, piece by piece; needs rich."""
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
    yield _section("Speed", fact_table(_speed_text(facts)))
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
            "Compared every byte with what it was.",
        ]
    start = f"Started continuous batching of transformers {outcome.versions['transformers']} on the CPU, with a small "
    start += f"Llama of random weights ({model['layers']} layers, {model['kv_heads']} KV heads of {model['head_dim']}, "
    start += f"{model['dtype']}),"
    made = sorted({move.generated for move in trip.moves})
    changed = f"{facts['control']['requests_changed']} of {requests}"
    generated = number_ranges(made, ", ")
    return [
        f"{start} and generated {count_of(outcome.new_tokens, 'token')} for {requests}.",
        f"Started it again, and paused it in mid-flight: {generated} of {outcome.new_tokens} tokens were made.",
        store,
        f"{destroy}: the engine would have read NaN.",
        "Loaded the data back into different blocks, entered those in the engine's block tables, and let it go on.",
        "Compared the tokens with those of the undisturbed run.",
        f"As a control, did it all again without the load: {changed} came out different.",
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
        ("unit", f"{program['unit_tokens']} tokens, {exact(program['unit_nbytes'])}: what blocks of both are made of"),
        ("runs", f"{runs} a unit, each contiguous on both sides"),
        ("this transfer", f"{count_of(units, 'unit')}, {exact(facts['nbytes'])}"),
        ("copies", f"{descriptors['rows']:,} if every (layer, part, token, head) were copied by itself"),
        ("", f"{descriptors['before']:,} descriptors before merging, one a run"),
        ("", f"{descriptors['after']:,} descriptors after merging those adjacent on both sides{none}"),
        ("neighbours", f"{near['blocks']} neighbouring blocks into a pool of the cache's own layout: {merging}"),
    ]


def _speed_text(facts: dict[str, Any]) -> list[tuple[str, str]]:
    speed = facts["speed"]
    rows = [
        (name, f"{binary(each['nbytes'])} in {each['seconds'] * 1e6:,.0f} us (too little to tell a speed)")
        for name, each in facts["transfers"].items()
    ]
    size = f"{count_of(speed['units'], 'unit')} in random order, {binary(speed['nbytes'])}"
    how = f"{count_of(speed['threads'], 'thread')}, best of {speed['best_of']}"
    return [
        *rows,
        ("at size", f"the same program on larger caches: {size}, {how}"),
        ("kvplan", f"{speed['kvplan_gb_per_s']:.2f} GB/s"),
        ("memcpy", f"{speed['memcpy_gb_per_s']:.2f} GB/s: numpy's copy of as many bytes in order, as many threads"),
        ("ratio", f"{speed['ratio']:.2f} times the speed of memcpy"),
    ]


def _verdict(outcome: Outcome, facts: dict[str, Any]) -> Any:
    from rich.text import Text

    equal, total = sum(outcome.equal.values()), len(outcome.equal)
    took = f" ({facts['seconds']:.1f} s)"
    if outcome.passed:
        return Text(f"PASS: {outcome.compared} are equal in all {count_of(total, 'request')}{took}", "bold green")
    if outcome.control_changed == 0:
        why = "even without the load nothing changed, so that equal tokens prove nothing"
    else:
        why = f"{outcome.compared} are equal in only {equal} of {count_of(total, 'request')}"
    return Text(f"FAIL: {why}{took}", "bold red")


def _section(title: str, content: Any) -> Any:
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, "bold"), content)


def _few(ids: list[int]) -> str:
    """Block ids in order, the middle left out where there are many."""
    return " ".join(map(str, ids if len(ids) <= 4 else [*ids[:2], "..", ids[-1]]))

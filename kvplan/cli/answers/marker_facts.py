"""Facts of markers that moved from one layout to another and back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvplan.base.numbers import count_of, exact
from kvplan.cli.answers.layout_facts import picked, unwritten_facts
from kvplan.layout.kvlayout import KVLayout

VERIFIED = ("ok", "rounds", "wrong_nbytes", "wrong", "watched_nbytes", "stray", "stray_nbytes")


def verify_facts(src: KVLayout, dst: KVLayout, blocks: int | None, *, reinterpret: bool = False) -> dict[str, Any]:
    """Move markers to the other layout and back, and return the facts of both directions.

    Raises:
        IncompatibleLayoutsError: the layouts do not hold the same cache.
        LayoutError: a block is too large, or the system gives no memory for the layouts.
    """
    from kvplan.memory.reserve import reserve
    from kvplan.plan.copy_program import compile_quietly
    from kvplan.verification.verification import Verification
    from kvplan.verification.verify import block_counts, number_of_blocks, verify

    compile_quietly(src, dst, reinterpret=reinterpret)  # a pair that does not compile needs no memory
    counts = block_counts(src, dst, number_of_blocks(blocks))
    here, there = reserve(src), reserve(dst)
    drawn = random.Random(0)  # noqa: S311  # the same blocks each time
    ids = [drawn.sample(range(side.num_blocks), some) for side, some in zip((src, dst), counts, strict=True)]

    def found(one: Verification) -> dict[str, Any]:
        stray = None if one.stray is None else asdict(one.stray)
        return picked(one, VERIFIED) | {"stray": stray, "unwritten": unwritten_facts(one.unwritten)}

    out = verify(here, there, blocks=(ids[0], ids[1]), beside="poison", reinterpret=reinterpret)
    back = verify(there, here, blocks=(ids[1], ids[0]), beside="poison", reinterpret=reinterpret)
    return {
        "src": _side(src, ids[0]),
        "dst": _side(dst, ids[1]),
        "nbytes": out.nbytes,
        "ok": out.ok and back.ok,
        "there": found(out),
        "back": found(back),
    }


def _side(layout: KVLayout, blocks: Sequence[int]) -> dict[str, Any]:
    return {"notation": layout.notation, "blocks": list(blocks), **picked(layout, ("num_blocks", "block_tokens"))}


def verify_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of both directions as rows of words."""
    return [
        ("from", _side_words(facts["src"])),
        ("to", _side_words(facts["dst"])),
        ("markers", f"{exact(facts['nbytes'])} each way, in CPU memory"),
        ("there", _found(facts["there"])),
        ("back", _found(facts["back"])),
    ]


def _side_words(side: dict[str, Any]) -> str:
    moved = f"{len(side['blocks']):,} of {count_of(side['num_blocks'], 'block')}"
    return f"{side['notation']}\n{moved} of {count_of(side['block_tokens'], 'token')}"


def _found(direction: dict[str, Any]) -> str:
    if not direction["ok"]:
        return f"wrong: {direction['wrong']}"
    watched = direction["watched_nbytes"]
    around = f"; {exact(watched)} around it unchanged" if watched else ""
    never = "".join(f"; {heads['text']}" for heads in direction["unwritten"])
    return f"every byte arrived where it belongs{around}{never}"

"""``kvplan verify``: markers from one layout to another and back."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvplan.base.numbers import count_of, exact
from kvplan.cli.arguments.sources import add_pair, pair_of
from kvplan.cli.plan import count
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, show
from kvplan.layout.kvlayout import KVLayout

EXAMPLES = """examples:
  kvplan verify examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml
  kvplan verify "kv block token head dim" "block kv head token dim" \\
      --sizes block=64,token=16,head=8,dim=128 --blocks 4

Both are laid out in CPU memory by the strides they are written down with.
Blocks are drawn from all there are: 8, or as many as hold 4 MiB; with --blocks
up to 64 MiB. Exit code 1: a byte did not arrive, or one beside was written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    parser.add_argument(
        "--blocks", type=count, metavar="N", help="so many of the larger blocks (default 8, or as many as hold 4 MiB)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.verify)")


def run(args: argparse.Namespace) -> int:
    """Move markers there and back, and print what arrived."""
    facts = verify_facts(*pair_of(args), args.blocks)
    ok = facts["there"]["ok"] and facts["back"]["ok"]
    if args.json:
        print_json("verify", facts)
    else:
        show(fact_table(verify_rows(facts)))
    return 0 if ok else 1


def verify_facts(src: KVLayout, dst: KVLayout, blocks: int | None) -> dict[str, Any]:
    """Both directions as plain facts."""
    from kvplan.memory.reserve import reserve
    from kvplan.plan.copy_program import compile  # noqa: A004
    from kvplan.verification.verify import Verification, block_counts, number_of_blocks, verify

    compile(src, dst)  # before memory is asked for: it may be refused
    counts = block_counts(src, dst, number_of_blocks(blocks))
    here, there = reserve(src), reserve(dst)
    drawn = random.Random(0)  # noqa: S311  # the same blocks each time
    ids = [drawn.sample(range(side.num_blocks), some) for side, some in zip((src, dst), counts, strict=True)]

    def found(one: Verification) -> dict[str, Any]:
        return {
            "ok": one.ok,
            "rounds": one.rounds,
            "wrong_nbytes": one.wrong_nbytes,
            "wrong": one.wrong,
            "watched_nbytes": one.watched_nbytes,
            "stray": None if one.stray is None else asdict(one.stray),
            "stray_nbytes": one.stray_nbytes,
        }

    out = verify(here, there, blocks=(ids[0], ids[1]), beside="poison")
    back = verify(there, here, blocks=(ids[1], ids[0]), beside="poison")
    return {
        "src": _side(src, ids[0]),
        "dst": _side(dst, ids[1]),
        "nbytes": out.nbytes,
        "ok": out.ok and back.ok,
        "there": found(out),
        "back": found(back),
    }


def _side(layout: KVLayout, blocks: Sequence[int]) -> dict[str, Any]:
    return {
        "notation": layout.notation,
        "blocks": list(blocks),
        "num_blocks": layout.num_blocks,
        "block_tokens": layout.block_tokens,
    }


def verify_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Both directions in words, a row a fact."""
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
    beside = f"; of {exact(watched)} beside, none changed" if watched else ""
    return f"every byte arrived where it belongs{beside}"

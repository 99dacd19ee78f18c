"""``kvplan plan``: print the copies that move some blocks from one layout to another."""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import chain
from typing import Any

from kvplan.cli.answer import Address, Answer, Part, facts, table
from kvplan.cli.arguments import SIDES, add_pair, add_shared, block_ids, pair_of, whole
from kvplan.cli.screen import Tell
from kvplan.errors import BlockIndexError
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import compile_quietly
from kvplan.plan.plan import Plan

EXAMPLES = """examples:
  kvplan plan examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first_64.toml \\
      --src 0-10 --dst 0,1,3 --dst-skip 1 --limit all"""
SHOWN_SIZES = 8


class Side(Part, sources=(KVLayout,), names="notation device addresses"):
    """One side of a pair."""

    def __str__(self) -> str:
        return f"{self.notation} on {self.device}{ADDRESSES[self.addresses]}"


class Size(Part):
    """Descriptors of one size.

    Attributes:
        count: their number.
        nbytes: bytes of each.
    """

    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.count}*[{self.nbytes}]"


class Row(Part):
    """One descriptor.

    Attributes:
        src, dst: addresses.
        nbytes: bytes.
        src_region, dst_region: numbers of regions, by address.
        src_offset, dst_offset: bytes from the first byte of the region.
    """

    shown = "src, region: src_region, offset: src_offset, dst, region : dst_region, offset : dst_offset, nbytes"
    src: Address
    dst: Address
    nbytes: int
    src_region: int
    src_offset: int
    dst_region: int
    dst_offset: int


class PlanAnswer(Answer, sources=(Plan,), names="src dst direction nbytes units"):
    """The copies that move some blocks from one layout to another.

    Attributes:
        src, dst: both sides.
        unit_tokens: tokens of a unit; sub-blocks where all content is opaque.
        unit: a unit in words: 16 tokens, 2 sub-blocks, or 1 whole block.
        runs: contiguous copies before merging.
        descriptors: of the flat lowering.
        strided_rows: of the strided lowering.
        sizes: all descriptors by size, the largest first.
        rows: the first descriptors, in order of destination.
    """

    schema = "plan/1"
    shown = "src, dst, direction, units, unit, nbytes, runs, descriptors, sizes: words, strided_rows"
    src: Side
    dst: Side
    unit_tokens: int
    unit: str
    runs: int
    descriptors: int
    strided_rows: int
    sizes: tuple[Size, ...]
    rows: tuple[Row, ...]
    words: str = field(kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the sums and the first descriptors."""
        return [facts(self), *([table(self.rows)] if self.rows else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    add_shared(parser, "--reinterpret")
    for side, done in zip(SIDES, ("read", "written"), strict=True):
        words = f"blocks {done}, in order of tokens: 0,1,4-7"
        parser.add_argument(f"--{side}", type=block_ids, required=True, metavar="IDS", help=words)
    for side in SIDES:
        words = f"units, not tokens, to skip in the first {side.upper()} block"
        parser.add_argument(f"--{side}-skip", type=whole, default=0, metavar="UNITS", help=words)
    parser.add_argument("--max-bytes", type=whole, metavar="N", help="bytes that no descriptor may exceed")
    shown = "descriptors shown (default 10), or all"
    parser.add_argument("--limit", type=_limit, default=10, metavar="ROWS", help=shown)


def run(args: argparse.Namespace, tell: Tell) -> PlanAnswer:
    """Return the plan. Its descriptors are in order of destination."""
    import numpy as np

    tell(None, "planning")
    src, dst = pair_of(args)
    program = compile_quietly(src, dst, reinterpret=args.reinterpret)
    ids = listed_ids("--src", args.src, src), listed_ids("--dst", args.dst, dst)
    plan = program.plan(*ids, args.src_skip, args.dst_skip)
    descriptors = plan.descriptors(args.max_bytes)
    first = np.argsort(descriptors.dst)[: args.limit]
    sizes = by_size(descriptors.size.tolist())
    starts = [sorted(region.address for region in side.regions) for side in (src, dst)]
    rows = []
    for source, destination, nbytes in zip(*(column[first].tolist() for column in descriptors), strict=True):
        places = (_in_region(address, known) for address, known in zip((source, destination), starts, strict=True))
        rows.append(Row(Address(source), Address(destination), nbytes, *chain(*places)))
    return PlanAnswer.of(
        plan,
        src=Side.of(src),
        dst=Side.of(dst),
        unit_tokens=program.unit_tokens,
        unit=program.program.unit_words,
        runs=program.runs * plan.units,
        descriptors=len(descriptors.size),
        strided_rows=len(plan.strided()),
        sizes=sizes,
        words=sizes_in_words(sizes),
        rows=tuple(rows),
    )


def _in_region(address: int, starts: Sequence[int]) -> tuple[int, int]:
    region = bisect_right(starts, address) - 1
    return region, address - starts[region]


def listed_ids(option: str, ids: Sequence[range], layout: KVLayout) -> list[int]:
    """Return all ids. The ends of ranges are checked first, so that a mistyped range takes no memory."""
    last, most = max(some.stop for some in ids) - 1, layout.num_blocks - 1
    if last > most:
        raise BlockIndexError(f"{option} names block {last}; blocks there are 0 to {most}")
    return list(chain(*ids))


def by_size(nbytes: Iterable[int]) -> tuple[Size, ...]:
    """Return the number of descriptors of each size, the largest first."""
    return tuple(Size(count, size) for size, count in sorted(Counter(nbytes).items(), reverse=True))


def sizes_in_words(sizes: Sequence[Size]) -> str:
    """Return the number and the bytes of descriptors, the largest first.

    >>> sizes_in_words([Size(3, 8192), Size(1, 512)])
    '3*[8192] | 1*[512]'
    """
    more = len(sizes) - SHOWN_SIZES
    return " | ".join(map(str, sizes[:SHOWN_SIZES])) + f" | and {more:,} smaller sizes" * (more > 0)


def _limit(text: str) -> int | None:
    """Read the number of rows to show; None is for all rows."""
    return None if text == "all" else whole(text)

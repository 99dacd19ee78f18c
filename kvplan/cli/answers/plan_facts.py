"""Facts of a plan: its blocks, the sizes of its descriptors, and the paths that could take it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import count_of, exact
from kvplan.errors import BlockIndexError, KVPlanError
from kvplan.layout.kvlayout import KVLayout

if TYPE_CHECKING:
    from kvplan.cost.policy import Policy
    from kvplan.plan.copy_program import CopyProgram
    from kvplan.plan.plan import Plan

SHOWN_SIZES = 8


def listed_ids(option: str, ids: Sequence[range], layout: KVLayout) -> list[int]:
    """Return all ids. The ends of ranges are checked first, so that a mistyped range takes no memory."""
    for some in ids:
        if some.stop > layout.num_blocks:
            raise BlockIndexError(
                f"{option} names block {some.stop - 1}; blocks there are 0 to {layout.num_blocks - 1}"
            )
    return list(chain(*ids))


def by_size(nbytes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (count, size) of the descriptors of each size, the largest first.

    >>> by_size([512, 4096, 512])
    [(1, 4096), (2, 512)]
    """
    return [(len(list(alike)), size) for size, alike in groupby(sorted(nbytes, reverse=True))]


def run_lengths(runs: Sequence[tuple[int, int]]) -> str:
    """Return (count, size) pairs as text. Neighbouring sizes that occur once share a bracket.

    >>> run_lengths([(3, 8192), (1, 4096), (1, 512), (2, 256)])
    '3*[8192] | [4096, 512] | 2*[256]'
    """
    pieces: list[str] = []
    for alone, group in groupby(runs[:SHOWN_SIZES], key=lambda run: run[0] == 1):
        if alone:
            pieces.append(f"[{', '.join(str(size) for _, size in group)}]")
        else:
            pieces.extend(f"{times}*[{size}]" for times, size in group)
    if len(runs) > SHOWN_SIZES:
        pieces.append(f"and {len(runs) - SHOWN_SIZES:,} smaller sizes")
    return " | ".join(pieces) or "none"


def plan_of(args: argparse.Namespace, program: CopyProgram) -> Plan | None:
    """Return a plan of the blocks that were given, or None if no blocks were given.

    Raises:
        BlockIndexError: a block that the layout does not have.
        KVPlanError: blocks of one side only, or a profile without blocks.
    """
    src, dst = args.src or args.blocks, args.dst or args.blocks
    if src is None and dst is None:
        if args.profile is not None:
            raise KVPlanError("--profile is for a plan; give --blocks, or --src and --dst")
        return None
    if src is None or dst is None:
        raise KVPlanError(f"blocks of {'SRC' if src is None else 'DST'} are missing; give --blocks, or --src and --dst")
    return program.plan(
        listed_ids("--src" if args.src else "--blocks", src, program.src),
        listed_ids("--dst" if args.dst else "--blocks", dst, program.dst),
    )


def candidates_of(
    plan: Plan, name: str | None, policy: Policy, width: int = 80, *, by_layer: bool = False,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Return the candidates of a plan as facts, and as text after a line about the plan.

    Args:
        plan: the plan whose paths are compared.
        name: name of a profile; None for this GPU's profile, or a shipped one without a GPU, which the text says.
        policy: limits, and the compute that runs at the same time.
        width: width of the text in columns.
        by_layer: whether the plan is submitted ``by_layer``.
    """
    from kvplan.cost.explain import Explained, explain, facts
    from kvplan.cost.model import candidates
    from kvplan.cost.policy import layer_edges
    from kvplan.cost.statistics import counted
    from kvplan.cost.store import profile_of

    profile, where = profile_of(name)
    alike = by_size(plan.descriptors().size.tolist())
    count = sum(times for times, _ in alike)
    about = {"direction": plan.direction, "nbytes": plan.nbytes, "units": plan.units, "descriptors": count,
             "sizes": [{"count": times, "nbytes": nbytes} for times, nbytes in alike]}  # fmt: skip
    text = f"plan: {plan.direction} of {count_of(plan.units, 'unit')}, {exact(plan.nbytes)}\n"
    text += f"{where}\n" if where else ""
    text += f"{count_of(count, 'descriptor')}: {run_lengths(alike)}\n\n"
    if plan.direction not in profile.costs:
        why = f"no cost model for a {plan.direction!r} plan; a profile has {', '.join(profile.costs)}"
        return {**about, "candidates": [], "verdict": why}, f"{text}{why}"
    edges = layer_edges(plan.nbytes, len(plan.layers)) if by_layer else ()
    counts, most = counted(plan, edges), policy.staging_bytes
    granule = max((one.granule_nbytes for one, _ in counts), default=0)
    refused = {}
    if most is not None and granule > most:
        refused["staged"] = f"a block takes {granule:,} bytes of the ring, which has {most:,}"
    if len(edges) > 2:
        text += f"layers:  {len(edges) - 1} groups, one after another\n"
    explained = Explained(counts, plan.direction, profile, policy)
    found = candidates(counts, plan.direction, profile, policy, refused)
    return {**about, **facts(found, explained)}, f"{text}{explain(found, explained, width)}"

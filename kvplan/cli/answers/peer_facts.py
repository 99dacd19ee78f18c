"""The way of a model's cache to another GPU, here or on another machine: ``kvplan inspect --model --peer``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from kvplan.base.quoting import quoted
from kvplan.catalogue.layouts import NamedLayout
from kvplan.cli.answers.layout_facts import UNIT, extent_facts, picked
from kvplan.cli.arguments.values import rate
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.plan import Plan, unite

# A kernel's share of the rate of one large copy, for runs of 256 bytes or more: two H200s, NVLink
# (docs/guides/gpu-to-gpu.md).
KERNEL_SHARE = 0.94


class Link(NamedTuple):
    """A link between two GPUs.

    Attributes:
        words: name of the link in the answer.
        gbps: rate of one large copy, 10^9 bytes per second; None for NIXL, whose wire is not known.
    """

    words: str
    gbps: float | None


LINKS = {
    "nvlink": Link("NVLink 4 of H100 and H200", 390.0),  # measured: two H200s, 18 links (docs/guides/gpu-to-gpu.md)
    "pcie": Link("PCIe 5 x16, assumed", 50.0),  # about 0.8 of the 63 GB/s of its lanes, not measured
    "nixl": Link("NIXL", None),
}


class Peer(NamedTuple):
    """The other GPU of a question about a model.

    Attributes:
        link: the link between both GPUs.
        layout: layout of attention on the other GPU; states have a separate layout.
        block_tokens: rows per block there.
    """

    link: Link
    layout: NamedLayout
    block_tokens: int


def link(text: str) -> Link:
    """Read a link between two GPUs: a word, or the rate of one large copy in GB/s.

    >>> link("nvlink").gbps, link("150")
    (390.0, Link(words='as given', gbps=150.0))
    """
    known = LINKS.get(text.lower())
    if known is not None:
        return known
    try:
        return Link("as given", rate(text))
    except argparse.ArgumentTypeError:
        words = ", ".join(map(repr, LINKS))
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a link between GPUs; give {words}, or a rate in GB/s above 0"
        ) from None


def peer_facts(peer: Peer) -> dict[str, Any]:
    """Return the layout of the other GPU and the rates of the link, 10^9 bytes per second, if they are known."""
    gbps = peer.link.gbps
    return {
        "layout": peer.layout.name,
        "notation": peer.layout.notation,
        "block_tokens": peer.block_tokens,
        "link": peer.link.words,
        **({} if gbps is None else {"link_gbps": gbps, "kernel_gbps": gbps * KERNEL_SHARE}),
    }


def group_to_peer(program: CopyProgram) -> dict[str, Any]:
    """Return the copies of one unit of a cache group, from a GPU to its peer."""
    return {
        **picked(program, UNIT),
        "extents": extent_facts(program.program, "dst"),
        "alignment": program.alignment,
    }


def context_to_peer(nbytes: int, runs: int, gbps: float, host_gbps: float) -> dict[str, Any]:
    """Return the copies of a request, and its seconds over the link and through the host.

    Through the host, the bytes cross the host's link twice, one direction after the other.
    """
    seconds = nbytes / (gbps * 1e9)
    return {
        "runs": runs,
        "seconds": seconds,
        "kernel_seconds": seconds / KERNEL_SHARE,
        "host_seconds": 2 * nbytes / (host_gbps * 1e9),
    }


def context_by_nixl(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the descriptors of a prompt over NIXL, and its pieces if it is packed.

    Args:
        plans: one plan for each cache group.
    """
    from kvplan.agents.packed.ring import GPU_SLOTS
    from kvplan.cost.wires.wire_model import crossing_of
    from kvplan.plan.chunks import Chunks, outlines_of

    whole = unite(plans)  # of layouts without memory, whose addresses may be the same
    descriptors = sum(crossing_of(plan).descriptors for plan in plans)
    return {
        "descriptors": descriptors,
        "descriptor_nbytes": whole.nbytes // max(descriptors, 1),
        "pieces": len(Chunks(outlines_of(whole), GPU_SLOTS.nbytes).chunks),
        "piece_nbytes": GPU_SLOTS.nbytes,
    }


def scattered(count: int, pool: int) -> list[int]:
    """Return block ids in a pool that is used up: no two that follow each other are neighbours in the pool.

    >>> scattered(4, 8), scattered(2, 4)
    ([0, 5, 2, 7], [0, 3])
    """
    step = max(int(pool * 0.618), 1)
    while gcd(step, pool) > 1:
        step += 1
    return [block * step % pool for block in range(count)]

"""The doctor's check of the links between GPUs, in one finding however many GPUs there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from kvplan.cuda.peers import PeerLink
from kvplan.measure.facts import Facts
from kvplan.measure.finding import Finding, unknown

MOST_GROUPS = 4  # groups of GPUs that a finding names one by one

Group = tuple[int, ...]


def peers(facts: Facts) -> Finding | None:
    """Check which GPUs reach each other's memory, and by which link.

    >>> links = (PeerLink(0, 1, True, nvlinks=18), PeerLink(1, 0, True, nvlinks=18))
    >>> peers(Facts(peers=links)).what
    'cuda:0 and cuda:1 reach one another by NVLink, 18 links'
    """
    if facts.peers is None:
        return unknown(facts, "peers", "peers") if "peers" in facts.missing else None
    what = _in_words(facts.peers)
    if not all(link.reachable for link in facts.peers):
        advice = (
            "see nvidia-smi topo -p2p r; switch MIG off; let a virtual machine have GPUs of one NVSwitch or PCIe "
            "switch; else go through host memory: a store, then a load"
        )
        return Finding("peers", "warning", what, advice)
    if any(link.nvlinks is None for link in facts.peers):
        advice = "let a container have NVML: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Finding("peers", "unknown", what, advice)
    translated = (facts.iommu or "").startswith("DMA") and not facts.hypervisor
    if translated and not all(link.nvlinks for link in facts.peers):
        what += f"; over PCIe, CUDA does not support that behind an IOMMU that translates ({facts.iommu})"
        return Finding("peers", "warning", what, "switch the IOMMU off, or put iommu=pt on the kernel's command line")
    return Finding("peers", "ok", what)


def _in_words(links: Sequence[PeerLink]) -> str:
    """Tell all pairs. Pairs of one kind are told by groups of GPUs; the kind with most groups is "all other pairs"."""
    kinds: dict[_Kind, set[Group]] = {}  # the pairs that are of one kind in both directions
    uneven: list[str] = []
    by_pair = {(link.gpu, link.peer): link for link in links}
    for gpu, peer in sorted(pair for pair in by_pair if pair[0] < pair[1]):
        there, back = by_pair[gpu, peer], by_pair[peer, gpu]
        if _kind(there) == _kind(back):
            kinds.setdefault(_kind(there), set()).add((gpu, peer))
        else:
            uneven.append(f"{_one_way(there)}, {_one_way(back)}")
    groups = {kind: _groups(pairs) for kind, pairs in kinds.items()}
    ordered = sorted(groups, key=lambda kind: (len(groups[kind]), len(kinds[kind])))
    told = [_told(groups[kind], kind) for kind in ordered]
    if told and (uneven or len(told) > 1):
        told[-1] = f"all other pairs {ordered[-1].words}"
    return "; ".join([*uneven[:MOST_GROUPS], *_more(uneven, "pairs differ by direction"), *told])


class _Kind(NamedTuple):
    reachable: bool
    words: str


def _kind(link: PeerLink) -> _Kind:
    if link.reachable:
        return _Kind(reachable=True, words=f"reach one another by {link.words}")
    return _Kind(reachable=False, words=f"cannot reach one another ({link.why})")


def _one_way(link: PeerLink) -> str:
    if link.reachable:
        return f"cuda:{link.gpu} reaches cuda:{link.peer} by {link.words}"
    return f"cuda:{link.gpu} cannot reach cuda:{link.peer} ({link.why})"


def _told(groups: Sequence[Group], kind: _Kind) -> str:
    first, *others = [_names(group) for group in groups[:MOST_GROUPS]]
    others += _more(groups, "groups of GPUs")
    return ", ".join(
        [f"{first} {kind.words}", *(f"{'so do' if kind.reachable else 'nor can'} {one}" for one in others)]
    )


def _more(listed: Sequence[object], what: str) -> list[str]:
    more = len(listed) - MOST_GROUPS
    return [f"{more} more {what} (see kvplan doctor --json)"] if more > 0 else []


def _groups(pairs: set[Group]) -> list[Group]:
    """Cover pairs with groups of GPUs, in each of which all pairs are given.

    >>> _groups({(0, 1), (0, 2), (1, 2), (2, 3)})
    [(0, 1, 2), (2, 3)]
    """
    gpus = sorted({gpu for pair in pairs for gpu in pair})
    groups, left = [], set(pairs)
    while left:
        group = min(left)
        for gpu in gpus:
            if gpu not in group and all((min(gpu, one), max(gpu, one)) in pairs for one in group):
                group = (*group, gpu)
        groups.append(tuple(sorted(group)))
        left -= set(combinations(groups[-1], 2))
    return groups


def _names(gpus: Sequence[int]) -> str:
    """Name GPUs, three or more in a row as a range.

    >>> _names([0, 1, 2, 3]), _names([0, 1]), _names([0, 2, 3, 4])
    ('cuda:0-3', 'cuda:0 and cuda:1', 'cuda:0 and cuda:2-4')
    """
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    named = []
    for run in runs:
        named += [f"cuda:{run[0]}-{run[-1]}"] if len(run) > 2 else [f"cuda:{gpu}" for gpu in run]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))

"""The doctor's check of the links between GPUs, in one finding however many GPUs there are."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.base.numbers import count_of
from kvplan.cuda.peers import PeerLink
from kvplan.measure.facts import Facts
from kvplan.measure.finding import Finding, unknown

MOST_PAIRS = 4  # pairs of GPUs of one kind that a finding names one by one


def peers(facts: Facts) -> Finding | None:
    """Check which GPUs reach each other's memory, and by which link.

    >>> links = (PeerLink(0, 1, True, nvlinks=18), PeerLink(1, 0, True, nvlinks=18))
    >>> peers(Facts(peers=links)).what
    'from every GPU to every other: by NVLink, 18 links'
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
        if "nvidia-ml-py" in facts.missing:
            advice = "pip install nvidia-ml-py"
        return Finding("peers", "unknown", what, advice)
    translated = (facts.iommu or "").startswith("DMA") and not facts.hypervisor
    if translated and not all(link.nvlinks for link in facts.peers):
        what += f"; over PCIe, CUDA does not support that behind an IOMMU that translates ({facts.iommu})"
        return Finding("peers", "warning", what, "switch the IOMMU off, or put iommu=pt on the kernel's command line")
    return Finding("peers", "ok", what)


def _in_words(links: Sequence[PeerLink]) -> str:
    """Tell all pairs by their links; of many pairs with one link, the first ones and their number."""
    kinds: dict[str, list[str]] = {}
    for link in links:
        words = f"by {link.words}" if link.reachable else f"no access ({link.why})"
        kinds.setdefault(words, []).append(f"cuda:{link.gpu} to cuda:{link.peer}")
    if len(kinds) == 1:
        return f"from every GPU to every other: {next(iter(kinds))}"
    return "; ".join(f"{_named(pairs)}: {words}" for words, pairs in kinds.items())


def _named(pairs: Sequence[str]) -> str:
    more = len(pairs) - MOST_PAIRS
    return ", ".join(pairs[:MOST_PAIRS]) + (f" and {count_of(more, 'more pair')}" if more > 0 else "")

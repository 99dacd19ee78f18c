"""The doctor, which finds from facts why transfers on this machine are slow, and says what to do.

A *problem* makes a path or much of the link unusable. A *warning* costs less. An *unknown* could not be determined. A
check is a function of the facts that yields its findings: none if it has no subject, such as a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvplan.base.numbers import binary, count_of
from kvplan.cuda.driver import BATCH_VERSION
from kvplan.cuda.peers import PeerLink
from kvplan.measure.facts import UNLIMITED, Facts, gather

__all__ = ["Facts", "Finding", "State", "examine", "gather"]

FIRST_DRIVER, FIRST_TRITON = 12000, (3, 3)
LITTLE_MEMORY = 1 << 30  # a smaller host pool holds a few requests of one model
QUEUES = 8  # hardware queues of a GPU by default; CUDA_DEVICE_MAX_CONNECTIONS sets 1 to 32
MOST_PAIRS = 4  # pairs of GPUs of one kind that a finding names one by one

State = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True)
class Finding:
    """The finding of one check.

    Attributes:
        name: name of the check.
        state: ``"ok"``, ``"warning"``, ``"problem"`` or ``"unknown"``.
        what: the finding in one line.
        advice: the remedy in one line; ``""`` if the state is ok, or no remedy is known.
    """

    name: str
    state: State
    what: str
    advice: str = ""


Verdict = tuple[State, str] | tuple[State, str, str] | None  # state, what, advice; None without a subject


def examine(facts: Facts) -> list[Finding]:
    """Return the findings, the driver first. A check without a subject, such as a GPU, is left out.

    >>> driver, *others = examine(Facts(cuda=13000, batch=True))
    >>> driver.state, driver.what
    ('ok', 'CUDA 13.0')
    >>> examine(Facts(locked=8 << 20))[0].what
    'no CUDA driver: only the host path works'
    """
    return [Finding(name, *verdict) for name, check in CHECKS.items() if (verdict := check(facts)) is not None]


def _unknown(facts: Facts, fact: str) -> Verdict:
    return "unknown", facts.missing.get(fact, "the system does not tell")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def driver(facts: Facts) -> Verdict:
    """Check that there is a driver for CUDA 12.0 or newer."""
    if facts.cuda is None:
        reason = facts.missing.get("cuda", "there is no CUDA driver")
        if reason.startswith("there is no CUDA driver"):
            advice = "install the NVIDIA driver (525 or newer); of a container: docker run --gpus all"
            return "problem", "no CUDA driver: only the host path works", advice
        advice = "update the NVIDIA driver to 525 or newer, or see what nvidia-smi and dmesg say of it"
        return "problem", f"{reason}: only the host path works", advice
    version = f"CUDA {_cuda(facts.cuda)}"
    if facts.machine is not None and facts.machine.driver:
        version += f", driver {facts.machine.driver}"
    if facts.cuda < FIRST_DRIVER:
        return "problem", f"{version}: 12.0 is needed", "update the NVIDIA driver to 525 or newer"
    return "ok", version


def gpu(facts: Facts) -> Verdict:
    """Check that the GPU exists."""
    if facts.cuda is None:
        return None
    if facts.machine is None:
        advice = "see nvidia-smi -L, and what CUDA_VISIBLE_DEVICES leaves visible"
        return "problem", facts.missing.get("machine", f"{facts.device} is not there"), advice
    place = f" at {facts.machine.pci}" if facts.machine.pci else ""
    return "ok", f"{facts.device}: {facts.machine.gpu or 'a GPU without a name'}{place}"


def batch(facts: Facts) -> Verdict:
    """Check that the driver has cuMemcpyBatchAsync; a driver without it may return success and NULL."""
    if facts.cuda is None or facts.batch is None:
        return None
    if facts.batch:
        return "ok", "cuMemcpyBatchAsync is there"
    singly = "the path copy_engine copies one by one"
    if facts.cuda < BATCH_VERSION:
        what = f"no cuMemcpyBatchAsync before CUDA 12.8: {singly}"
        return "warning", what, "update the NVIDIA driver to 570 or newer"
    what = f"the driver has no entry point of cuMemcpyBatchAsync, though 12.8 came with it: {singly}"
    return "warning", what, "update the NVIDIA driver; Policy(path='staged') needs no batches"


def link(facts: Facts) -> Verdict:
    """Check that the link has the highest generation and all lanes that are possible."""
    if facts.machine is None:
        return None
    now = facts.machine.link
    lanes, most_lanes, generation, most = now.width, now.most_width, now.generation, now.most_generation
    what = f"PCIe generation {generation or '?'} x{lanes or '?'} now, at most generation {most or '?'} "
    what += f"x{most_lanes or '?'}"
    if lanes is None or most_lanes is None or generation is None or most is None:
        advice = "as root: lspci -vv, LnkCap beside LnkSta"
        if "nvidia-ml-py" in facts.missing:
            advice = f"pip install nvidia-ml-py; or {advice}"
        return "unknown", f"{what}: NVML and sysfs do not tell all", advice
    if lanes < most_lanes:
        ceiling = "halves the ceiling" if 2 * lanes == most_lanes else f"leaves {lanes}/{most_lanes} of the ceiling"
        advice = f"reseat the card or check the BIOS slot setting: x{lanes} of x{most_lanes} {ceiling}"
        return "problem" if facts.busy else "warning", what, advice
    if generation < most and facts.busy:
        advice = "check the BIOS slot setting, risers and retimers; a PCIe error in dmesg lowers the generation too"
        return "problem", f"{what}, under load", advice
    if generation < most:
        why = f" ({facts.missing['busy']})" if "busy" in facts.missing else ""
        return "ok", f"{what}; an idle GPU lowers it, and nothing was copied{why}"
    return "ok", f"PCIe generation {generation} x{lanes}, all that GPU and slot can"


def peers(facts: Facts) -> Verdict:
    """Check which GPUs reach each other's memory, and by which link."""
    if facts.peers is None:
        return _unknown(facts, "peers") if "peers" in facts.missing else None
    what = _links(facts.peers)
    if not all(link.reachable for link in facts.peers):
        advice = (
            "see nvidia-smi topo -p2p r; switch MIG off; let a virtual machine have GPUs of one NVSwitch or PCIe "
            "switch; else go through host memory: a store, then a load"
        )
        return "warning", what, advice
    if any(link.nvlinks is None for link in facts.peers):
        container = "let a container have NVML: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "unknown", what, "pip install nvidia-ml-py" if "nvidia-ml-py" in facts.missing else container
    if (facts.iommu or "").startswith("DMA") and not all(link.nvlinks for link in facts.peers):
        what += f"; over PCIe, CUDA supports an IOMMU that translates ({facts.iommu}) in a virtual machine only"
        advice = "on a real machine: switch the IOMMU off, or put iommu=pt on the kernel's command line"
        return "warning", what, advice
    return "ok", what


def _links(links: Sequence[PeerLink]) -> str:
    """Tell all pairs by their links; of many pairs with one link, the first ones and their number.

    >>> _links((PeerLink(0, 1, True, nvlinks=18), PeerLink(1, 0, True, nvlinks=18)))
    'from every GPU to every other: by NVLink, 18 links'
    """
    kinds: dict[str, list[str]] = {}
    for link in links:
        words = f"by {link.words}" if link.reachable else f"no access ({link.why})"
        kinds.setdefault(words, []).append(f"cuda:{link.gpu} to cuda:{link.peer}")
    if len(kinds) == 1:
        return f"from every GPU to every other: {next(iter(kinds))}"
    more = {words: len(pairs) - MOST_PAIRS for words, pairs in kinds.items()}
    return "; ".join(
        ", ".join(pairs[:MOST_PAIRS])
        + (f" and {count_of(more[words], 'more pair')}" if more[words] > 0 else "") + f": {words}"
        for words, pairs in kinds.items()
    )  # fmt: skip


def numa(facts: Facts) -> Verdict:
    """Check that threads run, and new pages may lie, on the GPU's node."""
    if facts.machine is None:
        return None
    if facts.nodes is not None and len(facts.nodes) == 1:
        return "ok", "the host is one node"
    near = facts.machine.numa_node
    if near is None:
        return "unknown", "the node of the GPU is not known", "see NUMA Affinity of nvidia-smi topo -m"
    what = f"the GPU is on node {near}, this process"
    if facts.cpu_nodes is None or facts.memory_nodes is None:
        why = facts.missing.get("nodes") or facts.missing.get("allowed") or "the kernel does not tell"
        return "unknown", f"{what}: {why}"
    if near not in facts.memory_nodes:
        cpuset = f"let the cpuset have the node: docker run --cpuset-mems={near}"
        return "warning", f"{what} may have memory of {_named(facts.memory_nodes)} only", cpuset
    runs = f"{what} may run on {_named(facts.cpu_nodes)}"
    if set(facts.cpu_nodes) != {near}:
        return "warning", runs, f"numactl --cpunodebind={near} --membind={near}"
    return "ok", f"{runs} alone"


def _named(nodes: Iterable[int]) -> str:
    listed = [str(node) for node in nodes]
    return f"node{'s' * (len(listed) != 1)} {', '.join(listed) or 'unknown'}"


def connections(facts: Facts) -> Verdict:
    """Check the number of hardware queues. Streams that share a queue wait for each other."""
    if facts.cuda is None:
        return None
    if not (value := facts.connections):
        return "ok", f"CUDA_DEVICE_MAX_CONNECTIONS is not set: {QUEUES} hardware queues"
    what, advice = f"CUDA_DEVICE_MAX_CONNECTIONS={value}", "export CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts"
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= 32):
        return "warning", f"{what}; expected a number from 1 to 32", advice
    if int(value) < QUEUES:
        return "warning", f"{what}: loads, stores and compute wait for each other", advice
    return "ok", what


def iommu(facts: Facts) -> Verdict:
    """Check whether an IOMMU translates the GPU's addresses."""
    if facts.iommu is None:
        return None
    if not facts.iommu:
        return "ok", "none between GPU and memory"
    if facts.iommu.startswith("DMA"):
        what = f"it translates ({facts.iommu}) what the GPU reads and writes"
        return "warning", what, "put iommu=pt on the kernel's command line"
    return "ok", f"{facts.iommu}: nothing is translated"


def profile(facts: Facts) -> Verdict:
    """Check that the device profile in use was measured."""
    if facts.profile is None:
        return _unknown(facts, "profile") if "profile" in facts.missing else None
    if (how := facts.profile.how) == "default" or facts.profile.note:
        return "warning", f"{how}: {facts.profile.note or 'measured nowhere'}", "kvplan calibrate"
    return "ok", f"{how}: {facts.profile.of}"


def torch(facts: Facts) -> Verdict:
    """Check that torch is installed, and built for a CUDA version that the driver supports."""
    if "torch" not in facts.packages:
        what = f"{facts.missing.get('torch', 'not installed')}; needed for streams, events and tensors of a GPU"
        return "warning", what, "pip install torch triton"
    version = facts.packages["torch"] or "of unknown version"
    if facts.torch_cuda is None:
        return (
            "unknown",
            f"{version}; for which CUDA? {facts.missing.get('torch_cuda', 'its version.py does not tell')}",
        )
    built = f"{version}, built {f'for CUDA {facts.torch_cuda}' if facts.torch_cuda else 'without CUDA'}"
    if facts.cuda is None:
        return "ok", f"{built}; there is no driver for it" if facts.torch_cuda else built
    if not facts.torch_cuda:
        advice = "install a build for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return "problem", f"{built}: it makes no tensors on the GPU", advice
    if int(facts.torch_cuda.partition(".")[0] or 0) > facts.cuda // 1000:
        advice = f"update the NVIDIA driver, or install a torch for CUDA {facts.cuda // 1000}"
        return "problem", f"{built}; the driver serves {_cuda(facts.cuda)}", advice
    return "ok", built


def triton(facts: Facts) -> Verdict:
    """Check that Triton 3.3 or newer is installed."""
    need: State = "warning" if facts.cuda is None else "problem"
    advice = 'pip install "triton>=3.3"'
    if "triton" not in facts.packages:
        return need, f"{facts.missing.get('triton', 'not installed')}: no paths kernel and staged", advice
    version = facts.packages["triton"]
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(one.isdecimal() for one in numbers):
        return "unknown", f"{version or 'of unknown version'}; 3.3 is needed", advice
    if tuple(map(int, numbers)) < FIRST_TRITON:
        return need, f"{version}; 3.3 is needed by the paths kernel and staged", advice
    return "ok", version


def numba(facts: Facts) -> Verdict:
    """Check that numba is installed, and has a folder where it may write."""
    if "numba" not in facts.packages:
        what = f"{facts.missing.get('numba', 'not installed')}; plans are made by loops that it compiles"
        return "problem", what, 'pip install "numba>=0.60"'
    version = facts.packages["numba"] or "of unknown version"
    if facts.numba_cache is None:
        return "unknown", f"{version}; where it keeps loops: {facts.missing.get('numba_cache', '?')}"
    if not facts.numba_cache:
        what = f"{version}; no folder to keep loops in: each process compiles them anew, for seconds"
        return "warning", what, "export NUMBA_CACHE_DIR=/a/folder/that/may/be/written"
    return "ok", f"{version}, keeps loops in {facts.numba_cache}"


def locked(facts: Facts) -> Verdict:
    """Check the limit of locked memory. CUDA's pinned memory does not count for it, RDMA's does."""
    if facts.locked is None:
        return _unknown(facts, "locked")
    if facts.locked == UNLIMITED:
        return "ok", "no limit"
    what = f"at most {binary(facts.locked)}: CUDA pins more all the same, RDMA (UCX, NIXL) does not"
    return "warning", what, "ulimit -l unlimited, or docker run --ulimit memlock=-1"


def memory(facts: Facts) -> Verdict:
    """Check that there is enough host memory for a pinned pool."""
    if facts.ram is None:
        return _unknown(facts, "ram")
    every, room = facts.ram
    what = f"{binary(room)} of {binary(every)} available"
    advice = "stop what else holds memory, or make the pool smaller: pinned memory is never swapped"
    if facts.cgroup is not None and facts.cgroup[0] != UNLIMITED:
        most, used = facts.cgroup
        what += f"; the cgroup may have {binary(most)} and uses {binary(used)}"
        if most - used < room:
            room, advice = max(most - used, 0), "docker run --memory, or resources.limits.memory of the pod"
    if room < LITTLE_MEMORY:
        return "warning", f"{what}: a pool has room for {binary(room)}", advice
    return "ok", what


CHECKS: dict[str, Callable[[Facts], Verdict]] = {
    "driver": driver, "GPU": gpu, "batch copies": batch, "link": link, "peers": peers, "NUMA": numa,
    "connections": connections, "IOMMU": iommu, "profile": profile, "torch": torch, "Triton": triton, "numba": numba,
    "locked memory": locked, "host memory": memory,
}  # fmt: skip

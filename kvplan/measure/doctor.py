"""The doctor, which finds from facts why transfers on this machine are slow, and says what to do.

A *problem* makes a path or much of the link unusable. A *warning* costs less. An *unknown* could not be determined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvplan.base.numbers import binary
from kvplan.cuda.driver import BATCH_VERSION
from kvplan.measure.facts import Facts, gather
from kvplan.measure.finding import Finding, State, cuda_version, unknown
from kvplan.measure.host import UNLIMITED, numbers
from kvplan.measure.peer_links import peers
from kvplan.measure.software import numba, torch, triton

__all__ = ["Facts", "Finding", "State", "examine", "gather"]

FIRST_DRIVER = 12000
LITTLE_MEMORY = 1 << 30  # a smaller host pool holds a few requests of one model
QUEUES = 8  # hardware queues of a GPU by default; CUDA_DEVICE_MAX_CONNECTIONS sets 1 to 32


def examine(facts: Facts) -> list[Finding]:
    """Return the findings, the driver first. A check without a subject, such as a GPU, is left out.

    >>> driver, *others = examine(Facts(cuda=13000, batch=True))
    >>> driver.state, driver.what
    ('ok', 'CUDA 13.0')
    >>> examine(Facts(locked=8 << 20))[0].what
    'no CUDA driver: only the host path works'
    """
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


def cuda_driver(facts: Facts) -> Finding:
    """Check that there is a driver for CUDA 12.0 or newer."""
    if facts.cuda is None:
        reason = facts.missing.get("cuda", "there is no CUDA driver")
        if reason.startswith("there is no CUDA driver"):
            advice = "install the NVIDIA driver (525 or newer); of a container: docker run --gpus all"
            return Finding("driver", "problem", "no CUDA driver: only the host path works", advice)
        advice = "update the NVIDIA driver to 525 or newer, or see what nvidia-smi and dmesg say of it"
        return Finding("driver", "problem", f"{reason}: only the host path works", advice)
    version = f"CUDA {cuda_version(facts.cuda)}"
    if facts.machine is not None and facts.machine.driver:
        version += f", driver {facts.machine.driver}"
    if facts.cuda < FIRST_DRIVER:
        return Finding("driver", "problem", f"{version}: 12.0 is needed", "update the NVIDIA driver to 525 or newer")
    return Finding("driver", "ok", version)


def gpu(facts: Facts) -> Finding | None:
    """Check that the GPU exists."""
    if facts.cuda is None:
        return None
    if facts.machine is None:
        advice = "see nvidia-smi -L, and what CUDA_VISIBLE_DEVICES leaves visible"
        return Finding("GPU", "problem", facts.missing.get("machine", f"{facts.device} is not there"), advice)
    place = f" at {facts.machine.pci}" if facts.machine.pci else ""
    return Finding("GPU", "ok", f"{facts.device}: {facts.machine.gpu or 'a GPU without a name'}{place}")


def batch(facts: Facts) -> Finding | None:
    """Check that the driver has cuMemcpyBatchAsync; a driver without it may return success and NULL."""
    if facts.cuda is None or facts.batch is None:
        return None
    if facts.batch:
        return Finding("batch copies", "ok", "cuMemcpyBatchAsync is there")
    singly = "the path copy_engine copies one by one"
    if facts.cuda < BATCH_VERSION:
        what = f"no cuMemcpyBatchAsync before CUDA 12.8: {singly}"
        return Finding("batch copies", "warning", what, "update the NVIDIA driver to 570 or newer")
    what = f"the driver has no entry point of cuMemcpyBatchAsync, though 12.8 came with it: {singly}"
    return Finding("batch copies", "warning", what, "update the NVIDIA driver; Policy(path='staged') needs no batches")


def link(facts: Facts) -> Finding | None:
    """Check that the link has the highest generation and all lanes that are possible."""
    if facts.machine is None:
        return None
    now = facts.machine.link
    what = f"PCIe {_link(now.generation, now.width)} now, at most {_link(now.most_generation, now.most_width)}"
    if None in {now.generation, now.width, now.most_generation, now.most_width}:
        advice = "as root: lspci -vv, LnkCap beside LnkSta"
        if "nvidia-ml-py" in facts.missing:
            advice = f"pip install nvidia-ml-py; or {advice}"
        return Finding("link", "unknown", f"{what}: NVML and sysfs do not tell all", advice)
    lanes, most_lanes = now.width or 0, now.most_width or 0
    if lanes < most_lanes:
        ceiling = "halves the ceiling" if 2 * lanes == most_lanes else f"leaves {lanes}/{most_lanes} of the ceiling"
        advice = f"reseat the card or check the BIOS slot setting: x{lanes} of x{most_lanes} {ceiling}"
        return Finding("link", "problem" if facts.busy else "warning", what, advice)
    if (now.generation or 0) < (now.most_generation or 0):
        if not facts.busy:
            why = f" ({facts.missing['busy']})" if "busy" in facts.missing else ""
            return Finding("link", "ok", f"{what}; an idle GPU lowers it, and nothing was copied{why}")
        advice = "check the BIOS slot setting, risers and retimers; a PCIe error in dmesg lowers the generation too"
        return Finding("link", "problem", f"{what}, under load", advice)
    return Finding("link", "ok", f"PCIe {_link(now.generation, now.width)}, all that GPU and slot can")


def locked(facts: Facts) -> Finding:
    """Check the limit of locked memory. CUDA's pinned memory does not count for it, RDMA's does."""
    if facts.locked is None:
        return unknown(facts, "locked memory", "locked")
    if facts.locked == UNLIMITED:
        return Finding("locked memory", "ok", "no limit")
    what = f"at most {binary(facts.locked)}: CUDA pins more all the same, RDMA (UCX, NIXL) does not"
    return Finding("locked memory", "warning", what, "ulimit -l unlimited, or docker run --ulimit memlock=-1")


def memory(facts: Facts) -> Finding:
    """Check that there is enough host memory for a pinned pool."""
    if facts.ram is None:
        return unknown(facts, "host memory", "ram")
    every, room = facts.ram
    what = f"{binary(room)} of {binary(every)} available"
    advice = "stop what else holds memory, or make the pool smaller: pinned memory is never swapped"
    if facts.cgroup is not None and facts.cgroup[0] != UNLIMITED:
        most, used = facts.cgroup
        what += f"; the cgroup may have {binary(most)} and uses {binary(used)}"
        if most - used < room:
            room, advice = max(most - used, 0), "docker run --memory, or resources.limits.memory of the pod"
    if room < LITTLE_MEMORY:
        return Finding("host memory", "warning", f"{what}: a pool has room for {binary(room)}", advice)
    return Finding("host memory", "ok", what)


def shared(facts: Facts) -> Finding:
    """Check the free bytes of /dev/shm, which only shared pools use."""
    if facts.shared is None:
        return unknown(facts, "shared memory", "shared")
    every, free = facts.shared
    what = f"{binary(free)} of {binary(every)} free in /dev/shm"
    if free >= LITTLE_MEMORY:
        return Finding("shared memory", "ok", what)
    what += ": too little for a pool that processes share by name; others do not use it"
    advice = "docker run --shm-size=64g or --ipc=host; of a pod: an emptyDir of medium Memory at /dev/shm"
    return Finding("shared memory", "warning", what, advice)


def sockets(facts: Facts) -> Finding:
    """Check where agents listen, which decides whether those of other containers reach them."""
    what = f"KVPLAN_SOCKETS is {facts.sockets or 'not set'}"
    if facts.sockets_trouble:
        why, _, advice = facts.sockets_trouble.partition("; ")
        return Finding("sockets", "warning", f"{what}: {why}", advice)
    shared, alone = (
        "in all containers of this machine that mount it",
        "within one network; containers of Docker have one each",
    )
    return Finding("sockets", "ok", f"{what}: agents meet {shared if facts.sockets else alone}")


def number(facts: Facts) -> Finding | None:
    """Check that this process is not number 1: CUDA opens no handle between two processes of one number."""
    if not facts.first or facts.cuda is None:
        return None
    what = "this process is number 1 of its container: number 1 of another one does not open its GPU memory"
    advice = "docker run --init for one of the two, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return Finding("number", "warning", what, advice)


def numa(facts: Facts) -> Finding | None:
    """Check that threads run, and new pages lie, on the GPU's node."""
    if facts.machine is None:
        return None
    if facts.nodes is not None and len(facts.nodes) == 1:
        return Finding("NUMA", "ok", "the host is one node")
    near = facts.machine.numa_node
    if near is None:
        return Finding("NUMA", "unknown", "the node of the GPU is not known", "see NUMA Affinity of nvidia-smi topo -m")
    if facts.cpu_nodes is None or facts.memory_nodes is None:
        why = facts.missing.get("nodes") or facts.missing.get("allowed") or "the kernel does not tell"
        return Finding("NUMA", "unknown", f"the GPU is on node {near}; this process: {why}")
    bind = f"numactl --cpunodebind={near} --membind={near}"
    runs = f"the GPU is on node {near}, this process may run on {_nodes(facts.cpu_nodes)}"
    if near not in facts.memory_nodes:
        what = f"the GPU is on node {near}, this process may have memory of {_nodes(facts.memory_nodes)} only"
        cpuset = f"let the cpuset have the node: docker run --cpuset-mems={near}"
        return Finding("NUMA", "warning", what, cpuset)
    if set(facts.cpu_nodes) != {near}:
        return Finding("NUMA", "warning", runs, bind)
    if (elsewhere := _policy_nodes(facts.policy)) - {near}:
        what = f"the GPU is on node {near}, new pages go to {_nodes(sorted(elsewhere))} ({facts.policy})"
        return Finding("NUMA", "warning", what, bind)
    return Finding("NUMA", "ok", f"{runs} alone")


def connections(facts: Facts) -> Finding | None:
    """Check the number of hardware queues. Streams that share a queue wait for each other."""
    if facts.cuda is None:
        return None
    given = facts.connections
    if not given:
        return Finding("connections", "ok", f"CUDA_DEVICE_MAX_CONNECTIONS is not set: {QUEUES} hardware queues")
    what, advice = f"CUDA_DEVICE_MAX_CONNECTIONS={given}", "export CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts"
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= 32):
        return Finding("connections", "warning", f"{what}; expected a number from 1 to 32", advice)
    if int(given) < QUEUES:
        return Finding("connections", "warning", f"{what}: loads, stores and compute wait for each other", advice)
    return Finding("connections", "ok", what)


def iommu(facts: Facts) -> Finding | None:
    """Check whether an IOMMU translates the GPU's addresses."""
    if facts.iommu is None:
        return None
    if not facts.iommu:
        return Finding("IOMMU", "ok", "none between GPU and memory")
    if facts.iommu.startswith("DMA"):
        what = f"it translates ({facts.iommu}) what the GPU reads and writes"
        return Finding("IOMMU", "warning", what, "put iommu=pt on the kernel's command line")
    return Finding("IOMMU", "ok", f"{facts.iommu}: nothing is translated")


def profile(facts: Facts) -> Finding | None:
    """Check that the device profile in use was measured."""
    if facts.profile is None:
        return unknown(facts, "profile", "profile") if "profile" in facts.missing else None
    if (how := facts.profile.how) == "default" or facts.profile.note:
        return Finding("profile", "warning", f"{how}: {facts.profile.note or 'measured nowhere'}", "kvplan calibrate")
    return Finding("profile", "ok", f"{how}: {facts.profile.of}")


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    cuda_driver, gpu, batch, link, peers, numa, connections, iommu,
    profile, torch, triton, numba, locked, memory, shared, sockets, number,
)  # fmt: skip


def _link(generation: int | None, width: int | None) -> str:
    return f"generation {generation or '?'} x{width or '?'}"


def _nodes(which: Iterable[int]) -> str:
    listed = [str(node) for node in which]
    return f"node{'s' * (len(listed) != 1)} {', '.join(listed) or 'unknown'}"


def _policy_nodes(policy: str | None) -> set[int]:
    """Return the nodes of a policy such as ``bind:1``; an empty set for ``default`` and for an unknown policy."""
    try:
        return set(numbers((policy or "").partition(":")[2]))
    except ValueError:
        return set()

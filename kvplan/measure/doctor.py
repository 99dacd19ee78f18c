"""The doctor, which finds from facts why transfers on this machine are slow, and says what to do.

A *problem* makes a path or much of the link unusable. A *warning* costs less. An *unknown* could not be determined.
"""

from __future__ import annotations

import math
import os
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kvplan.base.numbers import binary
from kvplan.cost import store
from kvplan.cuda.driver import driver as cuda_driver
from kvplan.cuda.machine import ROOT, Machine
from kvplan.cuda.machine import machine as machine_of
from kvplan.cuda.peers import PeerLink, links
from kvplan.measure.rig import in_a_line

UNLIMITED = -1  # bytes
FIRST_DRIVER, FIRST_TRITON = 12000, [3, 3]
LITTLE_MEMORY = 1 << 30  # a smaller host pool holds a few requests of one model
QUEUES, MOST_QUEUES = 8, 32  # hardware queues of a GPU: by default, and at most
AWAKE_NBYTES, AWAKE_SECONDS = 64 << 20, 0.2  # of each copy that wakes the link, and of all
BESIDE = 8  # copies in flight while the link is read
PACKAGES = ("torch", "triton", "numba", "nvidia-ml-py")

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


@dataclass(frozen=True)
class ProfileInUse:
    """The device profile by which ``auto`` chooses a path.

    Attributes:
        how: ``"calibrated"`` on this machine, ``"shipped"``, or ``"default"``: measured nowhere.
        of: GPU, driver and link that were measured; the version of kvplan, and the date.
        note: a warning to the user, such as why another profile could not be read; or ``""``.
    """

    how: str
    of: str
    note: str


@dataclass(frozen=True)
class Facts:
    """Facts about a machine. A fact that could not be determined is None; ``missing`` says why.

    Sizes are in bytes; -1 (:data:`UNLIMITED`) is "no limit".

    Attributes:
        device: name of the GPU, such as ``"cuda:0"``.
        cuda: newest CUDA version that the driver supports, as CUDA writes it: 13000 is 13.0.
        batch: whether the driver has the entry point of cuMemcpyBatchAsync.
        machine: the GPU and its link.
        busy: whether the link was read while copies were in flight.
        peers: links of all ordered pairs of visible GPUs; None also if one GPU is visible.
        packages: versions of packages by the name to install.
        torch_cuda: the CUDA version that torch is built for, such as ``"13.0"``; ``""`` if torch has no CUDA.
        numba_cache: the folder of compiled loops; ``""`` if no folder may be written.
        locked: bytes of memory that this process may lock.
        ram: bytes of host memory: total, and available.
        cgroup: bytes of the cgroup, of version 2: the limit, and the use.
        nodes: NUMA nodes of the host.
        cpu_nodes: nodes on whose CPUs this process may run.
        memory_nodes: nodes on which this process may allocate memory.
        connections: value of CUDA_DEVICE_MAX_CONNECTIONS; ``""`` if it is not set.
        iommu: how the IOMMU translates the GPU's addresses; ``""`` if there is no IOMMU.
        profile: the device profile in use.
        missing: reasons by the name of a missing fact or package.
    """

    device: str = "cuda:0"
    cuda: int | None = None
    batch: bool | None = None
    machine: Machine | None = None
    busy: bool = False
    peers: tuple[PeerLink, ...] | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    numba_cache: str | None = None
    locked: int | None = None
    ram: tuple[int, int] | None = None
    cgroup: tuple[int, int] | None = None
    nodes: tuple[int, ...] | None = None
    cpu_nodes: tuple[int, ...] | None = None
    memory_nodes: tuple[int, ...] | None = None
    connections: str = ""
    iommu: str | None = None
    profile: ProfileInUse | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def gather(device: str = "cuda:0", *, busy: bool = False, root: Path = ROOT) -> Facts:
    """Gather the facts within milliseconds. Missing facts are None; no error is raised, and torch is not imported.

    Args:
        device: name of a GPU, such as ``"cuda:0"``.
        busy: whether to copy 64 MiB at a time for 0.2 seconds before the link is read, if an idle GPU has lowered it.
            The copies need the GPU's context, and 64 MiB of GPU memory and of pinned memory.
        root: root folder of the file system.

    >>> facts = gather()
    >>> facts.cuda is None or facts.cuda >= 12000
    True
    """
    missing: dict[str, str] = {}

    def ask(name: str, question: Callable[..., Any], *of: Any) -> Any:
        try:
            return question(*of)
        except metadata.PackageNotFoundError:
            missing[name] = "not installed"
            return None
        except Exception as error:  # the other facts are wanted, whatever goes wrong with this one
            missing[name] = in_a_line(error)
            return None

    entries = ask("cuda", cuda_driver)
    gpu = entries and ask("machine", lambda: machine_of(int(device.removeprefix("cuda:")), root=root))
    woken = ask("busy", _woken, int(device.removeprefix("cuda:")), root) if busy and gpu and _lowered(gpu) else None
    packages = {name: version for name in PACKAGES if (version := ask(name, metadata.version, name))}
    nodes, cpu_nodes, memory_nodes = ask("nodes", _nodes, root) or (None, None, None)
    return Facts(
        device=device, cuda=entries and entries.version, batch=entries and entries.cuMemcpyBatchAsync is not None,
        machine=woken or gpu, busy=woken is not None, peers=(entries and ask("peers", links)) or None,
        packages=packages, torch_cuda=ask("torch_cuda", _cuda_of_torch) if "torch" in packages else None,
        numba_cache=ask("numba_cache", _numba_cache), nodes=nodes, cpu_nodes=cpu_nodes, memory_nodes=memory_nodes,
        connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        iommu=gpu and ask("iommu", _iommu, root, gpu.pci), profile=gpu and ask("profile", _profile, gpu),
        missing=missing, locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], ram=ask("ram", _ram, root),
        cgroup=ask("cgroup", _cgroup, root),
    )  # fmt: skip


# Facts. These raise an error if the fact is missing.


def _lowered(gpu: Machine) -> bool:
    link = gpu.link
    pairs = (link.generation, link.most_generation), (link.width, link.most_width)
    return any(now and most and now < most for now, most in pairs)


def _woken(ordinal: int, root: Path) -> Machine:
    """Read the machine again, while copies are in flight."""
    from kvplan.cuda.device import Device

    device = Device(ordinal)
    cu = device.driver
    with device.current(), ExitStack() as stack:
        stream, event = device.stream(), device.event()
        memory, pinned = device.allocate(AWAKE_NBYTES), device.allocate_host(AWAKE_NBYTES)
        for end, what in ((cu.cuStreamDestroy_v2, stream), (device.free, memory), (device.free_host, pinned),
                          (cu.cuEventDestroy_v2, event), (cu.cuEventSynchronize, event)):  # fmt: skip
            stack.callback(end, what)
        until = time.perf_counter() + AWAKE_SECONDS
        while time.perf_counter() < until:
            device.copy(memory, pinned, AWAKE_NBYTES, stream)
            device.record(event, stream)
            device.synchronize(event)
        for _ in range(BESIDE):
            device.copy(memory, pinned, AWAKE_NBYTES, stream)
        device.record(event, stream)
        return machine_of(ordinal, root=root)


def _profile(gpu: Machine) -> ProfileInUse:
    profile = store.find(gpu)
    of = ", ".join(filter(None, [profile.gpu, profile.driver and f"driver {profile.driver}", profile.link]))
    return ProfileInUse(profile.how, f"{of} ({profile.made})", profile.note)


def _cuda_of_torch() -> str:
    """Read the version from the file that torch's build writes, because importing torch takes a second."""
    spec = find_spec("torch")
    written = Path(spec.origin or "").with_name("version.py") if spec else Path()
    return _matched(r"^cuda\b[^=\n]*= *(?:['\"]([\d.]+)['\"]|None)", written)[1] or ""


def _numba_cache() -> str:
    """Return the first of the folders that numba tries which may be written or made; ``""`` if there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    for folder in (*([Path(chosen)] if chosen else []), Path(__file__).parents[1] / "__pycache__", home / "numba"):
        nearest = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return str(folder)
    return ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _matched(pattern: str, path: Path) -> re.Match[str]:
    """Search a small file."""
    match = re.search(pattern, _text(path), re.MULTILINE)
    if not match:
        raise ValueError(f"{path} does not tell")
    return match


def _numbers(listed: str) -> list[int]:
    """Read a list of numbers in the kernel's notation, such as ``"0-2,8"``."""
    ranges = [part.partition("-") for part in listed.split(",") if part]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _ram(root: Path) -> tuple[int, ...]:
    names = "MemTotal", "MemAvailable"
    return tuple(int(_matched(rf"^{name}: +(\d+) kB", root / "proc/meminfo")[1]) << 10 for name in names)


def _cgroup(root: Path) -> tuple[int, int]:
    """Return the limit and the use of the cgroup with the fewest bytes left, of this process's and those above it."""
    below = Path(_matched(r"^0::/(.*)$", root / "proc/self/cgroup")[1])
    limits = dict[float, tuple[int, int]]()
    for folder in (root / "sys/fs/cgroup" / one for one in (below, *below.parents)):
        with suppress(OSError):  # the root cgroup has no limit, and a container may not see those above its own
            most, used = _text(folder / "memory.max"), int(_text(folder / "memory.current"))
            limits[math.inf if most == "max" else int(most) - used] = UNLIMITED if most == "max" else int(most), used
    if not limits:
        raise ValueError("no cgroup tells a limit of memory")
    return limits[min(limits)]


def _nodes(root: Path) -> tuple[tuple[int, ...], ...]:
    """Return the NUMA nodes, those whose CPUs this process may use, and those whose memory it may use."""
    cpus, memory = (_numbers(_matched(rf"^{what}_allowed_list:[ \t]*(\S+)$", root / "proc/self/status")[1])
                    for what in ("Cpus", "Mems"))  # fmt: skip
    folder = root / "sys/devices/system/node"
    nodes = {int(path.parent.name[4:]): _numbers(_text(path)) for path in folder.glob("node[0-9]*/cpulist")}
    if not nodes:
        raise ValueError(f"{folder} names no node")
    return tuple(sorted(nodes)), tuple(node for node in sorted(nodes) if {*nodes[node]} & {*cpus}), tuple(memory)


def _iommu(root: Path, pci: str) -> str:
    """Return how a device's addresses are translated: ``identity``, ``DMA``, ``DMA-FQ``; ``""`` without an IOMMU."""
    device = root / "sys/bus/pci/devices" / pci
    if not pci or not device.exists():
        raise ValueError("the GPU is not in /sys/bus/pci/devices")
    group = device / "iommu_group"
    return _matched(r"\S+", group / "type")[0] if group.exists() else ""


# Checks. A check sees the facts, and returns a state, what it is in words, and what helps if the table does not say so.

Verdict = tuple[State, str] | tuple[State, str, str]


def examine(facts: Facts) -> list[Finding]:
    """Return the findings, the driver first. A check without a subject, such as a GPU, is left out.

    >>> driver, *others = examine(Facts(cuda=13000, batch=True))
    >>> driver.state, driver.what
    ('ok', 'CUDA 13.0')
    >>> examine(Facts(locked=8 << 20))[0].what
    'no CUDA driver: only the host path works'
    """
    findings = []
    for name, (fact, look, helps) in CHECKS.items():
        if not fact or getattr(facts, fact) is not None:
            state, what, *better = look(facts)
            findings.append(Finding(name, state, what, "" if state == "ok" else (*better, helps)[0]))
        elif fact in facts.missing and fact not in ("cuda", "machine"):  # of which the first two checks tell
            findings.append(Finding(name, "unknown", facts.missing[fact]))
    return findings


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def driver(facts: Facts) -> Verdict:
    """Check that there is a driver for CUDA 12.0 or newer."""
    if facts.cuda is None:
        return "problem", f"{facts.missing.get('cuda', 'no CUDA driver')}: only the host path works"
    version = f"CUDA {_cuda(facts.cuda)}"
    if facts.machine is not None and facts.machine.driver:
        version += f", driver {facts.machine.driver}"
    return ("ok", version) if facts.cuda >= FIRST_DRIVER else ("problem", f"{version}: 12.0 is needed")


def gpu(facts: Facts) -> Verdict:
    """Check that the GPU exists."""
    if facts.machine is None:
        return "problem", facts.missing.get("machine", f"{facts.device} is not there")
    place = f" at {facts.machine.pci}" if facts.machine.pci else ""
    return "ok", f"{facts.device}: {facts.machine.gpu or 'a GPU without a name'}{place}"


def batch(facts: Facts) -> Verdict:
    """Check that the driver has cuMemcpyBatchAsync; a driver without it may return success and NULL."""
    if facts.batch:
        return "ok", "cuMemcpyBatchAsync is there"
    return "warning", "no cuMemcpyBatchAsync, which came with CUDA 12.8: the path copy_engine copies one by one"


def link(facts: Any) -> Verdict:
    """Check that the link has the highest generation and all lanes that are possible."""
    now = facts.machine.link
    generation, most, lanes, most_lanes = now.generation, now.most_generation, now.width, now.most_width
    what = f"PCIe generation {generation or '?'} x{lanes or '?'} now, at most generation {most or '?'} "
    what += f"x{most_lanes or '?'}"
    if None in (lanes, most_lanes, generation, most):
        return "unknown", f"{what}: NVML and sysfs do not tell all", "pip install nvidia-ml-py; or as root: lspci -vv"
    if lanes < most_lanes:
        ceiling = "halves the ceiling" if 2 * lanes == most_lanes else f"leaves {lanes}/{most_lanes} of the ceiling"
        advice = f"reseat the card or check the BIOS slot setting: x{lanes} of x{most_lanes} {ceiling}"
        return "problem" if facts.busy else "warning", what, advice
    if generation < most and facts.busy:
        return "problem", f"{what}, under load"
    if generation < most:
        return "ok", f"{what}; an idle GPU lowers it, and nothing was copied"
    return "ok", f"PCIe generation {generation} x{lanes}, all that GPU and slot can"


def peers(facts: Any) -> Verdict:
    """Check which GPUs reach each other's memory, and by which link."""
    what = _links(facts.peers)
    if not all(link.reachable for link in facts.peers):
        return "warning", what
    if any(link.nvlinks is None for link in facts.peers):
        container = "let a container have NVML: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "unknown", what, "pip install nvidia-ml-py" if "nvidia-ml-py" in facts.missing else container
    if (facts.iommu or "").startswith("DMA") and not all(link.nvlinks for link in facts.peers):
        what += f"; over PCIe, CUDA supports an IOMMU that translates ({facts.iommu}) in a virtual machine only"
        return "warning", what, "on a real machine: switch the IOMMU off, or put iommu=pt on the kernel's command line"
    return "ok", what


def _links(links: Sequence[PeerLink]) -> str:
    """Tell all pairs by their links.

    >>> _links((PeerLink(0, 1, True, nvlinks=18), PeerLink(1, 0, True, nvlinks=18)))
    'from every GPU to every other: by NVLink, 18 links'
    """
    kinds: dict[str, list[str]] = {}
    for link in links:
        words = f"by {link.words}" if link.reachable else f"no access ({link.why})"
        kinds.setdefault(words, []).append(f"{link.gpu} to {link.peer}")
    if len(kinds) == 1:
        return f"from every GPU to every other: {next(iter(kinds))}"
    return "; ".join(f"cuda:{', '.join(pairs)}: {words}" for words, pairs in kinds.items())


def numa(facts: Any) -> Verdict:
    """Check that threads run, and new pages may lie, on the GPU's node."""
    near, cpus, memory = facts.machine.numa_node, facts.cpu_nodes, facts.memory_nodes
    if facts.nodes is not None and len(facts.nodes) == 1:
        return "ok", "the host is one node"
    if near is None or cpus is None:
        return "unknown", f"the node of the GPU or of this process: {facts.missing.get('nodes', 'sysfs does not tell')}"
    what = f"the GPU is on node {near}, this process may"
    if near not in memory:
        cpuset = f"let the cpuset have the node: docker run --cpuset-mems={near}"
        return "warning", f"{what} have memory of {_named(memory)} only", cpuset
    if cpus != (near,):
        return "warning", f"{what} run on {_named(cpus)}", f"numactl --cpunodebind={near} --membind={near}"
    return "ok", f"{what} run on {_named(cpus)} alone"


def _named(nodes: Sequence[int]) -> str:
    return f"node{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes)) or 'unknown'}"


def connections(facts: Facts) -> Verdict:
    """Check the number of hardware queues. Streams that share a queue wait for each other."""
    what = f"CUDA_DEVICE_MAX_CONNECTIONS={facts.connections}"
    if not facts.connections:
        return "ok", f"CUDA_DEVICE_MAX_CONNECTIONS is not set: {QUEUES} hardware queues"
    if facts.connections in map(str, range(QUEUES, MOST_QUEUES + 1)):
        return "ok", what
    return "warning", f"{what}: loads, stores and compute wait for each other; {QUEUES} to {MOST_QUEUES} is right"


def iommu(facts: Any) -> Verdict:
    """Check whether an IOMMU translates the GPU's addresses."""
    if facts.iommu.startswith("DMA"):
        return "warning", f"it translates ({facts.iommu}) what the GPU reads and writes"
    return "ok", f"{facts.iommu}: nothing is translated" if facts.iommu else "none between GPU and memory"


def profile(facts: Any) -> Verdict:
    """Check that the device profile in use was measured."""
    used = facts.profile
    if used.how == "default" or used.note:
        return "warning", f"{used.how}: {used.note or 'measured nowhere'}"
    return "ok", f"{used.how}: {used.of}"


def torch(facts: Facts) -> Verdict:
    """Check that torch is installed, and built for a CUDA version that the driver supports."""
    version, built_for = facts.packages.get("torch"), facts.torch_cuda
    if version is None:
        return "warning", "not installed; needed for streams, events and tensors of a GPU"
    if built_for is None:
        return "unknown", f"{version}; for which CUDA? {facts.missing.get('torch_cuda', 'version.py does not tell')}"
    built = f"{version}, built {f'for CUDA {built_for}' if built_for else 'without CUDA'}"
    if facts.cuda is None:
        return "ok", built
    if not built_for:
        advice = "install a build for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return "problem", f"{built}: it makes no tensors on the GPU", advice
    if int(built_for.partition(".")[0]) > facts.cuda // 1000:
        advice = f"update the NVIDIA driver, or install a torch for CUDA {facts.cuda // 1000}"
        return "problem", f"{built}; the driver serves {_cuda(facts.cuda)}", advice
    return "ok", built


def triton(facts: Facts) -> Verdict:
    """Check that Triton 3.3 or newer is installed."""
    version = facts.packages.get("triton", "not installed")
    if [int(digits) for digits in re.findall(r"\d+", version)[:2]] >= FIRST_TRITON:
        return "ok", version
    state: State = "warning" if facts.cuda is None else "problem"
    return state, f"{version}; 3.3 is needed by the paths kernel and staged"


def numba(facts: Facts) -> Verdict:
    """Check that numba is installed, and has a folder where it may write."""
    version, folder = facts.packages.get("numba"), facts.numba_cache
    if version is None:
        return "problem", "not installed; plans are made by loops that it compiles", "pip install numba"
    if not folder:
        return "warning", f"{version}; no folder to keep loops in: each process compiles them anew, for seconds"
    return "ok", f"{version}, keeps loops in {folder}"


def locked(facts: Any) -> Verdict:
    """Check the limit of locked memory. CUDA's pinned memory does not count for it, RDMA's does."""
    if facts.locked == UNLIMITED:
        return "ok", "no limit"
    return "warning", f"at most {binary(facts.locked)}: CUDA pins more all the same, RDMA (UCX, NIXL) does not"


def memory(facts: Any) -> Verdict:
    """Check that there is enough host memory for a pinned pool."""
    every, room = facts.ram
    what, container = f"{binary(room)} of {binary(every)} available", False
    if facts.cgroup is not None and facts.cgroup[0] != UNLIMITED:
        most, used = facts.cgroup
        what += f"; the cgroup may have {binary(most)} and uses {binary(used)}"
        room, container = min(room, max(most - used, 0)), most - used < room
    if room >= LITTLE_MEMORY:
        return "ok", what
    advice = "docker run --memory, or resources.limits.memory of the pod" if container else "make the pool smaller"
    return "warning", f"{what}: a pool has room for {binary(room)}, and pinned memory is never swapped", advice


# By name: the fact without which there is nothing to look at, the check, and what helps unless all is ok.
CHECKS: dict[str, tuple[str, Callable[[Any], Verdict], str]] = {
    "driver": ("", driver, "install NVIDIA's driver, 525 or newer; of a container: docker run --gpus all"),
    "GPU": ("cuda", gpu, "see nvidia-smi -L, and what CUDA_VISIBLE_DEVICES leaves visible"),
    "batch copies": ("batch", batch, "update the NVIDIA driver; Policy(path='staged') needs no batches"),
    "link": ("machine", link, "check the BIOS slot setting, risers and retimers, and dmesg for PCIe errors"),
    "peers": ("peers", peers, "see nvidia-smi topo -p2p r; switch MIG off; else store to the host, then load"),
    "NUMA": ("machine", numa, "see NUMA Affinity of nvidia-smi topo -m"),
    "connections": ("cuda", connections, "export CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts"),
    "IOMMU": ("iommu", iommu, "put iommu=pt on the kernel's command line"),
    "profile": ("profile", profile, "kvplan calibrate"),
    "torch": ("", torch, "pip install torch triton"),
    "Triton": ("", triton, 'pip install "triton>=3.3"'),
    "numba": ("", numba, "export NUMBA_CACHE_DIR=/a/folder/that/may/be/written"),
    "locked memory": ("locked", locked, "ulimit -l unlimited, or docker run --ulimit memlock=-1"),
    "host memory": ("ram", memory, ""),
}  # fmt: skip

"""The facts that the doctor judges, of the GPU, of the host and of packages, and a function that gathers them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvplan.cost import store
from kvplan.cuda.driver import driver
from kvplan.cuda.machine import ROOT, Machine, machine
from kvplan.cuda.peers import PeerLink, links

UNLIMITED = -1  # bytes
AWAKE_NBYTES = 64 << 20  # bytes of each copy that wakes the link
AWAKE_SECONDS = 0.2
_BESIDE = 8  # copies in flight while the link is read
_LONGEST_LIST = 1 << 16  # most numbers in a range of CPUs or nodes

# Module to import, and name of the package to install.
PACKAGES = {"torch": "torch", "triton": "triton", "numba": "numba", "pynvml": "nvidia-ml-py"}


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
        packages: versions of packages by the name to install; ``""`` if the version is not known.
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
        except Exception as error:  # the other facts are wanted, whatever goes wrong with this one
            missing[name] = " ".join(str(error).split()) or type(error).__name__
            return None

    entries, ordinal = ask("cuda", driver), ask("machine", _ordinal, device)
    gpu = None if entries is None or ordinal is None else ask("machine", lambda: machine(ordinal, root=root))
    if entries is None:
        missing.setdefault("machine", missing["cuda"])
    woken = ask("busy", _woken, ordinal, root) if busy and gpu and _lowered(gpu) else None
    versions = {name: ask(name, _version, module, name) for module, name in PACKAGES.items()}
    cpus_by_node, may = ask("nodes", _nodes, root), ask("allowed", _allowed, root)
    return Facts(
        device=device,
        cuda=entries and entries.version,
        batch=entries and entries.cuMemcpyBatchAsync is not None,
        machine=woken or gpu,
        busy=woken is not None,
        peers=(entries and ask("peers", links)) or None,
        packages={name: version for name, version in versions.items() if version is not None},
        torch_cuda=None if versions["torch"] is None else ask("torch_cuda", _cuda_of_torch),
        numba_cache=ask("numba_cache", _numba_cache),
        locked=ask("locked", _locked_limit, root),
        ram=ask("ram", _ram, root),
        cgroup=ask("cgroup", _cgroup, root),
        nodes=cpus_by_node and tuple(cpus_by_node),
        cpu_nodes=tuple(k for k, cpus in cpus_by_node.items() if {*cpus} & {*may[0]}) if cpus_by_node and may else None,
        memory_nodes=may and may[1],
        connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        iommu=ask("iommu", _iommu, root, gpu.pci) if gpu else None,
        profile=ask("profile", _profile, gpu) if gpu else None,
        missing=missing,
    )


def _ordinal(device: str) -> int:
    if not re.fullmatch(r"cuda:\d{1,5}", device, re.ASCII):
        raise ValueError(f"{device!r} names no GPU; give a name such as 'cuda:0'")
    return int(device.removeprefix("cuda:"))


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
        stream = device.stream()
        stack.callback(cu.cuStreamDestroy_v2, stream)
        memory = device.allocate(AWAKE_NBYTES)
        stack.callback(device.free, memory)
        pinned = device.allocate_host(AWAKE_NBYTES)
        stack.callback(device.free_host, pinned)
        event = device.event()
        stack.callback(cu.cuEventDestroy_v2, event)
        stack.callback(cu.cuEventSynchronize, event)
        end = time.perf_counter() + AWAKE_SECONDS
        while time.perf_counter() < end:
            device.copy(memory, pinned, AWAKE_NBYTES, stream)
            device.record(event, stream)
            device.synchronize(event)
        for _ in range(_BESIDE):
            device.copy(memory, pinned, AWAKE_NBYTES, stream)
        device.record(event, stream)
        return machine(ordinal, root=root)


def _profile(gpu: Machine) -> ProfileInUse:
    found = store.find(gpu)
    of = ", ".join(filter(None, [found.gpu, found.driver and f"driver {found.driver}", found.link]))
    return ProfileInUse(found.how, f"{of} ({found.made})", found.note)


# Packages.


def _version(module: str, name: str) -> str:
    """Return a package's version, without importing the package."""
    if find_spec(module) is None:
        raise ValueError("not installed")
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # sources on the path, not installed
        return ""


def _cuda_of_torch() -> str:
    """Read the version from the file that torch's build writes, because importing torch takes a second."""
    spec = find_spec("torch")
    written = Path(spec.origin or "").with_name("version.py") if spec else Path()
    return _matched(r"^cuda\b[^=\n]*= *(?:['\"]([\d.]+)['\"]|None)", written)[1] or ""


def _numba_cache() -> str:
    """Return the first of the folders that numba tries which may be written or made; ``""`` if there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = os.environ.get("NUMBA_CACHE_DIR")
    for folder in (*([Path(named)] if named else []), Path(__file__).parents[1] / "__pycache__", home / "numba"):
        nearest = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return str(folder)
    return ""


# The host. These raise OSError or ValueError if the fact is missing.


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _matched(pattern: str, path: Path) -> re.Match[str]:
    """Search a small file."""
    found = re.search(pattern, _text(path), re.MULTILINE)
    if not found:
        raise ValueError(f"{path} does not tell")
    return found


def numbers(listed: str) -> tuple[int, ...]:
    """Read a list of numbers in the kernel's notation.

    Raises:
        ValueError: the text is not a list in this notation.

    >>> numbers("0-2,8"), numbers("")
    ((0, 1, 2, 8), ())
    """
    found: list[int] = []
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        if int(last or first) - int(first) >= _LONGEST_LIST:
            raise ValueError(f"{part!r} is not a range of CPUs or nodes")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _locked_limit(root: Path) -> int:
    """Return the bytes that this process may lock (RLIMIT_MEMLOCK, the soft limit), or UNLIMITED."""
    limit = _matched(r"^Max locked memory +(\d+|unlimited) ", root / "proc/self/limits")[1]
    return UNLIMITED if limit == "unlimited" else int(limit)


def _ram(root: Path) -> tuple[int, int]:
    total, available = (int(_matched(rf"^{name}: +(\d+) kB", root / "proc/meminfo")[1]) << 10
                        for name in ("MemTotal", "MemAvailable"))  # fmt: skip
    return total, available


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


def _nodes(root: Path) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of each NUMA node."""
    folder = root / "sys/devices/system/node"
    found = {int(path.parent.name[4:]): numbers(_text(path)) for path in folder.glob("node[0-9]*/cpulist")}
    if not found:
        raise ValueError(f"{folder} names no node")
    return dict(sorted(found.items()))


def _allowed(root: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the CPUs on which this process may run, and the nodes on which it may allocate memory."""
    cpus, memory = (numbers(_matched(rf"^{what}_allowed_list:[ \t]*(\S+)$", root / "proc/self/status")[1])
                    for what in ("Cpus", "Mems"))  # fmt: skip
    return cpus, memory


def _iommu(root: Path, pci: str) -> str:
    """Return how a device's addresses are translated: ``identity``, ``DMA``, ``DMA-FQ``; ``""`` without an IOMMU."""
    device = root / "sys/bus/pci/devices" / pci
    if not pci or not device.exists():
        raise ValueError("the GPU is not in /sys/bus/pci/devices")
    group = device / "iommu_group"
    return _matched(r"\S+", group / "type")[0] if group.exists() else ""

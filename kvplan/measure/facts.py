"""The facts that the doctor judges, and a function that gathers them and raises no error."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from kvplan.agents.sockets import folder_trouble, socket_folder
from kvplan.cuda.driver import driver
from kvplan.cuda.machine import ROOT, Machine, machine
from kvplan.cuda.peers import PeerLink, links
from kvplan.measure import host

AWAKE_NBYTES = 64 << 20  # bytes of each copy that wakes the link
AWAKE_SECONDS = 0.2
_BESIDE = 8  # copies in flight while the link is read

# Module to import, and name of the package to install.
PACKAGES = {"torch": "torch", "triton": "triton", "numba": "numba", "pynvml": "nvidia-ml-py"}

Answer = TypeVar("Answer")


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

    Sizes are in bytes; -1 is "no limit".

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
        cgroup: bytes of the cgroup: the limit, and the use.
        shared: bytes of /dev/shm: total, and free.
        nodes: NUMA nodes of the host.
        cpu_nodes: nodes on whose CPUs this process may run.
        memory_nodes: nodes on which this process may allocate memory.
        policy: placement of new pages, such as ``default`` or ``bind:1``.
        connections: value of CUDA_DEVICE_MAX_CONNECTIONS; ``""`` if it is not set.
        sockets: value of KVPLAN_SOCKETS; ``""`` if it is not set.
        sockets_trouble: why agents cannot listen there; ``""`` if they can.
        first: whether this process is number 1 of its container.
        iommu: how the IOMMU translates the GPU's addresses; ``""`` if there is no IOMMU.
        hypervisor: name of the virtual machine; ``""`` on a real machine.
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
    shared: tuple[int, int] | None = None
    nodes: tuple[int, ...] | None = None
    cpu_nodes: tuple[int, ...] | None = None
    memory_nodes: tuple[int, ...] | None = None
    policy: str | None = None
    connections: str = ""
    sockets: str = ""
    sockets_trouble: str = ""
    first: bool = False
    iommu: str | None = None
    hypervisor: str | None = None
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

    def ask(name: str, question: Callable[..., Answer], *of: Any) -> Answer | None:
        try:
            return question(*of)
        except Exception as error:  # noqa: BLE001  # the other facts are wanted, whatever goes wrong with this one
            missing[name] = " ".join(str(error).split()) or type(error).__name__
            return None

    entries = ask("cuda", driver)
    ordinal = ask("machine", _ordinal, device)
    gpu = None if entries is None or ordinal is None else ask("machine", lambda: machine(ordinal, root=root))
    if entries is None and "machine" not in missing:
        missing["machine"] = missing["cuda"]
    woken = ask("busy", _woken, ordinal or 0, root) if busy and gpu and _lowered(gpu) else None
    versions = {name: ask(name, _version, module, name) for module, name in PACKAGES.items()}
    torch_is_there, folder = versions["torch"] is not None, socket_folder()
    cpus_by_node, may = ask("nodes", host.nodes, root), ask("allowed", host.allowed, root)
    return Facts(
        device=device,
        cuda=None if entries is None else entries.version,
        batch=None if entries is None else entries.cuMemcpyBatchAsync is not None,
        machine=woken or gpu,
        busy=woken is not None,
        peers=ask("peers", links) or None if entries is not None else None,
        packages={name: version for name, version in versions.items() if version is not None},
        torch_cuda=ask("torch_cuda", _cuda_of_torch) if torch_is_there else None,
        numba_cache=ask("numba_cache", _numba_cache),
        locked=ask("locked", host.locked_limit, root),
        ram=ask("ram", host.ram, root),
        cgroup=ask("cgroup", host.cgroup, root),
        shared=ask("shared", host.shared_memory, root),
        nodes=None if cpus_by_node is None else tuple(cpus_by_node),
        cpu_nodes=_nodes_of(cpus_by_node, may[0]) if cpus_by_node and may else None,
        memory_nodes=may and may[1],
        policy=ask("policy", host.memory_policy, root),
        connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        sockets=str(folder or ""),
        sockets_trouble=(folder and folder_trouble(folder)) or "",
        first=os.getpid() == 1,
        iommu=ask("iommu", host.iommu, root, gpu.pci) if gpu else None,
        hypervisor=ask("hypervisor", host.hypervisor, root),
        profile=ask("profile", _profile, gpu) if gpu else None,
        missing=missing,
    )


def _ordinal(device: str) -> int:
    if not re.fullmatch(r"cuda:\d{1,5}", device, re.ASCII):
        raise ValueError(f"{device!r} names no GPU; give a name such as 'cuda:0'")
    return int(device.removeprefix("cuda:"))


def _nodes_of(cpus_by_node: Mapping[int, tuple[int, ...]], cpus: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(node for node, of_node in cpus_by_node.items() if not set(of_node).isdisjoint(cpus))


def _lowered(gpu: Machine) -> bool:
    link = gpu.link
    lower = link.generation and link.most_generation and link.generation < link.most_generation
    return bool(lower or (link.width and link.most_width and link.width < link.most_width))


def _woken(ordinal: int, root: Path) -> Machine:
    """Read the machine again, while copies are in flight."""
    from kvplan.cuda.device import Device

    device = Device(ordinal)
    cu = device.driver
    with device.current():
        stream = memory = pinned = event = 0
        try:
            stream, event = device.stream(), device.event()
            memory, pinned = device.allocate(AWAKE_NBYTES), device.allocate_host(AWAKE_NBYTES)
            end = time.perf_counter() + AWAKE_SECONDS
            while time.perf_counter() < end:
                device.copy(memory, pinned, AWAKE_NBYTES, stream)
                device.record(event, stream)
                device.synchronize(event)
            for _ in range(_BESIDE):
                device.copy(memory, pinned, AWAKE_NBYTES, stream)
            device.record(event, stream)
            return machine(ordinal, root=root)
        finally:
            if event:
                cu.cuEventSynchronize(event)
                cu.cuEventDestroy_v2(event)
            for given, give_back in (
                (memory, device.free),
                (pinned, device.free_host),
                (stream, cu.cuStreamDestroy_v2),
            ):
                if given:
                    give_back(given)


def _version(module: str, name: str) -> str:
    """Return a package's version, without importing the package."""
    try:
        there = find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        there = False
    if not there:
        raise ValueError("not installed")
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # sources on the path, not installed
        return ""


def _cuda_of_torch() -> str:
    """Read the version from the file that torch's build writes, because importing torch takes a second."""
    spec = find_spec("torch")
    written = Path(spec.origin or "").with_name("version.py") if spec else Path()
    found = re.search(r"^cuda\b[^=\n]*= *(?:['\"]([\d.]+)['\"]|None)", host.text(written), re.MULTILINE)
    if not found:
        raise ValueError(f"{written} does not tell")
    return found[1] or ""


def _numba_cache() -> str:
    """Return the first of the folders that numba tries which may be written or made; ``""`` if there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = os.environ.get("NUMBA_CACHE_DIR")
    for folder in (*([Path(named)] if named else []), Path(__file__).parents[1] / "__pycache__", home / "numba"):
        nearest = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return str(folder)
    return ""


def _profile(gpu: Machine) -> ProfileInUse | None:
    try:
        from kvplan.cost import store
    except ImportError:
        return None
    found = store.find(gpu)
    of = ", ".join(filter(None, [found.gpu, found.driver and f"driver {found.driver}", found.link]))
    return ProfileInUse(found.how, f"{of} ({found.made})", found.note)

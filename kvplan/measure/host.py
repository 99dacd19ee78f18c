"""Functions that read facts about a host from its file system and kernel: limits of memory, and NUMA nodes.

Most functions take the root folder of the file system, and raise OSError or ValueError if the fact is missing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

UNLIMITED = -1  # bytes
_NOT_LIMITED = 1 << 60  # cgroups of version 1 write "no limit" as the largest multiple of a page
_LONGEST_LIST = 1 << 16  # most numbers in a range of CPUs or nodes


def text(path: Path) -> str:
    """Return the text of a small file, without white space at both ends."""
    return path.read_text(encoding="utf-8", errors="replace").strip()


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


def locked_limit(root: Path) -> int:
    """Return the bytes that this process may lock (RLIMIT_MEMLOCK, the soft limit), or UNLIMITED."""
    found = re.search(r"^Max locked memory +(\d+|unlimited) ", text(root / "proc/self/limits"), re.MULTILINE)
    if not found:
        raise ValueError("/proc/self/limits does not tell the limit of locked memory")
    return UNLIMITED if found[1] == "unlimited" else int(found[1])


def ram(root: Path) -> tuple[int, int]:
    """Return the bytes of host memory: total, and available."""
    told = dict(re.findall(r"^(\w+): +(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE))
    if not {"MemTotal", "MemAvailable"} <= told.keys():
        raise ValueError("/proc/meminfo does not tell MemTotal and MemAvailable")
    return int(told["MemTotal"]) << 10, int(told["MemAvailable"]) << 10


def shared_memory(root: Path) -> tuple[int, int]:
    """Return the bytes of /dev/shm: total, and free."""
    told = os.statvfs(root / "dev/shm")
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def cgroup(root: Path) -> tuple[int, int]:
    """Return the bytes of this process's cgroup: the limit, or UNLIMITED, and the use.

    Parent cgroups count too: the result is the cgroup with the fewest bytes left.
    """
    found = [limited for folder, limit, used in _groups(root) if (limited := _limited(folder, limit, used))]
    if not found:
        raise ValueError("no cgroup tells a limit of memory")
    bound = [one for one in found if one[0] != UNLIMITED]
    return min(bound, key=lambda one: one[0] - one[1]) if bound else found[0]


def _groups(root: Path) -> list[tuple[Path, str, str]]:
    """Return the folders of the cgroups that limit this process's memory, its own first, and the names of files."""
    folders: list[tuple[Path, str, str]] = []
    for line in text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        below = Path(path.strip().lstrip("/"))  # in a container, this may be the host's path, which does not exist
        folders += [(mount / one, *names) for one in (below, *below.parents)]
    return folders


def _limited(folder: Path, limit: str, used: str) -> tuple[int, int] | None:
    try:
        most = text(folder / limit)
        nbytes = UNLIMITED if most == "max" or int(most) >= _NOT_LIMITED else int(most)
        return nbytes, int(text(folder / used))
    except (OSError, ValueError):  # the root cgroup lacks these files
        return None


def nodes(root: Path) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of each NUMA node."""
    folder = root / "sys/devices/system/node"
    found = [path for path in folder.iterdir() if re.fullmatch(r"node\d{1,5}", path.name, re.ASCII)]
    if not found:
        raise ValueError("/sys/devices/system/node names no node")
    return {int(path.name[4:]): numbers(text(path / "cpulist")) for path in sorted(found, key=lambda path: path.name)}


def allowed(root: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the CPUs on which this process may run, and the nodes on which it may allocate memory."""
    told = dict(re.findall(r"^(Cpus|Mems)_allowed_list:[ \t]*(\S*)$", text(root / "proc/self/status"), re.MULTILINE))
    if not told.get("Cpus") or not told.get("Mems"):
        raise ValueError("/proc/self/status does not tell the CPUs and nodes that are allowed")
    return numbers(told["Cpus"]), numbers(told["Mems"])


def memory_policy(root: Path) -> str:
    """Return the placement of this process's new pages, such as ``default``, ``bind:1`` or ``interleave:0-1``."""
    with (root / "proc/self/numa_maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:  # stop early: the kernel counts the pages of each mapping that is read
            words = line.split()
            if "heap" in words[2:] or "stack" in words[2:]:
                return words[1].replace("=static", "").replace("=relative", "")
    raise ValueError("/proc/self/numa_maps has no heap")


def iommu(root: Path, pci: str) -> str:
    """Return how a device's addresses are translated: ``identity``, ``DMA``, ``DMA-FQ``; ``""`` without an IOMMU."""
    device = root / "sys/bus/pci/devices" / pci
    if not pci or not device.exists():
        raise ValueError("the GPU is not in /sys/bus/pci/devices")
    group = device / "iommu_group"
    if not group.exists():
        return ""
    if not (kind := text(group / "type")):
        raise ValueError("the IOMMU group of the GPU has no type")
    return kind


def hypervisor(root: Path) -> str:
    """Return the name of the virtual machine; ``""`` on a real machine."""
    flags = re.search(r"^flags\s*:(.*)$", text(root / "proc/cpuinfo"), re.MULTILINE)
    if not flags:
        raise ValueError("/proc/cpuinfo has no flags")
    if "hypervisor" not in flags[1].split():
        return ""
    try:
        return text(root / "sys/class/dmi/id/sys_vendor") or "of no name"
    except OSError:
        return "of no name"

"""The environment of a run: the GPU, its driver and link, and the versions of the software."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import Scale
from benchmarks.record import Row, document

PACKAGES = ("torch", "triton")
# Streams share hardware queues, 8 by default. A run has an executor for every policy, and far more streams than an
# engine: some would wait on compute by chance. The variable is set before CUDA starts.
CONNECTIONS, MOST_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
_FIELDS = {
    "driver": "driver_version",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_generation_most": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "sm_mhz": "clocks.current.sm",
    "memory_mhz": "clocks.current.memory",
    "watts_most": "power.limit",
}


def gpu() -> dict[str, Any]:
    """The GPU as torch and nvidia-smi know it; unknown facts are left out."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda,
        "connections": os.environ.get(CONNECTIONS, ""),
        **told_by_smi(),
    }


def told_by_smi() -> dict[str, str]:
    """Ask nvidia-smi about the first GPU; empty where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--id=0", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_smi(done.stdout)


def read_smi(text: str) -> dict[str, str]:
    """Read the fields of one line of nvidia-smi; unknown fields are left out."""
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")] if text.strip() else []
    return {name: value for name, value in zip(_FIELDS, values, strict=False) if value and not value.startswith("[")}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of packages, where installed; by default of torch and Triton."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def default_path(name: str, groups: Sequence[str]) -> Path:
    """The file of a run's result. A run of some groups has a file of its own, so that it replaces no whole run."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Path(__file__).parents[1] / "results" / f"{'-'.join(['gpu', slug, *groups])}.json"


def gpu_document(
    rows: Sequence[Row],
    *,
    scale: Scale,
    started: Mapping[str, Any],
    about: Mapping[str, Any],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """The JSON document of one run on a GPU: that of the CPU's benchmarks, and facts of the GPU.

    Args:
        about: :func:`gpu`.
        failed: by group, why it failed.
    """
    made = document(rows, scale=scale, started=started)
    made["machine"]["gpu"] = dict(about)
    made["versions"] |= versions()
    made["failed"] = dict(failed)
    return made

"""The environment of a run: the GPU, its driver and link."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from benchmarks.record import versions  # noqa: F401  # other suites ask this module for them

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


def gpu(count: int = 1) -> dict[str, Any]:
    """The GPU as torch and nvidia-smi know it, and what joins the first of several; unknown facts are left out."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    link = {}
    if count > 1:
        from kvplan.cuda.peers import link_between

        link = {"devices": count, "link": link_between(0, 1).words}
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda,
        "connections": os.environ.get(CONNECTIONS, ""),
        **told_by_smi(),
        **link,
    }


def told_by_smi() -> dict[str, str]:
    """Ask nvidia-smi about the first GPU; empty where there is no nvidia-smi, and without unknown fields."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--id=0", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().partition("\n")[0].split(",")]
    return {name: value for name, value in zip(_FIELDS, values, strict=False) if value and not value.startswith("[")}

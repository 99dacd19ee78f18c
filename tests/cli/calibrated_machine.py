"""A machine with a GPU, and the profile that calibration measured there."""

from __future__ import annotations

from dataclasses import replace

from kvplan.cost.profile import default
from kvplan.cuda.machine import Link, Machine

H100 = Machine("NVIDIA H100", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)


MEASURED = replace(
    default(), gpu="NVIDIA H100", driver="580.1", generation=5, width=16, how="calibrated", multiprocessors=132,
    made="kvplan 0.1.0, 2026-11-21, 900 samples", note="", calibrations=1,
)  # fmt: skip

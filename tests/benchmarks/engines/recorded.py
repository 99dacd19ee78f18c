"""Samples and traces as a run would record them, without an engine."""

from __future__ import annotations

from typing import Any


def sample(
    way: str, measure: str, *, shape: str = "8b", batch: int = 0, number: int = 0, **values: Any
) -> dict[str, Any]:
    """One sample of a run; ``held`` and ``suffix`` are those of the limits unless given."""
    held, suffix = (0, 0) if measure == "chats" else (values.pop("held", 6000), values.pop("suffix", 512))
    of = {
        "shape": shape,
        "batch": batch,
        "round": number,
        "way": way,
        "measure": measure,
        "held": held,
        "suffix": suffix,
    }
    return of | values


def alone(way: str, *times: float, **more: Any) -> list[dict[str, Any]]:
    """Samples of hits alone, one per round, with a p50 each."""
    held = more.get("held", 6000)
    return [sample(way, "alone", number=number, ttft_p50=ms, ttft_p99=ms, cpu=30.0, ttft=[ms], cached=[held, held],
                   local=[0, 0], tokens=[1, 2, 3], **more) for number, ms in enumerate(times)]  # fmt: skip


TRACES = [
    {"shape": "8b", "way": "own-sync", "held": 6000, "suffix": 512, "ms": 35.0,
     "spans": [["add request (hashes)", 0.1, 0.75], ["schedule", 0.9, 2.0], ["look up", 1.0, 0.3],
               ["submit loads", 4.0, 15.0], ["forward", 19.0, 13.0], ["sampling", 32.5, 1.0], ["unknown", 1.0, 1.0]],
     "gpu": {"copies in": [[4.2, 14.4]], "compute": [[19.2, 14.0]]},
     "busy_ms": {"copies in": 14.4, "compute": 14.0}},
    {"shape": "8b", "way": "kvplan-layers", "held": 6000, "suffix": 512, "ms": 25.0,
     "spans": [["submit loads", 4.0, 0.1], ["forward", 4.5, 13.0], ["layer wait", 5.0, 0.03]],
     "gpu": {"copies in": [[4.1, 9.0]], "copy kernels": [[13.1, 5.4]], "compute": [[4.8, 19.0], [24.0, 0.0001]]},
     "busy_ms": {"copies in": 9.0, "copy kernels": 5.4, "compute": 19.0}},
]  # fmt: skip

"""kvplan's spec on vLLM's CPU platform, whose own ``get_worker`` refuses it: for ``--smoke`` only."""

from __future__ import annotations

from typing import Any

from kvplan.engines import vllm as ours


class KVPlanOffloadingSpec(ours.KVPlanOffloadingSpec):  # type: ignore[misc]
    """kvplan's spec without the check of the platform."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker, made at the first call."""
        self._worker = self._worker or self.create_worker(kv_caches)
        return self._worker

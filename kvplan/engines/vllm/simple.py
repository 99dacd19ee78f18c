"""vLLM's ``SimpleCPUOffloadConnector`` with kvplan's copies.

Source: vLLM 0.31.0 to 0.33.0, ``distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py`` and
``v1/simple_kv_offload/worker.py``.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from kvplan.engines.streams import current_stream
from kvplan.engines.vllm.block_copies import BlockCopies
from kvplan.engines.vllm.releases import COUNTED_BLOCKS, running_version
from kvplan.engines.vllm.specs import policy_of


class _NoStream:
    """A stream of a CPU."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority."""
        return 0, 0


@functools.cache
def classes() -> tuple[type[Any], ...]:
    """Return the class of the connector; this imports vLLM."""
    version = running_version()
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
    from vllm.platforms import current_platform
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    class SimpleWorker(SimpleCPUOffloadWorker):  # type: ignore[misc]
        """vLLM's worker of that connector; its pool and its copies are kvplan's."""

        policy: Any = None

        def register_kv_caches(self, kv_caches: Any) -> None:
            """Describe the cache, and allocate the pool.

            vLLM's method makes two streams. A CPU has no streams, and kvplan's copies need none of these.
            """
            with nullcontext() if not current_platform.is_cpu() else patch.object(torch.cuda, "Stream", _NoStream):
                super().register_kv_caches(kv_caches)

        def _init_cpu_mode(self, unique_gpu_caches: Any, total_bytes_per_block: int, device: Any) -> None:
            del total_bytes_per_block, device
            self._backend = BlockCopies(list(unique_gpu_caches.values()), self.num_cpu_blocks, self.policy)
            self.cpu_kv_caches = dict(zip(unique_gpu_caches, self._backend.host_rows, strict=True))

        def wait_for_save(self) -> None:
            """Begin the stores of a step, behind all work that the engine's current stream has by now."""
            metadata = self._connector_metadata
            if metadata is not None and metadata.store_gpu_blocks:
                self._backend.launch_copy(
                    metadata.store_gpu_blocks, metadata.store_cpu_blocks, is_store=True,
                    event_idx=metadata.store_event, events_list=self._store_events,
                    wait_event=current_stream(str(self.device)),
                )  # fmt: skip

    class KVPlanSimpleOffloadConnector(SimpleCPUOffloadConnector):  # type: ignore[misc]
        """vLLM's ``SimpleCPUOffloadConnector``, whose blocks kvplan moves.

        A failed copy ends the engine, as in vLLM's own. ``kv_connector_extra_config["kvplan"]`` may have fields of
        :class:`kvplan.Policy`. With ``kv_offload_backend="disk"``, all copies are vLLM's.
        """

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
            version.check(extra_config, COUNTED_BLOCKS)
            policy = policy_of(extra_config)
            super().__init__(vllm_config, role, kv_cache_config)
            worker: Any = self.worker_handler
            if worker is not None and not worker.disk_mode:
                worker.__class__ = SimpleWorker  # vLLM has made it, with all arguments of its version
                worker.policy = policy

        def shutdown(self) -> None:
            """Wait for the copies and release the executors when the engine ends."""
            super().shutdown()
            copies = getattr(self.worker_handler, "_backend", None)
            if isinstance(copies, BlockCopies):
                copies.shutdown()

    return (KVPlanSimpleOffloadConnector,)

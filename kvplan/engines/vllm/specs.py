"""Specs of vLLM's CPU offloading with kvplan's worker.

Source: vLLM 0.33.0, ``v1/kv_offload/cpu/spec.py``, ``v1/kv_offload/tiering/spec.py``, ``v1/kv_offload/factory.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.vllm.pages import canonical_nbytes
from kvplan.engines.vllm.worker import Worker
from kvplan.errors import PathError


def policy_of(extra_config: Mapping[str, Any]) -> Policy:
    """Read the executor's policy from ``kv_connector_extra_config["kvplan"]``: fields of :class:`kvplan.Policy`.

    Raises:
        PathError: a key is not a field of Policy, or its value is not allowed.

    >>> policy_of({"cpu_bytes_to_use": 1 << 30}).overlap
    'decode'
    >>> policy_of({"kvplan": {"path": "staged", "staging_bytes": 1 << 27}}).path
    'staged'
    """
    given = extra_config.get("kvplan", {})
    known = [field.name for field in fields(Policy)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise PathError(
            f"kv_connector_extra_config has 'kvplan': {given!r}; give a mapping with fields of kvplan.Policy: "
            f"{', '.join(known)}"
        )
    return Policy(**{"overlap": BESIDE_COMPUTE.overlap, **given})


@functools.cache
def classes() -> tuple[type[Any], ...]:
    """The worker and both specs, derived from vLLM's classes, which are imported here."""
    import torch
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.cpu.spec import _REGION_SEGMENTS, CPUOffloadingSpec, _all_workers_barrier
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    class KVPlanOffloadingWorker(Worker, OffloadingWorker):  # type: ignore[misc]
        """vLLM's ``CPUOffloadingWorker`` on a kvplan executor, with the same arguments.

        Args:
            kv_caches: the canonical caches.
            blocks_per_chunk: number of device blocks in a host chunk.
            num_cpu_chunks: number of chunks of its own pool, if there is no region.
            mmap_region: the shared region; the worker owns it from here on, unless an error is raised.
            canonical_layout: whether the region holds canonical pages.
            policy: how the executor moves.
        """

        def __init__(
            self,
            kv_caches: Any,
            blocks_per_chunk: int,
            num_cpu_chunks: int,
            mmap_region: Any = None,
            canonical_layout: bool = False,
            policy: Policy | None = None,
        ) -> None:
            device_rows = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
            on_device = device_rows[0].device.type != "cpu"
            if canonical_layout:
                pages = canonical_nbytes(kv_caches.group_data_refs, len(device_rows))
            else:
                pages = [rows.shape[1] for rows in device_rows]
            sizes = [page * blocks_per_chunk for page in pages]
            if mmap_region is None:
                pool = torch.zeros((num_cpu_chunks, sum(sizes)), dtype=torch.int8, pin_memory=on_device)
                ends = itertools.accumulate(sizes)
                host_rows = [pool[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
            else:
                if on_device:
                    # Pin all of it, not only this worker's slots. An executor checks whole stretches, so a gap between
                    # two slots would make them count as pageable. And each slot would be a registration with seams.
                    pin_mmap_region(mmap_region)
                make = (
                    mmap_region.create_next_canonical_view if canonical_layout else mmap_region.create_next_worker_view
                )
                host_rows = [make(size) for size in sizes]
            super().__init__(
                kv_caches.group_data_refs, device_rows, host_rows, blocks_per_chunk, canonical=canonical_layout,
                policy=policy, result=TransferResult, release=None if mmap_region is None else mmap_region.cleanup,
            )  # fmt: skip

    def region_of(spec: Any, engine_id: str, **more: Any) -> Any:
        """The region that a spec's workers share."""
        rank = 0 if spec.replicated_layout else spec.config.parallel.rank
        return SharedOffloadRegion(
            engine_id=engine_id, num_chunks=spec.num_chunks, rank=rank, kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker, **more,
        )  # fmt: skip

    def worker_of(spec: Any, kv_caches: Any, region: Any, *, canonical: bool) -> Any:
        """Make the worker of a region; release the region if that fails."""
        try:
            return KVPlanOffloadingWorker(
                kv_caches, spec.blocks_per_chunk, spec.num_chunks, region, canonical_layout=canonical,
                policy=policy_of(spec.extra_config),
            )  # fmt: skip
        except Exception:
            if region is not None:
                region.cleanup()
            raise

    class KVPlanOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
        """vLLM's ``CPUOffloadingSpec`` with kvplan's worker."""

        def create_worker(self, kv_caches: Any) -> Any:
            """A worker over the shared region, or over its own pool on a platform that has no such region."""
            region = None
            if self._uses_shared_region() and self.num_chunks > 0:
                parallel = self.config.parallel
                region = region_of(
                    self, self.config.engine_id, barrier=_all_workers_barrier, num_segments=_REGION_SEGMENTS,
                    populate_shard=(parallel.rank, parallel.world_size) if self.replicated_layout else None,
                )  # fmt: skip
            return worker_of(self, kv_caches, region, canonical=False)

    class KVPlanTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
        """vLLM's ``TieringOffloadingSpec`` with kvplan's worker."""

        def create_worker(self, kv_caches: Any) -> Any:
            """A worker over the region that the tiers read and write."""
            canonical = self.config.canonical_layout
            if canonical:
                self._validate_canonical_refs(kv_caches)
            return worker_of(self, kv_caches, region_of(self, self._engine_id), canonical=canonical)

    return KVPlanOffloadingWorker, KVPlanOffloadingSpec, KVPlanTieringOffloadingSpec

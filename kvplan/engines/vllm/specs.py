"""Specs for vLLM's CPU offloading that use kvplan's worker.

Source: vLLM 0.33.0, ``v1/kv_offload/cpu/spec.py``, ``v1/kv_offload/tiering/spec.py``,
``v1/kv_offload/factory.py``, ``platforms/interface.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.vllm.connector import FAILED
from kvplan.engines.vllm.in_step import layer_options_of
from kvplan.engines.vllm.jobs import canonical_nbytes
from kvplan.engines.vllm.worker import Worker
from kvplan.errors import PathError


def policy_of(extra_config: Mapping[str, Any]) -> Policy:
    """Return the policy in ``kv_connector_extra_config["kvplan"]``, a mapping with fields of :class:`kvplan.Policy`.

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


def host_rows(sizes: list[int], region: Any, chunks: int, *, canonical: bool, on_device: bool) -> list[Any]:
    """Return the host's rows of each tensor: views of the shared region, or of a pool of the worker's own.

    Args:
        sizes: bytes of a chunk, for each tensor.
        region: vLLM's ``SharedOffloadRegion``, or None.
        chunks: number of chunks of the worker's own pool.
        canonical: whether the region has canonical pages.
        on_device: whether a device copies, so that the memory must be pinned.
    """
    if region is None:
        import torch

        pool = torch.zeros((chunks, sum(sizes)), dtype=torch.int8, pin_memory=on_device)
        return [pool[:, end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    if on_device:
        from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

        # Pin the whole region. If only this worker's slots were pinned, the gaps between them would make the executor
        # take its rows for pageable, and each slot would be a registration with seams.
        pin_mmap_region(region)
    make = region.create_next_canonical_view if canonical else region.create_next_worker_view
    return [make(size) for size in sizes]


class OnAnyPlatform:
    """What kvplan's specs add to vLLM's: kvplan's worker, also on vLLM's CPU platform, and a counter of failures.

    On the CPU platform, the cache is in the host's memory, beside the pool. ``CPUOffloadingSpec.get_worker`` refuses
    it, because vLLM's own worker copies by CUDA or XPU. The executor of kvplan's worker copies between CPU tensors as
    well. Other platforms are still refused by vLLM.
    """

    _worker: Any  # these are the other base's
    create_worker: Any

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """Return vLLM's definitions of metrics, and kvplan's counter."""
        from vllm.v1.kv_offload.base import OffloadingCounterMetadata

        text = "Number of loads and stores of KV offloading that failed, by kind."
        counter = OffloadingCounterMetadata(documentation=text, labelnames=("kind",))
        return {**super().build_metric_definitions(extra_config), FAILED: counter}  # type: ignore[misc]

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker, which the first call makes."""
        from vllm.platforms import current_platform

        if self._worker is None and current_platform.is_cpu():
            self._worker = self.create_worker(kv_caches)  # vLLM's method then returns it, and asks no more
        return super().get_worker(kv_caches)  # type: ignore[misc]

    def _region(self: Any, engine_id: str, **more: Any) -> Any:
        """Open the region that the workers share."""
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        return SharedOffloadRegion(
            engine_id=engine_id, num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker, **more,
        )  # fmt: skip

    def _worker_of(self: Any, kv_caches: Any, region: Any, *, canonical: bool) -> Any:
        """Make the worker of a region; release the region if that fails."""
        make, *_ = classes()
        try:
            return make(
                kv_caches, self.blocks_per_chunk, self.num_chunks, region, canonical_layout=canonical,
                policy=policy_of(self.extra_config), by_layer=layer_options_of(self.extra_config) is not None,
            )  # fmt: skip
        except Exception:
            if region is not None:
                region.cleanup()
            raise


@functools.cache
def classes() -> tuple[type[Any], ...]:
    """Return the classes of the worker and the specs; this imports vLLM."""
    import torch
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import _REGION_SEGMENTS, CPUOffloadingSpec, _all_workers_barrier
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    class KVPlanOffloadingWorker(Worker, OffloadingWorker):  # type: ignore[misc]
        """A worker with the arguments of vLLM's ``CPUOffloadingWorker``, which moves blocks with a kvplan executor.

        Args:
            kv_caches: the canonical caches.
            blocks_per_chunk: number of device blocks in a host chunk.
            num_cpu_chunks: number of chunks of the worker's own pool, if there is no region.
            mmap_region: the shared region; the worker releases it at shutdown, unless this call raises an error.
            canonical_layout: whether the region has canonical pages.
            policy: policy of the executors.
            by_layer: whether loads go layer by layer.
        """

        def __init__(
            self, kv_caches: Any, blocks_per_chunk: int, num_cpu_chunks: int, mmap_region: Any = None,
            canonical_layout: bool = False, policy: Policy | None = None, by_layer: bool = False,
        ) -> None:  # fmt: skip
            groups = kv_caches.group_data_refs
            device_rows = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
            pages = [rows.shape[1] for rows in device_rows]
            if canonical_layout:
                pages = canonical_nbytes(groups, len(device_rows))
            rows = host_rows(
                [page * blocks_per_chunk for page in pages], mmap_region, num_cpu_chunks, canonical=canonical_layout,
                on_device=device_rows[0].device.type != "cpu",
            )  # fmt: skip
            super().__init__(
                groups, device_rows, rows, blocks_per_chunk, canonical=canonical_layout, policy=policy,
                by_layer=by_layer, result=TransferResult, release=None if mmap_region is None else mmap_region.cleanup,
            )  # fmt: skip

    class KVPlanOffloadingSpec(OnAnyPlatform, CPUOffloadingSpec):  # type: ignore[misc]
        """A ``CPUOffloadingSpec`` of vLLM with kvplan's worker."""

        def create_worker(self, kv_caches: Any) -> Any:
            """Make a worker for the shared region, or with its own pool if the platform has no shared region."""
            region = None
            if self._uses_shared_region() and self.num_chunks > 0:
                parallel = self.config.parallel
                share = (parallel.rank, parallel.world_size) if self.replicated_layout else None
                region = self._region(
                    self.config.engine_id, barrier=_all_workers_barrier, num_segments=_REGION_SEGMENTS,
                    populate_shard=share,
                )  # fmt: skip
            return self._worker_of(kv_caches, region, canonical=False)

    class KVPlanTieringOffloadingSpec(OnAnyPlatform, TieringOffloadingSpec):  # type: ignore[misc]
        """A ``TieringOffloadingSpec`` of vLLM with kvplan's worker."""

        def create_worker(self, kv_caches: Any) -> Any:
            """Make a worker for the region that the tiers read and write."""
            canonical = self.config.canonical_layout
            if canonical:
                self._validate_canonical_refs(kv_caches)
            return self._worker_of(kv_caches, self._region(self._engine_id), canonical=canonical)

    return KVPlanOffloadingWorker, KVPlanOffloadingSpec, KVPlanTieringOffloadingSpec

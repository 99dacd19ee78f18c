"""Names of vLLM's counters and gauges."""

from __future__ import annotations

LOADED, STORED = "vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"
HITS, ASKED = "vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"
OWN_HITS, PREEMPTED = "vllm:prefix_cache_hits", "vllm:num_preemptions"
WRITTEN, READ = "vllm:kv_offload_tiering_write_bytes", "vllm:kv_offload_tiering_read_bytes"
FAILED = "vllm:kv_offload_failed_transfers"
PINNED = "vllm:kv_offload_cpu_cache_usage_perc"

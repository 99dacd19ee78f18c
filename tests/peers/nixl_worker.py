"""vLLM's own worker of its NixlConnector, over caches on the CPU; the engine around it is a stand-in.

As a program it is one side of a transfer: it makes a worker with NIXL's agent or with kvplan's, and answers commands.
"""

from __future__ import annotations

import base64
import sys
import time
from types import SimpleNamespace

import msgspec
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 12, 16, 2, 8, 3


class Backend:
    """An attention backend that accepts every block."""

    @staticmethod
    def get_name():
        return "STAND_IN"


def config(**extra):
    """A configuration as the worker reads it."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu", kv_connector_extra_config=extra
        ),
        cache_config=SimpleNamespace(
            block_size=TOKENS, cache_dtype="auto", get_resolved_kv_cache_layout=lambda: SimpleNamespace(name="LBHNC")
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        model_config=SimpleNamespace(
            enable_sleep_mode=False, use_mla=False, model="m", dtype="float16", get_total_num_kv_heads=lambda: HEADS,
            get_head_size=lambda: DIM, get_total_num_hidden_layers=lambda: LAYERS,
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1,
            tensor_parallel_size=1,
        ),
        speculative_config=None,
    )  # fmt: skip


def contents(engine):
    """The caches of an engine at the start: random bytes for each layer, in shared memory."""
    generator = torch.Generator().manual_seed(len(engine))
    return {
        f"model.layers.{layer}.attn": torch.randint(
            -(2**15), 2**15, (BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=torch.int16, generator=generator
        ).share_memory_().view(torch.float16)
        for layer in range(LAYERS)
    }  # fmt: skip


def worker(engine, agent, patch=setattr):
    """vLLM's worker with an agent of this class, and its caches; ``patch`` sets attributes of vLLM's module."""
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float16)
    caches = contents(engine)
    plan = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],  # the worker reads the caches
        kv_cache_groups=[KVCacheGroupSpec(list(caches), spec)],
    )
    for name, value in {
        "NixlWrapper": agent,
        "current_platform": SimpleNamespace(
            device_type="cpu", discover_numa_topology=list, get_nixl_memory_type=lambda: "DRAM", is_rocm=lambda: False
        ),
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_current_attn_backends": lambda config: [Backend],
        "get_current_attn_backends_and_specs": lambda *given: ([Backend], [spec]),
        "select_common_block_size": lambda size, *given: size,
    }.items():
        assert hasattr(base_worker, name)
        patch(base_worker, name, value)
    made = NixlPullConnectorWorker(config(), engine, plan)
    made.register_kv_caches(caches)
    return made, caches


def meet(decode, payload):
    """Let a decode worker add a prefill worker, as its handshake thread does with the reply."""
    told = msgspec.msgpack.decode(payload, type=NixlHandshakePayload)
    assert told.compatibility_hash == decode.compat_hash
    metadata = msgspec.msgpack.decode(told.agent_metadata_bytes, type=NixlAgentMetadata)
    decode._remote_agents[metadata.engine_id][0, 0] = decode.add_remote_agent(metadata, 0, 1, metadata.dcp_size)
    decode._engine_by_address["localhost", 0] = metadata.engine_id
    decode._engine_last_active[metadata.engine_id] = time.perf_counter()
    return metadata.engine_id


def pull(decode, request, engine, here, there):
    """Let a decode worker read blocks of a prefill worker."""
    step = NixlConnectorMetadata()
    step.add_new_req_to_recv(
        request, (list(here),),
        {"remote_block_ids": (list(there),), "remote_engine_id": engine, "remote_request_id": f"p-{request}",
         "remote_host": "localhost", "remote_port": 0, "tp_size": 1},
        awaiting_kvs=True,
    )  # fmt: skip
    decode.start_load_kv(step)


def serve(prefill, requests):
    """Tell a prefill worker of requests whose blocks will be read."""
    step = NixlConnectorMetadata()
    step.scheduler_clock = time.perf_counter()
    step.reqs_in_batch = {f"p-{request}" for request in requests}
    step.reqs_to_send = {f"p-{request}": time.perf_counter() + 600 for request in requests}
    prefill.start_load_kv(step)


def answered(*words):
    """Write a line of words."""
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main():
    """Be a prefill worker: answer each line of input with a line of output."""
    kind = sys.argv[1]
    if kind == "kvplan":
        from kvplan.engines import nixl

        nixl.install()
    from nixl._api import nixl_agent

    worker_, _ = worker("prefill", nixl_agent)
    sent = set()
    answered("READY", base64.b64encode(msgspec.msgpack.encode(worker_.xfer_handshake_metadata)).decode())
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "serve":
            serve(worker_, rest)
            answered("SERVED")
        elif command == "sent":
            sent |= worker_.get_finished()[0]
            answered("SENT", *sorted(sent))
    worker_.shutdown()


if __name__ == "__main__":
    main()

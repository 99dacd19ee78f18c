"""Configurations of engines as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.whole_engines.model import TOKEN_NBYTES
from tests.whole_engines.work import BLOCK, CROWD_GPU_BLOCKS, GPU_BLOCKS, HELD, SHARED

BLOCK_NBYTES = BLOCK * TOKEN_NBYTES
LARGE = 1 << 28  # bytes of a host pool that holds all
SMALL = 80 * BLOCK_NBYTES  # less than half of the chats
MODULE = "kvplan.engines.vllm"
OURS = {"kv_connector": "KVPlanOffloadingConnector", "kv_connector_module_path": MODULE,
        "kv_load_failure_policy": "recompute"}  # fmt: skip
VLLMS = {"kv_connector": "OffloadingConnector"}
FOLDER = "<folder>"  # of a tier; each case has its own


@dataclass(frozen=True)
class Case:
    """An engine and the work that it serves.

    Attributes:
        name: name of the case.
        connector: entries of ``kv_transfer_config``; empty without offloading.
        extra: entries of ``kv_connector_extra_config``, besides the spec.
        work: key of :data:`tests.whole_engines.work.WORKS`.
        faults: arguments of :class:`tests.whole_engines.faults.Faults`.
        env: environment variables of the engine's process.
        engine: arguments of vLLM's ``LLM`` instead of the usual ones, or besides them.
        ahead: whether a step is scheduled before the last one has ended. vLLM does so on GPUs; on CPUs it must be told.
        among: whether vLLM's ``MultiConnector`` holds the connector.
        model: key of :data:`tests.whole_engines.gpu_models.MODELS`; "" is the Llama of model.py.
    """

    name: str
    connector: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    work: str = "chats"
    faults: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    ahead: bool = False
    among: bool = False

    @property
    def tiers(self) -> bool:
        """Whether it has a second tier."""
        return "secondary_tiers" in self.extra

    @property
    def pool(self) -> int:
        """Bytes of the host pool."""
        return self.extra.get("cpu_bytes_to_use", LARGE)

    def transfer_config(self, engine_id: str, folder: str) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config``."""
        spec = "KVPlanTieringOffloadingSpec" if self.tiers else "KVPlanOffloadingSpec"
        extra = {"cpu_bytes_to_use": LARGE, "spec_name": spec, "spec_module_path": MODULE, **self.extra}
        if self.tiers:
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": folder}]
        own = {**self.connector, "kv_connector_extra_config": extra}
        if self.among:
            held = {"connectors": [{"kv_role": "kv_both", **own}]}
            own = {**self.connector, "kv_connector": "MultiConnector", "kv_connector_extra_config": held}
            del own["kv_connector_module_path"]
        return {**own, "kv_role": "kv_both", "engine_id": engine_id}

    def arguments(self, model: str, engine_id: str, folder: str) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``."""
        blocks = CROWD_GPU_BLOCKS if self.work == "crowd" else GPU_BLOCKS
        found = {
            "model": model, "dtype": "float32", "enforce_eager": True, "disable_log_stats": False,
            "block_size": BLOCK, "num_gpu_blocks_override": blocks, "max_model_len": 1024, "max_num_seqs": 8,
        }  # fmt: skip
        found |= self.engine
        return found | ({"kv_transfer_config": self.transfer_config(engine_id, folder)} if self.connector else {})


ANSWERS = {"offload_prompt_only": False}  # vLLM's default stores the blocks of prompts only
LAYERS = {"load_by_layer": True}
ONE_IN_STEP = {**LAYERS, "sync_load_budget_bytes": SHARED // BLOCK * BLOCK_NBYTES}  # the others load between the steps
TIERS = {"cpu_bytes_to_use": SMALL, "secondary_tiers": FOLDER}

WHOLE = [  # every block that was computed is stored once, and every prefix that the host holds is loaded
    Case("vllm's connector", VLLMS, ANSWERS),
    Case("vllm's connector, in the step", VLLMS, {**ANSWERS, "sync_load_budget_bytes": LARGE}),
    Case("connector", OURS, ANSWERS),
    Case("connector, prompts only", OURS),
    Case("by layer", OURS, {**ANSWERS, **LAYERS}),
]
SMALL_POOL = [  # the pool holds less than half of the blocks
    Case("small pool, vllm's connector", VLLMS, {"cpu_bytes_to_use": SMALL}),
    Case("small pool", OURS, {"cpu_bytes_to_use": SMALL}),
    Case("small pool, by layer", OURS, {"cpu_bytes_to_use": SMALL, **LAYERS}),
]
TIERED = [  # the same pool over files
    Case("tiers, vllm's connector", VLLMS, TIERS),
    Case("tiers", OURS, TIERS),
    Case("tiers, by layer", OURS, {**TIERS, **LAYERS}),
    Case("tiers, canonical", OURS, {**TIERS, "canonical_layout": True}),
]
PREEMPTED = [
    Case("crowd, vllm's connector", VLLMS, work="crowd"),
    Case("crowd", OURS, work="crowd"),
    Case("crowd, by layer", OURS, LAYERS, work="crowd"),
    Case("crowd, small pool", OURS, {"cpu_bytes_to_use": SMALL}, work="crowd"),
    Case("crowd, tiers", OURS, TIERS, work="crowd"),
]
TWO_IN_STEP = {**LAYERS, "sync_load_budget_bytes": 2 * HELD // BLOCK * BLOCK_NBYTES}
WAITING = [
    Case("queue, by layer", OURS, TWO_IN_STEP, work="queue"),
    Case("queue, by layer, scheduled ahead", OURS, TWO_IN_STEP, work="queue", ahead=True),
]
FAILING = [
    Case("loads fail", OURS, faults={"loads": 2}),
    Case("loads by layer fail", OURS, LAYERS, faults={"loads": 2}),
    Case("stores fail", OURS, faults={"stores": 3}),
    Case("both fail, tiers", OURS, TIERS, faults={"loads": 3, "stores": 4}),
    Case("both fail in a crowd", OURS, work="crowd", faults={"loads": 2, "stores": 3}),
    Case("both fail in a crowd, by layer", OURS, LAYERS, work="crowd", faults={"loads": 2, "stores": 3}),
    Case("loads by layer fail, scheduled ahead", OURS, LAYERS, faults={"loads": 2}, ahead=True),
    Case("both fail in a crowd, by layer, scheduled ahead", OURS, LAYERS, work="crowd",
         faults={"loads": 2, "stores": 3}, ahead=True),
    Case("loads by layer fail, MultiConnector", OURS, LAYERS, faults={"loads": 2}, ahead=True, among=True),
    Case("a shared load fails", OURS, ONE_IN_STEP, work="shared", faults={"loads": 3}),
    Case("a shared load fails, scheduled ahead", OURS, ONE_IN_STEP, work="shared", faults={"loads": 3}, ahead=True),
]  # fmt: skip
HOPELESS = [
    Case("every load fails", OURS, faults={"loads": 1}),
    Case("every load by layer fails, scheduled ahead", OURS, LAYERS, faults={"loads": 1}, ahead=True),
]
LMCACHE = {"kv_connector": "LMCacheConnectorV1"}
# LMCache's chunks are the engine's blocks here; its pool holds all, or a part.
CHUNKS = {"KVPLAN_LMCACHE": "auto", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": str(BLOCK),
          "LMCACHE_MAX_LOCAL_CPU_SIZE": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}  # fmt: skip
CACHED = [  # LMCache has no connector for CPUs, so that all of its tokens are moved by kvplan
    Case("lmcache", LMCACHE, env=CHUNKS),
    Case("lmcache, chunks of two blocks", LMCACHE, env={**CHUNKS, "LMCACHE_CHUNK_SIZE": str(2 * BLOCK)}),
    Case("lmcache, crowd", LMCACHE, work="crowd", env=CHUNKS),
]
# Layers with a sliding window keep blocks of their own; 160 blocks of both kinds hold fewer than half of the chats.
_RANDOM = {"load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": 160}
_WINDOW: dict[str, Any] = {"model": "sliding window", "engine": _RANDOM}
HYBRID = [
    Case("hybrid", OURS, **_WINDOW),
    Case("hybrid, by layer", OURS, LAYERS, **_WINDOW),
    Case("hybrid, loads by layer fail", OURS, LAYERS, faults={"loads": 2}, **_WINDOW),
    Case("hybrid, loads by layer fail, scheduled ahead", OURS, LAYERS, faults={"loads": 2}, ahead=True, **_WINDOW),
]

"""Configurations of engines on a GPU: attention backends, layouts of the cache, element types, kinds of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.whole_engines import cases
from tests.whole_engines.cases import LAYERS, OURS, Case
from tests.whole_engines.gpu_models import TOKEN_NBYTES

# Answers in prompts are given: in 16 bits, two tokens that are nearly as likely may change places.
LIKELY = 8  # most likely tokens of each step that an engine tells
WORK = "given chats"
USUAL: dict[str, Any] = {
    "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "max_num_batched_tokens": 2048,
    # A dozen engines run side by side.
    "gpu_memory_utilization": 0.06, "kv_cache_memory_bytes": 1 << 26,
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """An engine without its connector.

    Attributes:
        name: its name in tests and tables.
        model: key of :data:`tests.whole_engines.gpu_models.MODELS`.
        engine: arguments of vLLM's ``LLM``, besides the usual ones.
        layout: vLLM's name of the cache's layout, or "" for the backend's own choice.
    """

    name: str
    model: str = "llama"
    engine: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""

    def put_into(self, case: Case) -> Case:
        """Return a case on the GPU with this configuration."""
        env = {"VLLM_KV_CACHE_LAYOUT": self.layout} if self.layout else {}
        work = WORK if case.work == "chats" else case.work
        return replace(case, name=f"{self.name}: {case.name}", work=work, model=self.model,
                       env={**case.env, **env}, engine={**USUAL, **self.engine})  # fmt: skip


def backend(name: str, **more: Any) -> dict[str, Any]:
    """Arguments that choose an attention backend."""
    return {"attention_backend": name, **more}


FA3 = backend("FLASH_ATTN")
USUAL_CONFIGURATION = Configuration("FlashAttention 3", engine=FA3)
# A hybrid model takes blocks for each kind of layer. Those of the state-space model have more tokens.
MORE_BLOCKS, FEWER_BLOCKS = {"num_gpu_blocks_override": 160}, {"num_gpu_blocks_override": 72}
CONFIGURATIONS = [
    USUAL_CONFIGURATION,
    Configuration("FlashAttention 3, LBHNC", engine=FA3, layout="LBHNC"),
    Configuration("FlashAttention 3, BLHNC", engine=FA3, layout="BLHNC"),
    Configuration("FlashAttention 3, fp8", engine=backend("FLASH_ATTN", kv_cache_dtype="fp8")),
    Configuration("Triton", engine=backend("TRITON_ATTN")),
    Configuration("Triton, BLHNC", engine=backend("TRITON_ATTN"), layout="BLHNC"),
    Configuration("Triton, fp8", engine=backend("TRITON_ATTN", kv_cache_dtype="fp8")),
    Configuration("FlexAttention", engine=backend("FLEX_ATTENTION")),
    Configuration("MLA, FlashAttention 3", "mla", backend("FLASH_ATTN_MLA")),
    Configuration("MLA, Triton", "mla", backend("TRITON_MLA")),
    Configuration("MLA, Triton, BLHNC", "mla", backend("TRITON_MLA"), layout="BLHNC"),
    Configuration("sliding window, FlashAttention 3", "sliding window", FA3 | MORE_BLOCKS),
    Configuration("state-space, FlashAttention 3", "mamba", FA3 | FEWER_BLOCKS),
]
HYBRID = next(one for one in CONFIGURATIONS if one.model == "sliding window")
STATES = next(one for one in CONFIGURATIONS if one.model == "mamba")
ONE_OF_EACH_MODEL = list({one.model: one for one in reversed(CONFIGURATIONS)}.values())
WAYS = [Case("kvplan", OURS), Case("kvplan, by layer", OURS, LAYERS)]
# Those of the CPU, but for what WAYS are already. On a GPU, vLLM always schedules ahead. LMCache has its own connector
# for GPUs.
_OURS = [*cases.SMALL_POOL, *cases.TIERED, *cases.PREEMPTED, *cases.FAILING]
_GIVEN = [cases.WHOLE[0], *(case for case in _OURS if case.connector == OURS and not case.ahead)]


def in_16_bits(case: Case) -> Case:
    """Return a case of the CPU, whose cache has 32 bits an element, with half of the bytes."""
    extra = {key: value // 2 if "bytes" in key else value for key, value in case.extra.items()}
    return replace(case, extra=extra)


OTHERS = [in_16_bits(case) for case in _GIVEN]


def token_nbytes(case: Case) -> int:
    """Bytes of KV cache per token, of all layers, where each layer holds each token; otherwise 0."""
    return TOKEN_NBYTES.get(case.model, 0) // (2 if case.engine.get("kv_cache_dtype") == "fp8" else 1)

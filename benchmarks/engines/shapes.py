"""Models as data, and the prompts and chats that every engine of a run gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 32000
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
           "tie_word_embeddings": False}  # fmt: skip
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128, **_COMMON}


@dataclass(frozen=True)
class Shape:
    """A model with random weights.

    Attributes:
        title: its name in tables.
        config: the model's ``config.json``.
        token_nbytes: bytes of KV cache per token, of all layers.
    """

    title: str
    config: Mapping[str, Any]
    token_nbytes: int


SHAPES = {
    "8b": Shape(
        "Llama-8B shape: 32 layers, 8 KV heads",
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8},
        token_nbytes=32 * 2 * 8 * 128 * 2,
    ),
    "gqa1": Shape(
        "80 layers, 1 KV head",
        {**_LLAMA, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 80, "num_attention_heads": 8,
         "num_key_value_heads": 1},
        token_nbytes=80 * 2 * 1 * 128 * 2,
    ),
    # DeepSeek-V2-Lite's attention. All layers are dense: no kernel of mixtures of experts is needed.
    "mla": Shape(
        "MLA: 27 layers, latent of 512 + 64",
        {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **_COMMON, "hidden_size": 2048,
         "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 27},
        token_nbytes=27 * (512 + 64) * 2,
    ),
    "tiny": Shape(
        "4 layers, 2 KV heads",
        {**_LLAMA, "head_dim": 64, "torch_dtype": "float32", "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        token_nbytes=4 * 2 * 2 * 64 * 4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Chats:
    """Chats of several turns, whose sessions take turns in a fixed order.

    Attributes:
        sessions: number of sessions; together they exceed the GPU's cache.
        context: tokens of a session before its first turn.
        turns: number of turns per round of the benchmark.
        asked: new tokens of the user per turn.
        answered: tokens of an answer.
        in_flight: number of sessions whose turn is served at the same time.
    """

    sessions: int = 32
    context: int = 2400
    turns: int = 3
    asked: int = 128
    answered: int = 32
    in_flight: int = 16

    @property
    def session_tokens(self) -> int:
        """Tokens of a session after its last turn."""
        return self.context + self.turns * (self.asked + self.answered)


@dataclass(frozen=True)
class Work:
    """Sizes of a run, in tokens unless said otherwise.

    Attributes:
        held: lengths of the prefixes that the host holds; beside decoding, only the first one is measured.
        prompts: number of different prompts of each length in ``held``. Those of the first length exceed the GPU's
            cache, so that hits beside decoding come from the host; before a hit alone, the GPU's cache is emptied.
        suffixes: numbers of new tokens behind a prefix.
        suffix: the one that is measured beside decoding, for long prefixes, and with most hits.
        hits: number of hits per round with ``suffix`` new tokens, and beside decoding.
        fewer: number of hits per round in the other measures.
        decoders: number of requests that decode beside hits.
        every: steps of the engine between two hits beside decoding.
        rounds: number of rounds.
        gpu_tokens: size of the GPU's cache.
        host_tokens: size of the host pool.
        block: tokens per block.
        batch: most tokens per step of the engine.
    """

    held: tuple[int, ...] = (6000, 28000)
    prompts: tuple[int, ...] = (10, 2)
    suffixes: tuple[int, ...] = (1, 128, 512, 2048)
    suffix: int = 512
    hits: int = 12
    fewer: int = 6
    decoders: int = 16
    every: int = 12
    rounds: int = 5
    gpu_tokens: int = 48_000
    host_tokens: int = 104_000
    block: int = 16
    batch: int = 2048
    chats: Chats = field(default_factory=Chats)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        decoding = 200 + 64 + (self.hits + 4) * self.every
        return max(max(self.held) + max(self.suffixes) + self.block, self.chats.session_tokens + self.block, decoding)


FULL = Work()
SMOKE = Work(held=(640, 1280), prompts=(6, 2), suffixes=(1, 64), suffix=64, hits=3, fewer=2, decoders=2, every=4,
             rounds=2, gpu_tokens=2560, host_tokens=8192, block=32, batch=512,
             chats=Chats(sessions=6, context=512, turns=2, asked=32, answered=8, in_flight=2))  # fmt: skip

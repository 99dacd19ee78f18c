"""Tiny models of several kinds for engines on a GPU. Their weights are random: no file of weights is needed."""

from __future__ import annotations

from typing import Any

WORDS = 1024
_COMMON = {
    "vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON, **_HEADS},
    # DeepSeek-V2's attention. All layers are dense: no kernel of mixtures of experts is needed.
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **_COMMON,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 4, "moe_intermediate_size": 128,
    },
    "sliding window": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_COMMON, **_HEADS,
        "sliding_window": 128, "layer_types": [SLIDING, FULL, SLIDING, FULL], "query_pre_attn_scalar": 64,
    },
    # Each layer has attention and a state-space model, whose states are in the same cache.
    "mamba": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", **_COMMON, **_HEADS,
        "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_chunk_size": 64,
    },
}  # fmt: skip
# Bytes of KV cache per token in 16 bits, of all layers, where every layer holds every token.
TOKEN_NBYTES = {"llama": 4 * 2 * 2 * 64 * 2, "mla": 4 * (512 + 64) * 2}

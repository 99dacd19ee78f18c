"""Refusals of the command line: models' configs, named models, arguments, and files that it reads."""

from __future__ import annotations

from tests.contract.refusals.table import UsageError, command, file, rows

ROWS = []

PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
LLAMA = PLAIN | {"model_type": "llama"}
LATENT = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
MAMBA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 16,
         "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4}  # fmt: skip
NEMOTRON = {"model_type": "nemotron_h", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
            "ssm_state_size": 32, "conv_kernel": 4}  # fmt: skip


def config(content):
    return command("inspect", "--config", file(content, "config.json"))


ROWS += rows(
    "inspect --config",
    config,
    UsageError,
    [
        ({**MAMBA, "model_type": "bamba"}, "bamba ... no layer with attention"),
        ({**MAMBA, "model_type": "bamba", "attn_layer_indices": [4]}, "'attn_layer_indices' ... [4]"),
        ({**MAMBA, "model_type": "falcon_h1", "mamba_d_head": None}, "'mamba_d_head' ... missing"),
        (NEMOTRON, "which layers ... state ... 'hybrid_override_pattern'"),
        ({**NEMOTRON, "hybrid_override_pattern": "M*"}, "'hybrid_override_pattern' ... 'M*' ... of 4, one per layer"),
        ({**NEMOTRON, "hybrid_override_pattern": "M*X-"}, "'hybrid_override_pattern' ... 'X'"),
        (
            {**PLAIN, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "layer_types": ["linear_attention"] * 4},
            "hold a state ... not known ... spec",
        ),
        (b"\xff", "cannot read ... config"),
        (b"{", "JSON"),
        (b"[]", "holds ... list"),
        (b"{}", "config.json: 'num_hidden_layers' is missing"),
        ({"text_config": {"model_type": "a new one"}}, "'text_config' ... 'num_hidden_layers' is missing"),
        ({"text_config": {"text_config": {"text_config": {}}}}, "'num_hidden_layers' is missing"),
    ],
)
UNKNOWN = """
attention_chunk_size attention_k_eq_v attention_types attn_type_list block_configs block_types compress_rates
compress_ratios conv_L_cache cross_attention_layers global_head_dim hybrid_layer_ids hybrid_layer_pattern
hybrid_override_pattern is_encoder_decoder layer_group_size layers_block_type linear_attn_config mamba_n_heads
mamba_num_heads multi_query new_decoder_architecture num_global_key_value_heads num_kv_shared_layers ssm_state_size
swa_num_key_value_heads
"""
ROWS += rows(
    "inspect --config",
    lambda change: config(PLAIN | change),
    UsageError,
    [
        *[({key: 3}, f"'{key}' is 3, which changes what the cache holds") for key in UNKNOWN.split()],
        ({"num_hidden_layers": None}, "'num_hidden_layers' ... from 1"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' ... True"),
        ({"num_key_value_heads": [2, 2]}, "'num_key_value_heads' ... [2, 2]"),
        ({"num_key_value_heads": list(range(99))}, "of 99 ... list"),
        ({"hidden_size": 500}, "'hidden_size' ... 500 ... of 8 heads"),
        ({"v_head_dim": 32}, "'v_head_dim' ... is 32 ... has 64"),
        ({"sliding_window": 16}, "'layer_types' ... 'sliding_window_pattern'"),
        ({"layer_types": ["full_attention"]}, "it ... of 4, one"),
        ({"layer_types": ["chunked_attention"] * 4}, "'attention_chunk_size' is missing"),
        ({"layer_types": ["linear_attention"] * 4}, "hold a state ... not known ... spec"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_window' ... missing"),
        ({"kv_lora_rank": 8, "sliding_window": 16}, "'sliding_window' is 16 ... 'layer_types'"),
        (
            {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "index_head_dim": 8, "indexer_types": ["full", "shared"]},
            "'indexer_types' ... 'shared'",
        ),
        ({"text_config": 3}, "text_config ... is 3"),
    ],
)
ROWS += rows(
    "inspect --config",
    config,
    UsageError,
    [
        (LLAMA | {"layer_types": [["full_attention"]] * 4}, "'layer_types' ... ['full_attention']"),
        (LLAMA | {"layer_types": [None] * 4}, "'layer_types' ... None"),
        (LATENT | {"indexer_types": 3}, "'indexer_types' ... is 3 ... of 4, one"),
        (LATENT | {"indexer_types": [["full"]]}, "'indexer_types' ... ['full']"),
        (LLAMA | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": "2"}, "'2'"),
        (LLAMA | {"num_hidden_layers": 5_000_000}, "is 5000000 ... from 1 ... 4096"),
        (LLAMA | {"num_hidden_layers": 2**64, "full_attention_interval": 4}, "of 65 bits ... number"),
        (LLAMA | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": "4"}, "'attn_layer_offset'"),
        (LLAMA | {"head_dim": 2**40}, "'head_dim' ... is 1099511627776"),
        (LLAMA | {"num_key_value_heads": 2**63}, "from 1 ... 65536"),
        ({"text_config": "x" * 10**6}, "text_config"),
    ],
)
SPEC = '{"notation": "block token dim", "sizes": {"block": 4, "token": 2, "dim": 8}}'


def with_files(*arguments):
    file(SPEC, "a.json"), file("{", "bad.json")
    return command(*arguments)


ROWS += rows(
    "python -m kvplan",
    lambda line: with_files(*line.split()),
    UsageError,
    [
        ("", "required: COMMAND"),
        ("nothing", "'nothing' ... inspect"),
        ("inspect", "required: SPEC"),
        ("inspect none.json", "none.json ... No such file"),
        ("inspect bad.json", "bad.json ... JSON"),
        ("inspect --model gemma-27b", "gemma-27b ... gemma-3-27b"),
        ("inspect --model zzz", "zzz ... llama-3.1-8b"),
        ("inspect --model llama-3.1-8b --tp 3", "3 tensor-parallel ranks ... 8 KV heads"),
        ("inspect --model llama-3.1-8b --rank=2", "--rank=2"),
        ("plan a.json a.json --src 0 --dst 4", "--dst names block 4 ... 0 to 3"),
        ("plan a.json a.json --src x --dst 1", "'x' ... block id"),
        ("inspect --model deepseek-v3 --host page-first", "'page-first' ... mha ... mla-page-first"),
        ("bench --device cuda:99", "cuda"),
        ("calibrate --device cuda:99", "cuda"),
        ("doctor --threads x", "unrecognized arguments: --threads x"),
        ("advise none.json", "none.json ... No such file"),
        ("explain a.json none.json", "none.json ... No such file"),
        ("report none.json --output x.html", "none.json ... No such file"),
        ("report a.json", "--output"),
        ("backends extra", "unrecognized arguments: extra"),
        ("demo --blocks 0", "unrecognized arguments: --blocks 0"),
    ],
)

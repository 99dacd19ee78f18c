"""Geometries read from config.json files, and the catalogue held against the classes of transformers."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from kvplan.catalogue.config import geometry_of
from kvplan.catalogue.models import Group, config_defaults, models

MODELS = models()
PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


def test_heads_and_dim_fall_back():
    assert geometry_of(PLAIN)[0] == (Group("full", "mha", (0, 1, 2, 3), dim=64, heads=2),)
    (group,), _ = geometry_of({**PLAIN, "num_key_value_heads": None, "head_dim": 96})
    assert (group.heads, group.dim) == (8, 96)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ({"sliding_window": 16, "sliding_window_pattern": 2}, (1, 3)),
        ({"sliding_window": 16, "layer_types": ["full_attention", *["sliding_attention"] * 3]}, (0,)),
        ({"sliding_window": 16, "use_sliding_window": False}, (0, 1, 2, 3)),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (0, 1, 2)),
        ({"sliding_window": 16, "model_type": "qwen2", "max_window_layers": 3}, (0, 1, 2, 3)),
        ({"sliding_window": None, "model_type": "mistral"}, (0, 1, 2, 3)),
        ({"sliding_window": 16, "model_type": "mistral"}, ()),
        ({"sliding_window": 1024, "model_type": "gemma3_text", "num_hidden_layers": 7}, (5,)),
    ],
)
def test_which_layers_slide(given, full):
    groups, layers = geometry_of({**PLAIN, **given})
    held = {group.name: group for group in groups}
    assert (held["full"].layers if "full" in held else ()) == full
    sliding = tuple(layer for layer in range(layers) if layer not in full)
    assert (held["sliding"].layers if "sliding" in held else ()) == sliding
    assert all(group.window == given["sliding_window"] for group in groups if group.name == "sliding")


def test_jamba_as_its_file_says():
    given = {"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
             "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4,
             "mamba_d_state": 16, "mamba_expand": 2, "sliding_window": None}  # fmt: skip
    assert geometry_of(given)[0] == MODELS["jamba-v0.1"].groups


LLAVA = {"model_type": "llava", "vision_config": {"num_hidden_layers": 24}}


@pytest.mark.parametrize(
    ("text", "layers", "heads", "dim", "window"),
    [
        # As the files of LLaVA 1.5 and 1.6 are: what transformers has by default is left out.
        ({"model_type": "llama", "vocab_size": 32064}, 32, 32, 128, None),
        ({"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": None}, 32, 8, 128, None),
        ({"model_type": "mistral"}, 32, 8, 128, 4096),
        ({"model_type": "gemma", "hidden_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 18,
          "num_key_value_heads": 1}, 18, 1, 256, None),
    ],
)  # fmt: skip
def test_text_configs_leave_out_defaults(text, layers, heads, dim, window):
    for nested in ({"text_config": text}, {"llm_config": text}, {"thinker_config": {"text_config": text}}):
        (group,), count = geometry_of({**LLAVA, **nested})
        assert (count, group.heads, group.dim, group.window) == (layers, heads, dim, window)


MAMBA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 16,
         "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4}  # fmt: skip
# 3 inputs of 8 x 16 channels and of B and C of one group, and a state of 32 for each channel.
CONV, BC, SSM = 3 * 128, 3 * 2 * 32, 128 * 32


@pytest.mark.parametrize(
    ("given", "full", "state"),
    [
        ({"model_type": "falcon_h1"}, (0, 1, 2, 3), (0, 1, 2, 3)),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, (2,), (0, 1, 3)),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2}, (1, 3), (0, 2)),
    ],
)
def test_hybrids_by_their_own_keys(given, full, state):
    groups, _ = geometry_of({**MAMBA, **given})
    assert groups == (
        Group("full", "mha", full, dim=16, heads=4),
        Group("state", "state", state, dim=CONV + BC + SSM, dtype="bf16", shards=8, whole=BC),
    )
    # Two ranks: half of the heads each, and B and C whole.
    assert groups[1].rank_share(groups[1].dim, 2) == (CONV + SSM) // 2 + BC


def test_several_groups_of_heads_are_divided():
    (_, state), _ = geometry_of({**MAMBA, "model_type": "falcon_h1", "mamba_n_groups": 2})
    assert (state.dim, state.shards, state.whole) == (CONV + 2 * BC + SSM, 2, 0)


NEMOTRON = {"model_type": "nemotron_h", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
            "ssm_state_size": 32, "conv_kernel": 4}  # fmt: skip


@pytest.mark.parametrize(
    "types",
    [{"hybrid_override_pattern": "M-*M"}, {"layers_block_type": ["mamba", "moe", "attention", "linear_attention"]}],
)
def test_nemotron_h(types):
    groups, _ = geometry_of({**NEMOTRON, **types})
    assert [(group.layers, group.dim) for group in groups] == [((2,), 16), ((0, 3), CONV + BC + SSM)]
    (_, state), _ = geometry_of({**NEMOTRON, **types, "mamba_ssm_cache_dtype": "float32"})
    assert (state.dtype, state.dim, state.whole) == ("uint8", 2 * (CONV + BC) + 4 * SSM, 2 * BC)


def test_short_convolutions():
    given = {"model_type": "lfm2", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
             "num_key_value_heads": 2, "conv_L_cache": 3}  # fmt: skip
    for types in ({"layer_types": ["conv", "full_attention", "conv"]}, {"full_attn_idxs": [1]}):
        full, state = geometry_of({**given, **types})[0]
        assert (full.layers, state.layers, state.dim, state.shards) == ((1,), (0, 2), 2 * 64, 64)


def test_latents_and_nested_text():
    inner = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    latent, index = geometry_of({"vision_config": {}, "text_config": inner | {"index_head_dim": 128}})[0]
    assert (latent.dim, index.dim, index.part) == (576, 132, "index")
    assert len(geometry_of({"language_config": inner})[0]) == 1


# ---- against transformers ------------------------------------------------------------------------------------------

# The classes whose defaults the catalogue cites as its source.
CITED = {
    "qwen3-next-80b-a3b": "Qwen3NextConfig",
    "mistral-7b-v0.1": "MistralConfig",
    "mixtral-8x7b": "MixtralConfig",
    "gpt-oss-120b": "GptOssConfig",
    "phi-3-mini": "Phi3Config",
    "deepseek-v3": "DeepseekV3Config",
    "jamba-v0.1": "JambaConfig",
}


def transformers_config(name):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, name)()


@pytest.mark.engine
@pytest.mark.parametrize("name", CITED)
def test_cited_defaults(name):
    """The default of the class, read as a config.json, gives the groups of the catalogue."""
    config = transformers_config(CITED[name]).to_dict()
    known = [replace(group, packed=()) for group in MODELS[name].groups]
    assert [replace(group, packed=()) for group in geometry_of(config)[0]] == known


@pytest.mark.engine
def test_cited_defaults_that_no_reader_understands():
    for name, cited in (("deepseek-v3.2", "DeepseekV32Config"), ("glm-5", "GlmMoeDsaConfig")):
        config = transformers_config(cited).to_dict()
        assert geometry_of(config)[0] == tuple(replace(g, packed=(("fp8_ds_mla", 656),) * (g.name == "latent"))
                                               for g in MODELS[name].groups)  # fmt: skip
    v4 = transformers_config("DeepseekV4Config")
    csa, hca, index, sliding = MODELS["deepseek-v4-flash"].groups
    assert (v4.num_hidden_layers, v4.head_dim, v4.sliding_window) == (len(sliding.layers), csa.dim, sliding.window)
    assert list(v4.compress_rates.values()) == [csa.row_tokens, hca.row_tokens]
    assert index.dim == v4.index_head_dim // 2 + 4
    air = transformers_config("Glm4MoeConfig")
    (full,) = MODELS["glm-4.5-air"].groups
    assert (air.num_hidden_layers, air.num_key_value_heads) == (len(full.layers), full.heads)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model_type", "cited"),
    [("llama", "LlamaConfig"), ("mistral", "MistralConfig"), ("gemma", "GemmaConfig"), ("gemma2", "Gemma2Config"),
     ("gemma3_text", "Gemma3TextConfig"), ("gpt_oss", "GptOssConfig"),
     ("cohere2", "Cohere2Config"), ("qwen3", "Qwen3Config"), ("qwen2", "Qwen2Config"),
     ("qwen3_moe", "Qwen3MoeConfig"), ("qwen2_moe", "Qwen2MoeConfig"), ("qwen3_next", "Qwen3NextConfig")],
)  # fmt: skip
def test_defaults_are_those_of_transformers(model_type, cited):
    config = transformers_config(cited)
    known = dict(config_defaults(model_type))
    every = known.pop("sliding_window_pattern", None) or known.pop("full_attention_interval", None)
    assert {key: getattr(config, key) for key in known} == known
    if every is not None:
        full = [k for k, one in enumerate(config.layer_types) if one == "full_attention"]
        assert full == list(range(every - 1, config.num_hidden_layers, every))

"""Geometries read from config.json files, and the catalogue held against the classes of transformers."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest

from kvplan.catalogue.config import geometry, geometry_of, read_config
from kvplan.catalogue.models import Group, models, table
from kvplan.errors import LayoutError
from tests.profiles import PROFILE

MODELS = models()
PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


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


MAMBA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4,
         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 32,
         "mamba_d_conv": 4}  # fmt: skip
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


NEMOTRON = {"model_type": "nemotron_h", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
            "ssm_state_size": 32, "conv_kernel": 4}  # fmt: skip


@pytest.mark.parametrize(
    "types",
    [{"hybrid_override_pattern": "M-*M"}, {"layers_block_type": ["mamba", "moe", "attention", "linear_attention"]}],
)
def test_nemotron_h(types):
    groups, _ = geometry_of({**NEMOTRON, **types, "mamba_ssm_cache_dtype": "bfloat16"})
    assert [(group.layers, group.dim) for group in groups] == [((2,), 16), ((0, 3), CONV + BC + SSM)]
    (_, state), _ = geometry_of({**NEMOTRON, **types})  # engines keep float32 where the file tells nothing
    assert (state.dtype, state.dim, state.whole) == ("uint8", 2 * (CONV + BC) + 4 * SSM, 2 * BC)


SLIDING, FULL = "sliding_attention", "full_attention"
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
LATENT = {"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SPARSE = {"sparse_index_dim": 128, "sparse_attention_freq": [0] + [1] * 3}
ROW = 2 * 8 * 128

# Files as published, cut to what decides: model_type, keys, elements a token over all layers.
PUBLISHED = [
    ("llama", {**HEADS, "num_hidden_layers": 4, "pretraining_tp": 1, "rope_scaling": {"rope_type": "llama3"}}, 4 * ROW),
    ("step3_text", {"num_hidden_layers": 4, "num_attention_heads": 64, "num_attention_groups": 1, "head_dim": 256,
                    "share_q_dim": 2048}, 4 * 2 * 256),
    ("jetmoe", {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 16,
                "kv_channels": 128}, 4 * 2 * 16 * 128),
    ("hunyuan", {**HEADS, "num_hidden_layers": 4, "use_cla": True, "cla_share_factor": 2}, 2 * ROW),
    ("minimax_m2", {**HEADS, "num_hidden_layers": 4, "attn_type_list": [1] * 4}, 4 * ROW),
    ("step3p5", {**HEADS, "num_hidden_layers": 4, "num_nextn_predict_layers": 2, "sliding_window": 512,
                 "layer_types": ["full_attention", "sliding_attention"] * 3}, 4 * ROW),
    ("minimax_m3", {**HEADS, "num_hidden_layers": 4, "sparse_attention_config": SPARSE}, 4 * ROW + 3 * 128),
    ("minicpm_sala", {**HEADS, "num_hidden_layers": 4, "mixer_types": ["minicpm4", *["lightning-attn"] * 3],
                      "lightning_nh": 32, "lightning_nkv": 32, "lightning_head_dim": 128}, ROW),
    ("gemma4_text", {**HEADS, "num_hidden_layers": 4, "sliding_window": 16, "num_kv_shared_layers": 1,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 256}, 4 * ROW),
    ("gemma4_text", {**HEADS, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
                     "per_layer_config": {"01": {"head_dim": 256}}}, 3 * ROW),
    ("llama4_text", {**HEADS, "num_hidden_layers": 4, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]},
     4 * ROW),
    ("longcat_flash", {**LATENT, "num_layers": 4}, 8 * 576),
    ("pangu_ultra_moe", {"num_hidden_layers": 4, "attention_kv_lora_dim": 512, "attention_qk_rope_dim": 64}, 4 * 576),
    ("deepseek_v3", {**LATENT, "num_hidden_layers": 4, "num_nextn_predict_layers": 1}, 4 * 576),
    ("glm_moe_dsa", {**LATENT, "num_hidden_layers": 2, "index_head_dim": 128, "indexer_types": ["full", "shared"]},
     2 * 576 + 132),
    ("deepseek_vl_v2", {**HEADS, "num_hidden_layers": 4, "kv_lora_rank": None, "v_head_dim": 0, "use_mla": False},
     4 * ROW),
    ("kimi_linear", {**LATENT, "num_hidden_layers": 4, "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4}},
     576),
    ("bailing_hybrid", {**LATENT, "num_hidden_layers": 42, "layer_group_size": 6, "head_dim": 128, "group_norm_size": 1,
                        "short_conv_kernel_size": 4, "num_kv_heads_for_linear_attn": 0}, 7 * 576),
    ("mistral4", {**LATENT, "kv_lora_rank": 256, "num_hidden_layers": 36, "head_dim": 128}, 36 * 320),
    ("glm_moe_dsa", {**LATENT, "num_hidden_layers": 4, "layer_types": ["deepseek_sparse_attention"] * 4,
                     "indexer_types": ["full", *["shared"] * 3], "index_topk_freq": 4}, 4 * 576 + 132),
    ("cohere2_moe", {**HEADS, "num_hidden_layers": 4, "sliding_window": 4096, "layer_types": [SLIDING] * 3 + [FULL],
                     "_sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1, "num_shared_experts": 4,
                     "layer_switch": 4, "transformer_block_type": "parallel"}, 4 * ROW),
    ("afmoe", {**HEADS, "num_hidden_layers": 4, "global_attn_every_n_layers": 4, "num_expert_groups": 1}, 4 * ROW),
    ("falcon_mamba", {"num_hidden_layers": 4, "intermediate_size": 64, "state_size": 16, "conv_kernel": 4}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config", "elements"), PUBLISHED)
def test_published_files(model_type, config, elements):
    known = geometry({"model_type": model_type, "torch_dtype": "bfloat16", **config})
    rows = [(g.dim * g.heads * (1 + (g.kind == "mha")), len(g.layers)) for g in known.groups if g.kind != "state"]
    assert (sum(row * layers for row, layers in rows), known.unread) == (elements, ())


REFUSED = {"compress_ratios": [4, 128], "is_encoder_decoder": True, "multi_query": True, "use_cla_share": 0,
           "hybrid_layer_ids": [1], "v_head_dim": 64, "sparse_attention_config": SPARSE}  # fmt: skip


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_settings_that_are_not_understood(key):
    config = {"model_type": "llama", **HEADS, "num_hidden_layers": 4, key: REFUSED[key]}
    if not REFUSED[key]:  # what is switched off changes nothing
        assert geometry(config).unread == ()
        return
    with pytest.raises(LayoutError, match=key):
        geometry(config)


def test_unknown_structural_keys_are_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **HEADS, "num_hidden_layers": 4, "kv_share_groups": 2}))
    model = read_config(path)
    assert not model.verified
    assert "kv_share_groups" in model.note
    with pytest.raises(LayoutError, match="kv_share_groups"):
        read_config(path, strict=True)
    for other in ("newmodel", ""):  # without a type, it may be any
        assert geometry({"model_type": other, **HEADS, "num_hidden_layers": 4}).unread == (f"'model_type' '{other}'",)


# Kinds of layers that a class knows by a rule of its own, so that the file must tell them.
NEEDED = [
    ("gemma4_text", "global_head_dim", {"layer_types": [FULL] * 4}),
    ("gemma4_text", "layer_types", {"global_head_dim": 512}),
    ("step3p5", "layer_types", {"sliding_window": 512}),
    ("cwm", "layer_types", {}),
    ("hy_v4", "indexer_types", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
]


@pytest.mark.parametrize(("model_type", "key", "told"), NEEDED)
def test_kinds_of_layers_are_not_guessed(model_type, key, told):
    with pytest.raises(LayoutError, match=f"'{key}'.* is missing, which tells what differs between layers"):
        geometry({"model_type": model_type, **HEADS, "num_hidden_layers": 4, **told})


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


KNOWN_TYPES = {name for family in table("configs.toml")["family"] for name in family["types"]}
TELLING = {*table("configs.toml")["structural"], "num", "hidden"}  # words of keys that the reader may ask for
KINDS_OF_LAYERS = ("window", "pattern", "every", "interval", "period", "offset", "types", "shared")


def incomplete(full):
    """Yield files without a key of a class, with null for it, and with other values; and all of that without lists."""
    keys = [key for key in full if key != "model_type" and not TELLING.isdisjoint(key.split("_"))]
    for content in (full, {key: value for key, value in full.items() if not isinstance(value, list | dict)}):
        for key in keys:
            if key in content:
                yield {other: value for other, value in content.items() if other != key}
                yield {**content, key: None}
        yield {**content, "num_key_value_heads": 3}
        yield {**content, "sliding_window": 77}
        yield {key: value for key, value in content.items() if not any(word in key for word in KINDS_OF_LAYERS)}


def answer(content):
    """Return what a file is read as; None if it is refused, or shown as unverified."""
    try:
        known = geometry(content)
    except LayoutError:
        return None
    return None if known.unread else (known.groups, known.layers)


@pytest.mark.engine
@pytest.mark.parametrize("model_type", sorted(KNOWN_TYPES))
def test_a_class_fills_in_what_a_file_leaves_out(model_type):
    """Read as a class of transformers reads it, or refused, or unverified."""
    classes = pytest.importorskip("transformers", minversion="5.23").CONFIG_MAPPING
    if model_type not in classes:
        pytest.skip("no class of transformers")
    for content in incomplete(classes[model_type]().to_dict()):
        read = answer(content)
        if read is None:
            continue
        try:
            whole = classes[model_type].from_dict(content).to_dict()
        except Exception:  # the class refuses it
            continue
        resolved = answer(whole)
        assert resolved in (None, read), set(whole) - set(content)


# Classes that the reader refuses by intent, or whose default leaves out what a file tells.
NOT_READ = {"ctrl", "deepseek_v4", "falcon", "glm4_moe", "gpt_bigcode", "gpt_neo", "inkling2_text", "inkling_text",
            "mimo_v2_flash", "minimax", "dots3_note", "dots3_note_text", "trocr", "xglm", "zamba", "zamba2", "zaya",
            "mllama"}  # fmt: skip


def layer_elements(layer):
    """Return elements of a layer: of a token, twice those of convolutions (one input more here), and of a state."""
    rows = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    token = sum(row[..., 0, :].numel() for row in rows if row is not None and row.dim() > 1)
    convs = [one for one in getattr(layer, "conv_states", {}).values() if one is not None]
    others = [one for one in getattr(layer, "recurrent_states", {}).values() if one is not None]
    return token, sum(one[..., 1:].numel() for one in convs) * 2, sum(one.numel() for one in others)


def running_cache(transformers, model_type):
    """Return the layers of the cache that a class builds on the meta device; None if it does not run there."""
    torch = pytest.importorskip("torch")
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
        content = config.to_dict()
        config.get_text_config(decoder=True)._experts_implementation = "batched_mm"  # no step depends on data
        with warnings.catch_warnings(), torch.device("meta"), torch.no_grad():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            output = model(input_ids=torch.zeros((1, 8), dtype=torch.long), use_cache=True)
    except Exception:  # a class may fail on this device, or without a file, in any way
        return None
    return content, getattr(output.get("past_key_values") or output.get("cache_params"), "layers", [])


@pytest.mark.engine
@pytest.mark.skipif(PROFILE != "deep", reason="builds every class of transformers, for minutes; `make deep` runs it")
def test_every_class_of_transformers():
    """Elements of each layer, as the class of each model builds them."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    names = pytest.importorskip("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    wrong, right = {}, 0
    for model_type in sorted(KNOWN_TYPES & set(names) - NOT_READ):
        running = running_cache(transformers, model_type)
        if running is None or not running[1] or running[0].get("is_encoder_decoder"):
            continue
        known = geometry(running[0])
        sizes = [[0, 0] for _ in range(known.layers)]
        for group in known.groups:
            row = group.dim * group.heads * (1 + (group.kind == "mha")) - 4 * (
                group.part == "index" and group.dtype == "uint8"
            )
            for layer in group.layers:
                sizes[layer][group.kind == "state"] += row
        held = [layer_elements(layer) for layer in running[1]]
        nbytes = [[token, conv // 2 + state] for token, conv, state in held]
        mixed = [[token, conv + 4 * state] for token, conv, state in held]  # float32 states are counted in bytes
        if sizes not in (nbytes, mixed):
            wrong[model_type] = known.unread
        right += sizes in (nbytes, mixed)
    assert {name for name, unread in wrong.items() if not unread} == set()
    assert right > 80

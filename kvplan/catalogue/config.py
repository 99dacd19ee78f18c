"""Read a model's geometry from config.json, the file that Hugging Face stores with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import QUOTED, quoted
from kvplan.base.reading import json_of, read_whole
from kvplan.catalogue.config_keys import integer_of, shown
from kvplan.catalogue.hybrids import HYBRIDS, hybrid_state, hybrid_types, states_everywhere, with_layers
from kvplan.catalogue.models import Group, Model, config_defaults
from kvplan.errors import LayoutError, bounded

# Models of which every layer uses sliding_window, although the file does not say so.
ALL_LAYERS_SLIDE = ("mistral", "mixtral", "phi3", "starcoder2")

# Keys that change the content of a cache and are not read here: if one is set, the geometry would be wrong.
NOT_UNDERSTOOD = (
    "attention_chunk_size", "attention_k_eq_v", "attention_types", "attn_type_list", "block_configs", "block_types",
    "compress_rates", "compress_ratios", "conv_L_cache", "cross_attention_layers", "global_head_dim",
    "hybrid_layer_ids", "hybrid_layer_pattern", "hybrid_override_pattern", "is_encoder_decoder", "layer_group_size",
    "layers_block_type", "linear_attn_config", "mamba_n_heads", "mamba_num_heads", "multi_query",
    "new_decoder_architecture", "num_global_key_value_heads", "num_kv_shared_layers", "ssm_state_size",
    "swa_num_key_value_heads",
)  # fmt: skip

# Keys of the language model's config inside that of a larger model.
NESTED = ("text_config", "language_config", "llm_config", "thinker_config")

_SCALE_NBYTES = 4  # an fp32 scale after each index row of fp8


def read_config(path: str | Path) -> Model:
    """Read a config.json, and return the model's geometry.

    Args:
        path: the file. If it has a ``text_config``, as models of images and text have, only that is read; likewise
            ``language_config``, ``llm_config`` and ``thinker_config``.

    Raises:
        LayoutError: the file cannot be read, lacks a key, or has an unknown setting; the message names the key.
    """
    try:
        text = read_whole(Path(path))
    except LayoutError as error:
        raise LayoutError(f"cannot read the config {quoted(str(path))}: {error}") from error
    try:
        content = json_of(text)
    except LayoutError as error:
        raise LayoutError(f"{quoted(str(path))} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LayoutError(f"{quoted(str(path))} holds a {type(content).__name__}; a config is a table of keys")
    try:
        groups, layers = geometry_of(content)
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from error
    name = content.get("_name_or_path") or content.get("model_type") or Path(path).stem
    return Model(bounded(name, QUOTED) if isinstance(name, str) else quoted(name), layers, groups, source=str(path),
                 verified=True)  # fmt: skip


def geometry_of(content: Mapping[str, Any]) -> tuple[tuple[Group, ...], int]:
    """Return the cache groups and the number of layers of a model's config.

    Raises:
        LayoutError: a key is missing, or its value is wrong or unknown.

    >>> groups, layers = geometry_of({"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096,
    ...                               "num_key_value_heads": 8})
    >>> groups[0]
    Group(name='full', kind='mha', layers=(0, 1), dim=128, heads=8, window=None, row_tokens=1, dtype=None, part='kv', \
shards=1, packed=(), whole=0)
    """
    inner = next((key for key in NESTED if key in content), None)
    if inner is not None:
        return _nested(content, inner)
    config = {
        **config_defaults(str(content.get("model_type", ""))),
        **{k: v for k, v in content.items() if v is not None},
    }
    if "sliding_window" in content and content["sliding_window"] is None:  # null says that no layer slides
        config.pop("sliding_window", None)
    understood = HYBRIDS[config["model_type"]].understood if config.get("model_type") in HYBRIDS else ()
    for key in NOT_UNDERSTOOD:
        if config.get(key) and key not in understood:
            raise LayoutError(f"{key!r} is {shown(config[key])}, which changes what the cache holds in a way that is "
                              "not understood; describe the layout by a spec instead")  # fmt: skip
    layers = integer_of(with_layers(config), "num_hidden_layers", most=LIMITS.layers)
    if "kv_lora_rank" in config:
        return _latent(config, layers), layers
    types = _layer_types(config, layers)
    groups = [_attention(config, name, types) for name in ("full", "sliding") if name in types]
    if "state" in types or states_everywhere(config):
        groups.append(_state(config, tuple(range(layers)) if states_everywhere(config) else _of(types, "state")))
    return tuple(groups), layers


def _nested(content: Mapping[str, Any], key: str) -> tuple[tuple[Group, ...], int]:
    """Return the geometry of a config inside another one; messages name the key that holds it."""
    inner = content[key]
    if not isinstance(inner, Mapping):
        raise LayoutError(f"its {key} is {quoted(inner)}; it is a table of keys")
    if any(isinstance(deeper, Mapping) and any(k in deeper for k in NESTED) for deeper in map(inner.get, NESTED)):
        raise LayoutError(f"its {key} nests configs too deeply; give the config of the language model alone")
    try:
        return geometry_of(inner)
    except LayoutError as error:
        raise LayoutError(f"in {key!r}: {error}") from error


def _of(types: Sequence[str], name: str) -> tuple[int, ...]:
    return tuple(k for k, one in enumerate(types) if one == name)


# ---- attention ---------------------------------------------------------------------------------------------------


def _attention(config: Mapping[str, Any], name: str, types: Sequence[str]) -> Group:
    queries = (
        integer_of(config, "num_attention_heads", most=LIMITS.heads) if "num_key_value_heads" not in config else None
    )
    heads = queries or integer_of(config, "num_key_value_heads", most=LIMITS.heads)
    if "head_dim" in config:
        dim = integer_of(config, "head_dim")
    else:
        hidden, queries = integer_of(config, "hidden_size"), integer_of(config, "num_attention_heads")
        if hidden % queries:
            raise LayoutError(f"'head_dim' is missing, and 'hidden_size' {hidden} is no multiple of {queries} heads")
        dim = hidden // queries
    if config.get("v_head_dim", dim) != dim:
        raise LayoutError(f"'v_head_dim' is {shown(config['v_head_dim'])} and K has {dim}; rows of K and V of "
                          "different sizes are not understood here")  # fmt: skip
    window = integer_of(config, "sliding_window") if name == "sliding" else None
    return Group(name, "mha", _of(types, name), dim=dim, heads=heads, window=window)


def _latent(config: Mapping[str, Any], layers: int) -> tuple[Group, ...]:
    if config.get("sliding_window"):
        raise LayoutError("'sliding_window' beside 'kv_lora_rank': sliding latents are not understood")
    types = config.get("layer_types")
    types = types if isinstance(types, list) else []
    others = [one for one in types if _TYPES.get(str(one)) in {"state", "sliding"}]
    if others:
        raise LayoutError(
            f"'layer_types' has {quoted(others[0])} beside 'kv_lora_rank': layers without latents are not understood; "
            "describe the layout by a spec instead"
        )
    dim, every = integer_of(config, "kv_lora_rank") + integer_of(config, "qk_rope_head_dim"), tuple(range(layers))
    packed = (("fp8_ds_mla", 656),) if dim == 576 else ()
    latent = Group("latent", "mla", every, dim=dim, packed=packed)
    if "index_head_dim" not in config:
        return (latent,)
    indexers = config.get("indexer_types", [])
    if not isinstance(indexers, list) or any(one != "full" for one in indexers):
        other = next((one for one in indexers if one != "full"), None) if isinstance(indexers, list) else indexers
        raise LayoutError(f"'indexer_types' has {quoted(other)}; expected 'full' for every layer")
    row = integer_of(config, "index_head_dim") + _SCALE_NBYTES
    return latent, Group("index", "mla", every, dim=row, dtype="uint8", part="index")


# ---- which layer holds what ----------------------------------------------------------------------------------------

_TYPES = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding", "linear_attention": "state",
    "mamba": "state", "conv": "state",
}  # fmt: skip


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the type of each layer: ``full``, ``sliding``, ``state`` or ``none``."""
    if "layer_types" in config:
        given = config["layer_types"]
        if not isinstance(given, list) or len(given) != layers:
            raise LayoutError(f"'layer_types' is {shown(given)}; it is a list of {layers}, one per layer")
        unknown = [one for one in given if not isinstance(one, str) or one not in _TYPES]
        if unknown:
            raise LayoutError(f"'layer_types' has {quoted(unknown[0])}; expected one of {', '.join(_TYPES)}")
        return [_TYPES[one] for one in given]
    hybrid = hybrid_types(config, layers)
    if hybrid is not None:
        return hybrid
    if "full_attention_interval" in config:
        every = integer_of(config, "full_attention_interval")
        return ["state" if (k + 1) % every else "full" for k in range(layers)]
    if "attn_layer_period" in config:
        if config.get("model_type") != "jamba":
            raise LayoutError(f"'attn_layer_period' of model_type {shown(config.get('model_type'))}; expected 'jamba'")
        period = integer_of(config, "attn_layer_period")
        at = integer_of({"attn_layer_offset": 0, **config}, "attn_layer_offset", least=0)
        return ["full" if k % period == at else "state" for k in range(layers)]
    return _sliding_types(config, layers)


def _sliding_types(config: Mapping[str, Any], layers: int) -> list[str]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * layers
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if pattern is not None:
        every = integer_of({"sliding_window_pattern": pattern}, "sliding_window_pattern")
        return ["sliding" if (k + 1) % every else "full" for k in range(layers)]
    if config.get("use_sliding_window") and "max_window_layers" in config:
        first = integer_of(config, "max_window_layers", least=0)
        return ["sliding" if k >= first else "full" for k in range(layers)]
    if config.get("model_type") in ALL_LAYERS_SLIDE:
        return ["sliding"] * layers
    raise LayoutError(f"'sliding_window' is {shown(config['sliding_window'])}, but neither 'layer_types' nor "
                      "'sliding_window_pattern' tells which layers slide")  # fmt: skip


# ---- states ------------------------------------------------------------------------------------------------------


def _state(config: Mapping[str, Any], layers: tuple[int, ...]) -> Group:
    """Return the states of Gated DeltaNet (Qwen3-Next) or Mamba: a convolution's last inputs, and the state.

    Args:
        config: the config.
        layers: the layers with a state.
    """
    found = hybrid_state(config, layers)
    if found is not None:
        return found
    if "linear_num_value_heads" in config:
        keys, values = integer_of(config, "linear_num_key_heads"), integer_of(config, "linear_num_value_heads")
        key_dim, value_dim = integer_of(config, "linear_key_head_dim"), integer_of(config, "linear_value_head_dim")
        channels, held = 2 * keys * key_dim + values * value_dim, integer_of(config, "linear_conv_kernel_dim") - 1
        elements, shards = channels * held + values * key_dim * value_dim, keys
    elif "mamba_d_state" in config:
        shards = integer_of(config, "mamba_expand") * integer_of(config, "hidden_size")
        elements = shards * (integer_of(config, "mamba_d_conv") - 1 + integer_of(config, "mamba_d_state"))
    else:
        raise LayoutError("some layers hold a state, but neither 'linear_num_value_heads' nor 'mamba_d_state' tells "
                          "its size")  # fmt: skip
    return Group("state", "state", layers, dim=elements, dtype="bf16", shards=shards)

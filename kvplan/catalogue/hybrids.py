"""Read the states of hybrid models from a config: which layers hold a state, and its elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

from kvplan.base.quoting import quoted
from kvplan.catalogue.config_keys import integer_of, shown
from kvplan.catalogue.models import Group
from kvplan.errors import LayoutError

NONE = "none"  # the type of a layer that holds neither tokens nor a state
_PATTERN = {"M": "state", "*": "full", "-": NONE, "E": NONE}  # letters of hybrid_override_pattern
_BLOCKS = {"mamba": "state", "linear_attention": "state", "attention": "full", "full_attention": "full", "mlp": NONE,
           "moe": NONE}  # fmt: skip


class Mamba2(NamedTuple):
    """The names of the keys of a Mamba-2 state, which differ between families."""

    heads: str
    head_dim: str
    groups: str
    state: str
    kernel: str


_MAMBA = Mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON = Mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


class Hybrid(NamedTuple):
    """How a family of hybrid models is read.

    Attributes:
        keys: its names of the keys of a Mamba-2 state; None for a short convolution.
        understood: keys that are read here, and refused in other families.
    """

    keys: Mamba2 | None
    understood: tuple[str, ...]


# By model_type. Facts: transformers 5.23 (configuration and modeling files) and vLLM 0.33 (mamba_utils.py).
HYBRIDS = {
    "falcon_h1": Hybrid(_MAMBA, ("mamba_n_heads",)),
    "bamba": Hybrid(_MAMBA, ("mamba_n_heads",)),
    "granitemoehybrid": Hybrid(_MAMBA, ("mamba_n_heads",)),
    "nemotron_h": Hybrid(_NEMOTRON, ("mamba_num_heads", "ssm_state_size", "hybrid_override_pattern",
                                     "layers_block_type")),
    "lfm2": Hybrid(None, ("conv_L_cache",)),
}  # fmt: skip


def hybrid_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Return the type of each layer of a hybrid model that has no ``layer_types``; None for other models.

    Raises:
        LayoutError: a key is missing, or its value is wrong.

    >>> hybrid_types({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"}, 4)
    ['state', 'none', 'full', 'none']
    """
    kind = config.get("model_type")
    if kind == "bamba":
        return _indexed(config, "attn_layer_indices", layers)
    if kind == "lfm2":
        return _indexed(config, "full_attn_idxs", layers)
    if kind == "falcon_h1":
        return ["full"] * layers  # and each holds a state, too: see states_everywhere
    if kind != "nemotron_h":
        return None
    if "layers_block_type" in config:
        return _named("layers_block_type", config["layers_block_type"], _BLOCKS, layers)
    if "hybrid_override_pattern" in config:
        return _named("hybrid_override_pattern", config["hybrid_override_pattern"], _PATTERN, layers)
    raise LayoutError(
        "'hybrid_override_pattern' is missing: add it to the config, a letter for each layer, as in 'M-M*'"
    )


def with_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with its number of layers, which Nemotron-H tells by the types of the layers alone.

    >>> with_layers({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"})["num_hidden_layers"]
    4
    """
    types = config.get("layers_block_type", config.get("hybrid_override_pattern"))
    if config.get("model_type") == "nemotron_h" and isinstance(types, list | str):
        return {"num_hidden_layers": len(types), **config}
    return config


def _indexed(config: Mapping[str, Any], key: str, layers: int) -> list[str]:
    given = config.get(key)
    if (
        not isinstance(given, Sequence)
        or isinstance(given, str)
        or not all(isinstance(one, int) and 0 <= one < layers for one in given)
    ):
        raise LayoutError(
            f"{key!r} is {shown(given)}; it is a list of the layers with attention, from 0 to {layers - 1}"
        )
    return ["full" if k in given else "state" for k in range(layers)]


def _named(key: str, given: Any, names: Mapping[str, str], layers: int) -> list[str]:
    if not isinstance(given, Sequence) or len(given) != layers:
        raise LayoutError(f"{key!r} is {shown(given)}; it names the type of each of the {layers} layers")
    unknown = [one for one in given if not isinstance(one, str) or one not in names]
    if unknown:
        raise LayoutError(f"{key!r} has {quoted(unknown[0])}; expected one of {', '.join(names)}")
    return [names[one] for one in given]


def states_everywhere(config: Mapping[str, Any]) -> bool:
    """Return whether every layer holds a state beside its attention, as in Falcon-H1."""
    return config.get("model_type") == "falcon_h1"


def hybrid_state(config: Mapping[str, Any], layers: tuple[int, ...]) -> Group | None:
    """Return the states of a hybrid model of :data:`HYBRIDS`; None for other models.

    A state of Mamba-2 is the last inputs of a convolution and the state of each head. If the model has one group of
    heads, each tensor-parallel rank holds that group's part of the inputs whole.

    Raises:
        LayoutError: a key is missing, or its value is wrong.

    >>> small = {"model_type": "falcon_h1", "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": 8,
    ...          "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
    >>> state = hybrid_state(small, (0, 1))
    >>> state.dim == 3 * (1024 + 2 * 256) + 1024 * 256, state.rank_share(state.dim, 2) == 3 * (512 + 512) + 512 * 256
    (True, True)
    """
    found = HYBRIDS.get(str(config.get("model_type")))
    if found is None:
        return None
    if found.keys is None:  # a short convolution: its last inputs only
        channels = integer_of(config, "hidden_size")
        kept = integer_of(config, "conv_L_cache") - 1
        return Group("state", "state", layers, dim=channels * kept, dtype="bf16", shards=channels)
    read: Callable[[str], int] = lambda key: integer_of(config, key)  # noqa: E731
    heads, groups, state = read(found.keys.heads), read(found.keys.groups), read(found.keys.state)
    inner, kept = heads * read(found.keys.head_dim), read(found.keys.kernel) - 1
    conv, shared, ssm = kept * inner, kept * 2 * groups * state, inner * state
    shards = heads if groups == 1 else gcd(heads, groups)
    whole = shared if groups == 1 else 0
    if config.get("mamba_ssm_cache_dtype") == "float32":  # inputs of 2 bytes and states of 4: counted in bytes
        return Group("state", "state", layers, dim=2 * (conv + shared) + 4 * ssm, dtype="uint8", shards=shards,
                     whole=2 * whole)  # fmt: skip
    return Group("state", "state", layers, dim=conv + shared + ssm, dtype="bf16", shards=shards, whole=whole)

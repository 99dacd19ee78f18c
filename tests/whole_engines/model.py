"""A tiny Llama in a folder, whose answers depend on the whole prompt. Only files are made: no vLLM is needed."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = 1024  # of the vocabulary; the last three are special
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4, 256, 4, 2, 64, 512
TOKEN_NBYTES = LAYERS * 2 * KV_HEADS * HEAD * 4  # of KV cache, in float32
UNKNOWN, BEGIN, END = range(WORDS - 3, WORDS)


def write(folder: Path) -> Path:
    """Write the model and its tokenizer, in which the word ``t7`` is token 7; return the folder."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    source = torch.Generator().manual_seed(7)
    save_file({name: tensor_of(name, shape, source) for name, shape in shapes().items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    put(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": WORDS,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": BEGIN, "eos_token_id": END,
    })  # fmt: skip
    special = {UNKNOWN: "<unk>", BEGIN: "<s>", END: "</s>"}
    words = Tokenizer(models.WordLevel({special.get(k, f"t{k}"): k for k in range(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    put(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
    })  # fmt: skip
    return folder


def write_config(folder: Path, config: dict[str, object]) -> str:
    """Write a model that has no weights and no tokenizer; return the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "config.json", config)
    return str(folder)


def put(path: Path, facts: dict[str, object]) -> None:
    path.write_text(json.dumps(facts))


def shapes() -> dict[str, tuple[int, ...]]:
    """Names of the weights, as Hugging Face has them, and their shapes."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        own = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }  # fmt: skip
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}


def tensor_of(name: str, shape: tuple[int, ...], source):
    """Norms are 1. Queries and keys are twice as large as their input, so that attention picks few tokens."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape)
    attends = "q_proj" in name or "k_proj" in name
    size = 1.0 if "embed" in name else (2.0 if attends else 1.0) / shape[-1] ** 0.5
    return torch.randn(shape, generator=source) * size

"""Prefill in one process, decode in another: each with its own layout, and the tokens of one process.

Both processes make the same small model of transformers with random weights. *prefill* computes the prompts, and keeps
K and V in pages of its own block size, heads first. *decode* has pages of another size, tokens first. As each prompt is
ready, prefill writes its blocks into the other process's pages, and the note says which prompt they belong to. Decode
then goes on from these pages. Its tokens must be those of one process that did both.

    python examples/prefill_decode.py              # two GPUs if there are two, otherwise the CPU and shared memory
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from typing import Any

import torch
import transformers

import kvplan

CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024}  # fmt: skip
LAYERS, HEADS, DIM = 4, 2, 16
PREFILL_PAGE, DECODE_PAGE = 8, 32  # tokens of a block in each process
SECONDS = 300.0


def model_of(device: str) -> Any:
    """A model of random weights: what it says means nothing, and always the same."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG, max_position_embeddings=4096)
    return transformers.LlamaForCausalLM(config).eval().to(device)


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Prompts of different lengths."""
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(1, CONFIG["vocab_size"], (length - 3 * k,), generator=chance).tolist() for k in range(count)]


def pages_of(notation: str, page: int, tokens: int, device: str) -> kvplan.KVLayout:
    """A pool of pages for some tokens, which other processes can open."""
    shape = {"layer": LAYERS, "block": -(-tokens // page), "kv": 2, "token": page, "head": HEADS, "dim": DIM}
    axes = notation.split()
    tensor = torch.zeros([shape[axis] for axis in axes], device=device)
    return kvplan.KVLayout.from_tensors(notation, tensor if device != "cpu" else tensor.share_memory_())


def blocks_of(prompt: int, longest: int, page: int) -> list[int]:
    """The blocks of a prompt: each prompt has as many as the longest needs."""
    count = longest // page
    return list(range(prompt * count, (prompt + 1) * count))


def rows(pool: kvplan.KVLayout, blocks: list[int]) -> torch.Tensor:
    """A view-like copy of some blocks, as (layer, kv, head, token, dim)."""
    axes = pool.notation.split()
    order = [axes.index(axis) for axis in ("layer", "kv", "head", "block", "token", "dim")]
    return pool.tensors.permute(order)[:, :, :, blocks].flatten(3, 4)


def fill(pool: kvplan.KVLayout, blocks: list[int], cache: Any, tokens: int) -> None:
    """Put the first tokens of a cache of transformers into blocks."""
    axes = pool.notation.split()
    page = pool.block_tokens
    order = [axes.index(axis) for axis in ("layer", "kv", "head", "block", "token", "dim")]
    view = pool.tensors.permute(order)
    for layer in range(LAYERS):
        for kv, values in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            for k, block in enumerate(blocks):
                part = values[0, :, k * page : min((k + 1) * page, tokens)]
                view[layer, kv, :, block, : part.shape[1]] = part


def step(model: Any, tokens: list[int], cache: Any) -> int:
    """The most likely next token."""
    with torch.inference_mode():
        made = model(torch.tensor([tokens], device=model.device), past_key_values=cache, use_cache=True)
    return int(made.logits[0, -1].argmax())


def prefill(device: str, prompts: list[list[int]], longest: int, pipe: Any) -> None:
    """Compute the prompts, and write the blocks of each into the other process's pages."""
    model = model_of(device)
    mine = pages_of("block layer kv head token dim", PREFILL_PAGE, len(prompts) * longest, device)
    with kvplan.Agent("prefill", {"kv": mine}) as agent:
        peer = agent.meet(pipe.recv())
        store = kvplan.compile(mine, peer.layouts["kv"])
        for number, prompt in enumerate(prompts):
            cache = transformers.DynamicCache(config=model.config)
            first = step(model, prompt, cache)
            here = blocks_of(number, longest, PREFILL_PAGE)
            fill(mine, here, cache, len(prompt))
            after = None if device == "cpu" else torch.cuda.current_stream(device)
            note = json.dumps({"prompt": number, "first": first}).encode()
            peer.submit(store.plan(here, blocks_of(number, longest, DECODE_PAGE)), after=after, note=note)
        pipe.send(peer.transport)


def decode(device: str, prompts: list[list[int]], longest: int, new: int, pipe: Any) -> tuple[list[list[int]], str]:
    """Wait for the blocks of each prompt, and go on from them."""
    model = model_of(device)
    mine = pages_of("layer kv block token head dim", DECODE_PAGE, len(prompts) * longest, device)
    made: dict[int, list[int]] = {}
    with kvplan.Agent("decode", {"kv": mine}) as agent:
        pipe.send(agent.card())
        until = time.monotonic() + SECONDS
        while len(made) < len(prompts):
            if time.monotonic() > until:
                raise SystemExit("prefill does not answer")
            notes = agent.notes()
            time.sleep(0 if notes else 1e-3)
            for _, note in notes:
                told = json.loads(note)
                number, tokens = told["prompt"], [told["first"]]
                held = rows(mine, blocks_of(number, longest, DECODE_PAGE))[:, :, None, :, : len(prompts[number])]
                cache = transformers.DynamicCache(config=model.config)
                for layer in range(LAYERS):
                    cache.update(held[layer, 0], held[layer, 1], layer)
                while len(tokens) < new:
                    tokens.append(step(model, tokens[-1:], cache))
                made[number] = tokens
        transport = pipe.recv()
    return [made[number] for number in range(len(prompts))], transport


def together(device: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """What one process makes of the prompts."""
    model = model_of(device)
    made = []
    for prompt in prompts:
        cache = transformers.DynamicCache(config=model.config)
        tokens = [step(model, prompt, cache)]
        while len(tokens) < new:
            tokens.append(step(model, tokens[-1:], cache))
        made.append(tokens)
    return made


def main() -> int:
    """Run both processes; 1 where the tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"] if gpus > 1 else ["cpu", "cpu"],
                        metavar=("PREFILL", "DECODE"))  # fmt: skip
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=90, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens to decode for each prompt")
    chosen = parser.parse_args()
    if min(chosen.prompts, chosen.new, chosen.length - 3 * chosen.prompts) < 1:
        parser.error("give at least one prompt, one new token, and more than three tokens a prompt")
    prompts = prompts_of(chosen.prompts, chosen.length)
    longest = -(-chosen.length // DECODE_PAGE) * DECODE_PAGE
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=prefill, args=(chosen.devices[0], prompts, longest, theirs), daemon=True)
    process.start()
    tokens, transport = decode(chosen.devices[1], prompts, longest, chosen.new, pipe)
    process.join(SECONDS)
    equal = tokens == together(chosen.devices[1], prompts, chosen.new)
    print(f"prefill on {chosen.devices[0]}, blocks of {PREFILL_PAGE} tokens, heads first")
    print(f"decode on {chosen.devices[1]}, blocks of {DECODE_PAGE} tokens, tokens first, by {transport}")
    print(f"{len(prompts)} prompts, {chosen.new} tokens each; tokens {'equal' if equal else 'DIFFER'}")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())

"""Time to first token when a prefix comes back from the host: load it and then compute, or compute as layers arrive.

A request's prefix lies in a host pool. Its new tokens run through a stack of attention and feed-forward layers, each
of which reads the prefix's K and V of its own layer. *load, then compute* waits for all of it; *layer by layer* submits
the same plan with ``by_layer=True`` and lets every layer wait for its own bytes only. Both must give what a cache that
never left gives.

    python examples/layerwise_load.py              # small, on any machine
    python examples/layerwise_load.py --model llama-8b --prefix 16384 --json result.json      # on a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # as everybody calls it

import kvplan

PAGE, NEW = 16, 16  # tokens of a block; tokens that are computed on top of the prefix


@dataclass(frozen=True)
class Model:
    """Shape of the stack."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int


MODELS = {"tiny": Model(4, 64, 4, 2, 16, 128), "llama-8b": Model(32, 4096, 32, 8, 128, 14336)}


class Stack:
    """Random weights, a paged cache a layer, and a forward pass that asks before it reads a layer's cache."""

    def __init__(self, model: Model, blocks: int, device: str) -> None:
        self.model, self.device = model, device
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        chance = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=chance, device=device, dtype=dtype) / shape[-1] ** 0.5

        wide, narrow = model.heads * model.dim, model.kv_heads * model.dim
        self.weights = [
            {"qkv": random(wide + 2 * narrow, model.hidden), "out": random(model.hidden, wide),
             "up": random(model.inner, model.hidden), "down": random(model.hidden, model.inner)}
            for _ in range(model.layers)
        ]  # fmt: skip
        self.cache = [random(2, blocks, PAGE, model.kv_heads, model.dim) for _ in range(model.layers)]
        self.tokens = random(NEW, model.hidden)

    def forward(self, blocks: torch.Tensor, before: Callable[[int], Any]) -> torch.Tensor:
        """Hidden states of the new tokens; ``before(layer)`` is called before the layer's cache is read."""
        model, hidden = self.model, self.tokens
        wide, narrow = model.heads * model.dim, model.kv_heads * model.dim
        for layer, weights in enumerate(self.weights):
            q, k, v = F.linear(F.layer_norm(hidden, hidden.shape[-1:]), weights["qkv"]).split(
                [wide, narrow, narrow], -1
            )
            before(layer)
            past = self.cache[layer][:, blocks].flatten(1, 2)
            keys, values = (
                torch.cat([old, new.view(NEW, model.kv_heads, model.dim)]).transpose(0, 1)
                for old, new in zip(past, (k, v), strict=True)
            )
            queries = q.view(NEW, model.heads, model.dim).transpose(0, 1)
            made = F.scaled_dot_product_attention(queries[None], keys[None], values[None], enable_gqa=True)[0]
            hidden = hidden + F.linear(made.transpose(0, 1).reshape(NEW, wide), weights["out"])
            hidden = hidden + F.linear(
                F.silu(F.linear(F.layer_norm(hidden, hidden.shape[-1:]), weights["up"])), weights["down"]
            )
        return hidden


def main() -> int:
    """Measure both; 1 where what comes out is not what a cache that never left gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that come back from the host")
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the result")
    chosen = parser.parse_args()
    for name in ("prefix", "times"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} is {getattr(chosen, name)}; at least 1 is due")
    if chosen.json and not chosen.json.parent.is_dir():
        parser.error(f"--json is {chosen.json}: there is no folder {chosen.json.parent}")
    count = -(-chosen.prefix // PAGE)
    stack = Stack(MODELS[chosen.model], count + 8, chosen.device)
    layout = kvplan.KVLayout.from_tensors("layer: kv block token head dim", stack.cache)
    pool = kvplan.allocate("block layer kv token head dim", like=layout, num_blocks=count)
    blocks = torch.randperm(count + 8, generator=torch.Generator().manual_seed(1))[:count]
    on_device = blocks.to(chosen.device)
    store, load = kvplan.compile(layout, pool), kvplan.compile(pool, layout)

    def settle() -> None:
        if chosen.device != "cpu":
            torch.cuda.synchronize(chosen.device)

    with torch.inference_mode(), kvplan.Executor(chosen.device) as executor:
        wanted = stack.forward(on_device, lambda _: None).clone()
        executor.submit(store.plan(blocks, range(count))).synchronize()
        plan = load.plan(range(count), blocks)

        def then_compute() -> torch.Tensor:
            executor.submit(plan).wait()
            return stack.forward(on_device, lambda _: None)

        def by_layer() -> torch.Tensor:
            transfer = executor.submit(plan, by_layer=True)
            return stack.forward(on_device, transfer.wait_layer)

        seconds: dict[str, list[float]] = {}
        equal = True
        for _ in range(chosen.times):  # in turn, since a shared machine drifts
            for name, way in (("load, then compute", then_compute), ("layer by layer", by_layer)):
                for layer in stack.cache:
                    layer.fill_(float("nan"))
                settle()
                start = time.perf_counter()
                made = way()
                settle()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                equal = equal and torch.equal(made, wanted)
        settle()
        start = time.perf_counter()
        stack.forward(on_device, lambda _: None)
        settle()
        alone = time.perf_counter() - start
        transfer = executor.submit(plan).result()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    first, second = medians.values()
    print(f"{chosen.model} on {chosen.device}: {chosen.prefix} tokens, {plan.nbytes / 1e6:.1f} MB by {transfer.path}")
    print(f"compute alone {alone * 1e3:.2f} ms, load alone {transfer.seconds * 1e3:.2f} ms")
    print("time to first token: " + ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in medians.items()))
    print(f"layer by layer takes {second / first:.2f} of the time; results {'equal' if equal else 'DIFFER'}")
    if chosen.json:
        gpu = torch.cuda.get_device_name(chosen.device) if chosen.device != "cpu" else None
        about = {"schema": "kvplan.example.layerwise", "version": 1, "gpu": gpu, "torch": torch.__version__,
                 "model": chosen.model, "prefix": chosen.prefix, "nbytes": plan.nbytes, "path": transfer.path,
                 "compute_s": alone, "load_s": transfer.seconds, "first_token_s": medians, "equal": equal}  # fmt: skip
        chosen.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())

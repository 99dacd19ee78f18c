"""``kvplan demo``: move the KV cache of a running engine away and back, and compare the tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from kvplan.base.numbers import count_of
from kvplan.cli.arguments import whole
from kvplan.cli.screen import Answer, Part, Table, Tell, facts, note, table
from kvplan.engines.versions import TRANSFORMERS
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.allocate import allocate
from kvplan.plan.copy_program import compile
from kvplan.plan.plan import join

VOCABULARY = 1024
ENGINES = ("auto", "transformers", "numpy")
MISSING = (
    "the engine cannot be imported ({}); this is the plain demo, on arrays. To install the engine, about 250 MB: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu; "
    f"pip install transformers=={TRANSFORMERS.written_for}"
)
POOL, POOL_TOKENS, PAGE_TOKENS = "block layer kv token head dim", 64, 16
POOL_GIB = 0.25  # of the engine's host memory
STORIES = {
    "numpy": "A cache of plain arrays is filled with random numbers. Its blocks are stored into a host pool whose "
    "blocks are larger, overwritten, and loaded into other blocks; every byte is compared.",
    "transformers": "An engine with a small Llama of random weights generates tokens, first with memory for all "
    "requests. Then its cache is so small that requests must leave: kvplan stores their blocks into host memory, and "
    "loads them into other blocks when they go on. The tokens of both runs are compared.",
}


class Request(Part):
    """One request.

    Attributes:
        id: its name.
        tokens: tokens whose keys and values the cache holds at the end.
        equal: whether it gave the same result.
        old_blocks, host_blocks, new_blocks: block ids in the cache, in the pool, and in the cache again; of arrays.
    """

    id: str
    tokens: int
    equal: bool
    old_blocks: tuple[int, ...] = ()
    host_blocks: tuple[int, ...] = ()
    new_blocks: tuple[int, ...] = ()


class DemoAnswer(Answer):
    """The cache of an engine, moved away and back.

    Attributes:
        passed: whether every request gave the same result.
        engine: transformers, or numpy.
        missing: why the engine was not used; null if it was, or was not asked for.
        compared: what was compared with the undisturbed run.
        requests: each of them.
        cache, pool: notations of the cache and of the host pool.
        transfers: number of transfers, there and back.
        nbytes: bytes that they moved.
        seconds: of the whole demo.
    """

    schema = "demo/3"
    shown = "engine, cache, pool, transfers, nbytes"
    passed: bool
    engine: str
    missing: str | None
    compared: str
    requests: tuple[Request, ...]
    cache: str
    pool: str
    transfers: int
    nbytes: int
    seconds: float

    def blocks(self) -> Iterable[Any]:
        """Return what happened, the facts, the requests, and the verdict."""
        equal, total = sum(request.equal for request in self.requests), count_of(len(self.requests), "request")
        verdict = f"are equal in {f'all {total}' if self.passed else f'only {equal} of {total}'}"
        shown = "request: id, tokens, equal"
        if self.engine == "numpy":
            shown = (
                "request: id, tokens, in the cache: old_blocks, in the pool: host_blocks, back in: new_blocks, equal"
            )
        verdict = f"{'PASS' if self.passed else 'FAIL'}: {self.compared} {verdict} ({self.seconds:.1f} s)"
        return [Table([(STORIES[self.engine],)]), facts(self), table(self.requests, shown), verdict]


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan demo\n  kvplan demo --json | jq .requests"
    number = partial(whole, least=1, most=999_999)
    engines = "transformers: the real engine; numpy: plain arrays; auto: the first that is installed"
    parser.add_argument("--engine", choices=ENGINES, default="auto", help=engines)
    parser.add_argument("--requests", type=number, default=6, metavar="N", help="requests at once (default 6)")
    parser.add_argument("--tokens", type=number, default=64, metavar="N", help="tokens each generates (default 64)")


def run_demo(args: argparse.Namespace, tell: Tell) -> DemoAnswer:
    """Run the demo with the first engine that is there; a finding if something did not come back.

    Raises:
        KVPlanError: the engine that was named is missing, or failed.
    """
    start, missing, engine = perf_counter(), None, "numpy"
    if args.engine != "numpy":
        try:
            tell(None, "Importing transformers")
            from transformers import ContinuousBatchingConfig  # noqa: F401  # since 5.0

            engine = "transformers"
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            if args.engine != "auto":
                raise KVPlanError(f"--engine {args.engine} cannot be imported: {error}") from error
            missing = MISSING.format(error)
            note(f"kvplan: {missing}")
    trip = (run_arrays if engine == "numpy" else run_engine)(args, tell)
    passed = all(request.equal for request in trip["requests"])
    return DemoAnswer(passed, engine, missing, **trip, seconds=perf_counter() - start, status=int(not passed))


def prompts(requests: int) -> list[list[int]]:
    """Return random token ids. Prompts have different lengths, so that most requests end inside a block."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2 * PAGE_TOKENS, 9 * PAGE_TOKENS, requests)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def run_arrays(
    args: argparse.Namespace, tell: Tell, tamper: Callable[[KVLayout], object] = lambda pool: None
) -> dict[str, Any]:
    """Store the blocks of a random cache, overwrite them, load them into other blocks, and compare every byte.

    Args:
        args: of :func:`add_demo`.
        tell: called with what is done.
        tamper: called with the host pool between store and load; with it, tests show that the demo can fail.
    """
    tell(None, "Filling a cache")
    lengths = [len(prompt) + args.tokens // 8 for prompt in prompts(args.requests)]
    needed = [ceil(length / PAGE_TOKENS) for length in lengths]
    rng = np.random.default_rng(0)
    content = rng.standard_normal((2 * sum(needed), 4, 2, PAGE_TOKENS, 4, 32), dtype=np.float32)
    undisturbed, ids = content.copy(), iter(rng.permutation(len(content)).tolist())
    host = [ceil(count * PAGE_TOKENS / POOL_TOKENS) for count in needed]
    cache, host_ids = KVLayout.from_tensors(POOL, content), iter(range(sum(host)))
    pool = allocate(POOL, like=cache, num_blocks=sum(host), block_tokens=POOL_TOKENS, pin=False)
    blocks = [[[*islice(source, count)] for count in counts]
              for source, counts in ((ids, needed), (host_ids, host), (ids, needed))]  # fmt: skip
    old, new = (np.concatenate(blocks[k]) for k in (0, 2))
    with Executor(device="cpu") as executor:
        store, load = compile(cache, pool), compile(pool, cache)
        executor.submit(join([*map(store.plan, *blocks[:2])])).synchronize()
        content[old] = np.nan
        tamper(pool)
        executor.submit(join([*map(load.plan, *blocks[1:])])).synchronize()
        stats = executor.stats()
    equal = (content[new] == undisturbed[old]).all(axis=(1, 2, 3, 4, 5))
    arrived = [bool(each.all()) for each in np.split(equal, np.cumsum(needed)[:-1])]
    requests = zip((f"request {k}" for k in range(len(needed))), lengths, arrived, *blocks, strict=True)
    return {
        "compared": "bytes of the cache",
        "requests": tuple(Request(*request[:3], *map(tuple, request[3:])) for request in requests),
        "cache": str(cache),
        "pool": str(pool),
        "transfers": stats.transfers,
        "nbytes": stats.nbytes,
    }


def run_engine(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Generate with memory for all requests, then with so little that their blocks are moved, and compare the tokens.

    Raises:
        KVPlanError: the engine failed, or no request had to leave.
    """
    import torch
    import transformers

    from kvplan.backends import transformers as backend
    from kvplan.engines.transformers import offload

    engine: Any = transformers  # not all of it is typed
    engine.logging.set_verbosity_error()
    # Weights spread ten times wider than usual; otherwise greedy tokens would repeat.
    config = engine.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, initializer_range=0.2, dtype="float32")  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = engine.LlamaForCausalLM(config).eval()
    texts = prompts(args.requests)
    blocks = sum(ceil((len(text) + args.tokens) / PAGE_TOKENS) for text in texts)
    greedy = engine.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=args.tokens)

    def manager_of(num_blocks: int) -> Any:
        batching = engine.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=num_blocks, max_batch_tokens=sum(map(len, texts)),
            allow_block_sharing=False, use_cuda_graph=False, use_async_batching=False, auto_switch_to_flash=False,
        )  # fmt: skip
        return model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more do not help a small model on shared cores
    try:
        undisturbed = generate(manager_of(2 * blocks), texts, args.tokens, tell, "Undisturbed run")
        manager = manager_of(3 * blocks // 4)
        moving = offload(manager, cpu_offload_space=POOL_GIB)
        disturbed = generate(manager, texts, args.tokens, tell, "Run with a small cache")
    finally:
        torch.set_num_threads(threads)
    stats = moving.executor.stats()
    if not stats.transfers:
        raise KVPlanError("no request had to leave the cache; ask for more tokens (--tokens)")
    requests = (Request(name, len(text) + args.tokens, disturbed[name] == undisturbed[name])
                for name, text in zip(undisturbed, texts, strict=True))  # fmt: skip
    return {
        "compared": "generated tokens",
        "requests": tuple(requests),
        "cache": str(backend.describe(moving.cache)),
        "pool": str(moving.pool),
        "transfers": stats.transfers,
        "nbytes": stats.nbytes,
    }


def generate(manager: Any, texts: list[list[int]], new_tokens: int, tell: Tell, what: str) -> dict[str, list[int]]:
    """Run all prompts at once, and return the tokens that each request generated."""
    tokens: dict[str, list[int]] = {f"request {k}": [] for k in range(len(texts))}
    for name, text in zip(tokens, texts, strict=True):
        manager.add_request(text, request_id=name, streaming=True)
    manager.start()
    unfinished = len(texts)
    try:
        while unfinished:
            output = manager.get_result(timeout=0.5)
            if output is None and not manager.is_running():
                raise KVPlanError(f"the engine stopped: {manager.background_thread_status.fatal_error}")
            if output is None:
                continue
            if output.error:
                raise KVPlanError(f"the engine failed on {output.request_id}: {output.error}")
            unfinished -= output.is_finished()
            tokens[output.request_id] = list(output.generated_tokens)
            tell(sum(map(len, tokens.values())) / (len(texts) * new_tokens), what)
    finally:
        manager.stop(hard_stop=True)
    return tokens

"""``kvplan demo``: move the KV cache of a running engine away and back, and compare the tokens."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from kvplan.base.numbers import count_of
from kvplan.cli.answer import Answer, Finding, Part, Table, facts, table
from kvplan.cli.arguments import whole
from kvplan.cli.screen import Tell, note
from kvplan.errors import KVPlanError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.allocate import allocate
from kvplan.plan.copy_program import compile
from kvplan.plan.plan import join

STALL_SECONDS = 120.0  # an engine that gives no token for this time has failed
VOCABULARY = 1024
ENGINES = ("auto", "transformers", "numpy")
WRITTEN_FOR = "5.23.0"  # the version of transformers whose members are used; a test compares it with versions
MISSING = (
    "the engine cannot be imported ({}); this is the plain demo, on arrays. To install the engine, about 250 MB: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu; "
    f"pip install transformers=={WRITTEN_FOR}"
)
POOL, POOL_TOKENS, PAGE_TOKENS = "block layer kv token head dim", 64, 16
DESTROYED = 0xFF  # four of these bytes are a NaN in float32
STORY = (
    "A cache of plain arrays is filled with random numbers. Its blocks are stored into a host pool whose blocks are "
    "larger, overwritten, and loaded into other blocks; every byte is compared."
)
ENGINE_STORY = (
    "An engine with a small Llama of random weights generates tokens. In a second run it is paused: the blocks of all "
    "requests are stored into a host pool whose blocks are larger, overwritten with NaN, and loaded into other blocks, "
    "which the engine then reads. The tokens of both runs are compared, also with those of a run without the load."
)
Tamper = Callable[[KVLayout], None] | None


class DemoError(RuntimeError):
    """The demo cannot run to its end."""


class Request(Part, names="id cached_tokens generated_before old_blocks host_blocks new_blocks equal"):
    """One request that moved through the pool.

    Attributes:
        id: its name.
        cached_tokens: tokens whose keys and values the cache holds.
        generated_before: tokens that it had generated when it was interrupted.
        old_blocks, host_blocks, new_blocks: block ids in the cache, in the pool, and in the cache again.
        equal: whether it gave the same result.
    """

    shown = "request: id, cached_tokens, in the cache: old_blocks, in the pool: host_blocks, back in: new_blocks, equal"
    id: str
    cached_tokens: int
    generated_before: int
    old_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    new_blocks: tuple[int, ...]
    equal: bool


class CacheLayout(Part, sources=(KVLayout,), names="notation sizes dtype device block_tokens block_nbytes nbytes"):
    """A layout."""

    def __str__(self) -> str:
        return f"{self.notation}, blocks of {self.block_tokens} tokens"


class DemoAnswer(Answer):
    """The cache of an engine, moved away and back.

    Attributes:
        passed: whether every request gave the same result, the old blocks were destroyed, and the control changed.
        engine: transformers, or numpy.
        missing: why the engine was not used; null if it was, or was not asked for.
        model: of the engine; null without one.
        compared: what was compared with the undisturbed run.
        num_requests: number of requests.
        requests: where their blocks were.
        old_blocks_destroyed: whether every byte of them was overwritten.
        control: requests that changed without the load; null without a control run.
        layouts: of the cache and of the pool.
        units: units moved each way.
        nbytes: bytes moved each way.
        descriptors: copies each way: by rows of one (layer, part, token, head), by runs, and after merging.
        seconds: of the whole demo.
    """

    schema = "demo/2"
    shown = ("engine, model, layouts, units, nbytes, descriptors, old blocks destroyed: old_blocks_destroyed, "
             "control")  # fmt: skip
    passed: bool
    engine: str
    missing: str | None
    model: dict[str, Any] | None
    compared: str
    num_requests: int
    requests: tuple[Request, ...]
    old_blocks_destroyed: bool
    control: dict[str, int] | None
    layouts: dict[str, CacheLayout]
    units: int
    nbytes: int
    descriptors: dict[str, int]
    seconds: float

    def blocks(self) -> Iterable[Any]:
        """Return what happened, the facts, where the blocks were, and the verdict."""
        equal, total = sum(one.equal for one in self.requests), count_of(self.num_requests, "request")
        verdict = f"PASS: {self.compared} are equal in all {total}"
        if not self.passed:
            verdict = f"FAIL: {self.compared} are equal in only {equal} of {total}"
        if self.control == {"requests_changed": 0}:
            verdict = "FAIL: nothing changed even without the load, so equal tokens prove nothing"
        return [
            Table([(ENGINE_STORY if self.model else STORY,)]),
            facts(self),
            table(self.requests),
            f"{verdict} ({self.seconds:.1f} s)",
        ]


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan demo\n  kvplan demo --json | jq .descriptors"
    number = partial(whole, least=1, most=999_999)
    engines = "transformers: the real engine; numpy: plain arrays; auto: the first that is installed"
    parser.add_argument("--engine", choices=ENGINES, default="auto", help=engines)
    parser.add_argument("--requests", type=number, default=6, metavar="N", help="requests at once (default 6)")
    parser.add_argument("--tokens", type=number, default=64, metavar="N", help="tokens each generates (default 64)")


def run_demo(args: argparse.Namespace, tell: Tell, tamper: Tamper = None) -> Answer:
    """Run the demo with the first engine that is there; a finding if bytes did not come back or the engine failed.

    Args:
        args: of :func:`add_demo`.
        tell: called with the share that is done, and a text.
        tamper: called with the host pool between store and load; with it, tests show that the demo can fail.

    Raises:
        KVPlanError: the engine that was named is missing.
    """
    start, missing, way = perf_counter(), None, run_arrays
    if args.engine != "numpy":
        try:
            tell(None, "Importing transformers")
            from transformers import ContinuousBatchingConfig  # noqa: F401  # since 5.0

            way = run_engine
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            if args.engine != "auto":
                raise KVPlanError(f"--engine {args.engine} cannot be imported: {error}") from error
            missing = MISSING.format(error)
    try:
        trip = way(args, tell, tamper)
    except DemoError as error:
        return Finding("demo", str(error), status=1)
    except (AttributeError, TypeError, LayoutError) as error:  # another version has other members
        if way is run_arrays:
            raise
        return Finding("demo", f"this engine differs from transformers {WRITTEN_FOR}: {error}", status=1)
    if missing:
        note(f"kvplan: {missing}")
    equal = all(request.equal for request in trip["requests"])
    passed = equal and trip["old_blocks_destroyed"] and trip["control"] != {"requests_changed": 0}
    engine = "transformers" if way is run_engine else "numpy"
    return DemoAnswer(passed, engine, missing, **trip, seconds=perf_counter() - start, status=int(not passed))


def prompts(requests: int, vocabulary: int) -> list[list[int]]:
    """Return random token ids. Prompts have different lengths, so that most requests end inside a block."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2 * PAGE_TOKENS, 9 * PAGE_TOKENS, requests)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def pause_after(tokens: int) -> int:
    """Return the tokens that every request generates before the engine is paused."""
    return max(1, tokens // 8)


def round_trip(
    cache: KVLayout, block_bytes: Any, requests: Sequence[Request], tamper: Tamper, *, load: bool = True
) -> dict[str, Any]:
    """Store the old blocks of every request, overwrite them, and load the new blocks.

    Args:
        cache: the layout of the cache.
        block_bytes: (block, byte) uint8 numpy view of the same memory, made without kvplan.
        requests: with old and new blocks; this function adds the host blocks.
        tamper: see :func:`run`.
        load: whether to load; without a load, the new blocks keep their content.

    Returns:
        Fields of the answer.
    """
    host_blocks = [ceil(len(one.old_blocks) * cache.block_tokens / POOL_TOKENS) for one in requests]
    pool = allocate(POOL, like=cache, num_blocks=sum(host_blocks), block_tokens=POOL_TOKENS, pin=False)
    ids = iter(range(sum(host_blocks)))
    moving = [
        replace(one, host_blocks=(*islice(ids, count),)) for one, count in zip(requests, host_blocks, strict=True)
    ]
    store, restore = compile(cache, pool), compile(pool, cache)
    with Executor(device="cpu") as executor:
        plan = join([store.plan(one.old_blocks, one.host_blocks) for one in moving])
        executor.submit(plan).synchronize()
        old = np.concatenate([one.old_blocks for one in moving])
        block_bytes[old] = DESTROYED
        destroyed = bool((block_bytes[old] == DESTROYED).all())
        if tamper is not None:
            tamper(pool)
        if load:
            back = join([restore.plan(one.host_blocks, one.new_blocks) for one in moving])
            executor.submit(back).synchronize()
    rows = plan.units * store.unit_tokens * len(cache.heads) * len(cache.layers) * len(cache.parts)
    copies = {"rows": rows, "before": store.runs * plan.units, "after": len(plan.descriptors().size)}
    return {
        "num_requests": len(moving),
        "requests": tuple(moving),
        "old_blocks_destroyed": destroyed,
        "layouts": {"cache": CacheLayout.of(cache), "pool": CacheLayout.of(pool)},
        "units": plan.units,
        "nbytes": plan.nbytes,
        "descriptors": copies,
    }


def run_arrays(args: argparse.Namespace, tell: Tell, tamper: Tamper) -> dict[str, Any]:
    """Run the round trip without an engine: the content of the cache is random, and compared byte by byte."""
    tell(None, "Filling a cache")
    lengths = [len(prompt) + pause_after(args.tokens) for prompt in prompts(args.requests, 2)]
    needed = [ceil(length / PAGE_TOKENS) for length in lengths]
    rng = np.random.default_rng(0)
    content = rng.standard_normal((2 * sum(needed), 4, 2, PAGE_TOKENS, 4, 32), dtype=np.float32)
    undisturbed, ids = content.copy(), rng.permutation(len(content)).tolist()
    old, new = iter(ids), iter(ids[sum(needed) :])
    requests = [Request(f"request {k}", length, 0, (*islice(old, count),), (), (*islice(new, count),), equal=False)
                for k, (length, count) in enumerate(zip(lengths, needed, strict=True))]  # fmt: skip
    cache = KVLayout.from_tensors(POOL, content)
    trip = round_trip(cache, content.reshape(len(content), -1).view(np.uint8), requests, tamper)
    equal = {one.id: bool((content[[*one.new_blocks]] == undisturbed[[*one.old_blocks]]).all()) for one in requests}
    return {**trip, "requests": compared(trip, equal), "compared": "bytes of the cache", "model": None, "control": None}


def compared(trip: dict[str, Any], equal: dict[str, bool]) -> tuple[Request, ...]:
    """Return the requests of a trip, with what was found of each."""
    return tuple(replace(one, equal=equal[one.id]) for one in trip["requests"])


def run_engine(args: argparse.Namespace, tell: Tell, tamper: Tamper) -> dict[str, Any]:
    """Generate undisturbed, then with the blocks of all requests moved away and back, and compare the tokens.

    Raises:
        DemoError: the engine failed, or finished before it could be disturbed.
    """
    with _quiet_and_on_one_thread():
        model = _model()
        texts = prompts(args.requests, VOCABULARY)
        trips: list[dict[str, Any]] = []
        undisturbed = generate(model, texts, args.tokens, tell, "Undisturbed run")

        def disturb(manager: Any, *, load: bool) -> None:
            trips.append(move_blocks(manager, list(undisturbed), tamper, load=load))

        disturbed = generate(
            model, texts, args.tokens, tell, "Disturbed run", lambda manager: disturb(manager, load=True)
        )
        control = generate(model, texts, args.tokens, tell, "Control run, without the load",
                           lambda manager: disturb(manager, load=False))  # fmt: skip
    config = model.config
    facts = {"architecture": type(model).__name__, "layers": config.num_hidden_layers,
             "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}  # fmt: skip
    equal = {name: disturbed[name] == tokens for name, tokens in undisturbed.items()}
    changed = sum(control[name] != tokens for name, tokens in undisturbed.items())
    return {**trips[0], "requests": compared(trips[0], equal), "compared": "generated tokens", "model": facts,
            "control": {"requests_changed": changed}}  # fmt: skip


def generate(
    model: Any,
    texts: list[list[int]],
    new_tokens: int,
    tell: Tell,
    what: str,
    disturb: Callable[[Any], None] | None = None,
) -> dict[str, list[int]]:
    """Run all prompts at once, greedily, and return the tokens that each request generated.

    All requests are queued before the engine starts, so every run forms the same batches. Greedy tokens then depend on
    the cache alone. ``disturb`` gets the paused manager once, after some tokens of every request.
    """
    import transformers

    engine: Any = transformers  # not all of it is typed
    blocks = sum(ceil((len(text) + new_tokens) / PAGE_TOKENS) for text in texts)
    manager = model.init_continuous_batching(
        generation_config=engine.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=new_tokens),
        continuous_batching_config=engine.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=3 * blocks,  # for all requests, for their new places, and for the scheduler
            max_batch_tokens=sum(map(len, texts)),
            allow_block_sharing=False,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
        ),
    )
    tokens: dict[str, list[int]] = {f"request {k}": [] for k in range(len(texts))}
    for name, text in zip(tokens, texts, strict=True):
        manager.add_request(text, request_id=name, streaming=True)
    manager.start()
    try:
        for output in _outputs(manager, len(texts)):
            tokens[output.request_id] = list(output.generated_tokens)
            counts = [len(some) for some in tokens.values()]
            tell(sum(counts) / (len(texts) * new_tokens), what)
            if disturb is not None and min(counts) >= pause_after(new_tokens):
                with manager.pause():  # between two steps; the cache and the running requests stay
                    disturb(manager)
                disturb = None
    finally:
        manager.stop(hard_stop=True)
    if disturb is not None:
        raise DemoError("the engine finished before it could be disturbed")
    return tokens


def move_blocks(manager: Any, names: list[str], tamper: Tamper, *, load: bool) -> dict[str, Any]:
    """Move every request of a paused engine to other blocks of its cache, through a host pool.

    Raises:
        DemoError: a request is not running, no blocks are left, or the engine can still read the old blocks.
    """
    from kvplan.backends import transformers as backend

    cache = manager.batch_processor.cache
    (allocator,) = cache.cache_allocators.values()
    running = manager.batch_processor.scheduler.active_requests
    requests = []
    for name in names:
        state = running.get(name)
        if state is None or state.status.name != "DECODING":
            raise DemoError(f"{name} has finished already; ask for more tokens (--tokens)")
        old = tuple(allocator.block_table[name])
        requests.append(
            Request(name, state.current_len(), state.generated_len(), old, (), _free(allocator, len(old)), equal=False)
        )
    # The engine's own view of its memory: row b is block b.
    block_bytes = cache.cache_tensor.numpy().reshape(-1, allocator.bytes_per_block)
    trip = round_trip(backend.describe(cache), block_bytes, requests, tamper, load=load)
    for one in trip["requests"]:
        # Attention reads through get_read_indices: only NaN is left there.
        rows = allocator.get_read_indices(one.id, one.cached_tokens, 0)
        views = (view for pair in allocator._kv_token_views.values() for view in pair)
        if not all(bool(view[rows].isnan().all()) for view in views):
            raise DemoError(f"the engine still reads numbers in the old blocks {one.old_blocks} of {one.id}")
        allocator.block_table[one.id] = list(one.new_blocks)
        allocator.pool.free_blocks(allocator.index, list(one.old_blocks))
    return trip


def _free(allocator: Any, count: int) -> tuple[int, ...]:
    pool = allocator.pool
    while pool.count_free_blocks(allocator.index) < count:
        if not pool.num_free_sectors:
            raise DemoError(f"the engine's cache has no {count} free blocks")
        pool.allocate_sector(allocator.index)
    return tuple(pool.get_free_blocks(allocator.index, count))


def _outputs(manager: Any, unfinished: int) -> Iterator[Any]:
    """Yield the outputs of the engine until every request has finished.

    Raises:
        DemoError: the engine failed, or gave no token for :data:`STALL_SECONDS`.
    """
    last = perf_counter()
    while unfinished:
        output = manager.get_result(timeout=0.5)
        if output is not None:
            if output.error:
                raise DemoError(f"the engine failed on {output.request_id}: {output.error}")
            last = perf_counter()
            unfinished -= output.is_finished()
            yield output
        elif not manager.is_running() or perf_counter() - last > STALL_SECONDS:
            fatal = manager.background_thread_status.fatal_error
            raise DemoError(f"the engine stopped: {fatal or f'no token for {STALL_SECONDS:.0f} seconds'}")


def _model() -> Any:
    """Return a small Llama. Its weights spread ten times wider than usual; otherwise greedy tokens would repeat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
                         initializer_range=0.2, dtype="float32")  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    return model.eval()


@contextmanager
def _quiet_and_on_one_thread() -> Iterator[None]:
    """Silence logs, as outputs hold the errors; more threads do not help a small model on shared cores."""
    import torch

    threads = torch.get_num_threads()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(logging.NOTSET)

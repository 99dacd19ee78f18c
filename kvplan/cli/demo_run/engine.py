"""Run continuous batching of transformers on the CPU, and disturb it between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from kvplan.cli.demo_run.round_trip import (
    DemoError,
    Move,
    Outcome,
    RoundTrip,
    Workload,
    measure_speed,
    round_trip,
)
from kvplan.cli.screen.printing import Tell

STALL_SECONDS = 120.0  # an engine that gives no token for this time has failed
VOCABULARY = 1024
WRITTEN_FOR = "5.23.0"  # the version of transformers whose members are used here; a test compares it with versions


def import_engine() -> dict[str, str]:
    """Import torch and transformers, and return the versions.

    Raises:
        ImportError: torch or transformers is missing, or too old for continuous batching.
    """
    import torch
    import transformers
    from transformers import ContinuousBatchingConfig  # noqa: F401  # since 5.0

    return {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}


def run(workload: Workload, tell: Tell) -> Outcome:
    """Generate undisturbed, then with the blocks of all requests moved away and back, and compare the tokens.

    Args:
        workload: size of the demo.
        tell: a function that gets the share that is done and a text.

    Raises:
        ImportError: see :func:`import_engine`.
        DemoError: the engine failed, or finished before it could be disturbed.
    """
    versions = import_engine()
    with _quiet(), _one_thread():
        model = _model()
        prompts = workload.prompts(VOCABULARY)
        undisturbed = generate(model, prompts, workload, tell, "Undisturbed run")
        trips: list[RoundTrip] = []

        def disturb(manager: Any) -> None:
            trips.append(move_blocks(manager, list(undisturbed), workload))

        def lose(manager: Any) -> None:
            move_blocks(manager, list(undisturbed), workload, load=False)

        disturbed = generate(model, prompts, workload, tell, "Disturbed run", disturb)
        control = generate(model, prompts, workload, tell, "Control run, without the load", lose)
    config = model.config
    return Outcome(
        engine="transformers",
        versions=versions,
        model={
            "architecture": type(model).__name__,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        new_tokens=workload.new_tokens,
        trip=trips[0],
        compared="generated tokens",
        equal={name: disturbed[name] == tokens for name, tokens in undisturbed.items()},
        control_changed=sum(control[name] != tokens for name, tokens in undisturbed.items()),
        speed=measure_speed(trips[0], workload),
    )


def generate(
    model: Any,
    prompts: list[list[int]],
    workload: Workload,
    tell: Tell,
    what: str,
    disturb: Callable[[Any], None] | None = None,
) -> dict[str, list[int]]:
    """Run all prompts at once, greedily, and return the tokens that each request generated.

    All requests are queued before the engine starts, so every run forms the same batches. Greedy tokens then
    depend on the cache alone.

    Args:
        model: a model of transformers.
        prompts: token ids.
        workload: tokens to generate, and when to disturb.
        tell: a function that is called after every token.
        what: name of this run for ``tell``.
        disturb: a function that gets the paused manager once, after ``workload.pause_after`` tokens of every request.
    """
    import transformers

    engine: Any = transformers  # not all of it is typed
    blocks = sum(ceil((len(prompt) + workload.new_tokens) / workload.page_tokens) for prompt in prompts)
    manager = model.init_continuous_batching(
        generation_config=engine.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=workload.new_tokens),
        continuous_batching_config=engine.ContinuousBatchingConfig(
            page_size=workload.page_tokens,
            num_blocks=3 * blocks,  # for all requests, for their new places, and for the scheduler
            max_batch_tokens=sum(map(len, prompts)),
            allow_block_sharing=False,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
        ),
    )
    names = [f"request {k}" for k in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        manager.add_request(prompt, request_id=name, streaming=True)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    manager.start()
    try:
        for output in _outputs(manager, len(prompts)):
            tokens[output.request_id] = list(output.generated_tokens)
            counts = [len(made) for made in tokens.values()]
            tell(sum(counts) / (len(prompts) * workload.new_tokens), what)
            if disturb is not None and min(counts) >= workload.pause_after:
                with manager.pause():  # between two steps; the cache and the running requests stay
                    disturb(manager)
                disturb = None
    finally:
        manager.stop(hard_stop=True)
    if disturb is not None:
        raise DemoError("the engine finished before it could be disturbed")
    return tokens


def move_blocks(manager: Any, names: list[str], workload: Workload, *, load: bool = True) -> RoundTrip:
    """Move every request of a paused engine to other blocks of its cache, through a host pool.

    Args:
        manager: a paused ``ContinuousBatchingManager``.
        names: ids of the requests.
        workload: see :class:`~kvplan.cli.demo_run.round_trip.Workload`.
        load: whether to load; without a load, the new blocks stay empty.

    Raises:
        DemoError: a request is not running, no blocks are left, or the engine can still read the old blocks.
    """
    from kvplan.backends import transformers as backend

    cache = manager.batch_processor.cache
    layout = backend.describe(cache)
    (allocator,) = cache.cache_allocators.values()
    running = manager.batch_processor.scheduler.active_requests
    moves = []
    for name in names:
        state = running.get(name)
        if state is None or state.status.name != "DECODING":
            raise DemoError(f"{name} has finished already; ask for more tokens (--tokens)")
        old = list(allocator.block_table[name])
        new = _free_blocks(allocator, len(old))
        moves.append(Move(name, state.current_len(), old, [], new, generated=state.generated_len()))
    # The engine's own view of its memory: row b is block b.
    block_bytes = cache.cache_tensor.numpy().reshape(-1, allocator.bytes_per_block)
    trip = round_trip(layout, block_bytes, moves, workload, load=load)
    for move in trip.moves:
        if not _reads_only_nan(allocator, move):
            raise DemoError(f"the engine still reads numbers in the old blocks {move.old} of {move.request}")
        allocator.block_table[move.request] = list(move.new)
        allocator.pool.free_blocks(allocator.index, move.old)
    return trip


def _free_blocks(allocator: Any, count: int) -> list[int]:
    pool = allocator.pool
    while pool.count_free_blocks(allocator.index) < count:
        if not pool.num_free_sectors:
            raise DemoError(f"the engine's cache has no {count} free blocks")
        pool.allocate_sector(allocator.index)
    return list(pool.get_free_blocks(allocator.index, count))


def _reads_only_nan(allocator: Any, move: Move) -> bool:
    """Return whether attention, which uses ``get_read_indices``, would read only NaN for a request."""
    rows = allocator.get_read_indices(move.request, move.cached_tokens, 0)
    views = (view for pair in allocator._kv_token_views.values() for view in pair)
    return all(bool(view[rows].isnan().all()) for view in views)


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

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        initializer_range=0.2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the engine's log. The outputs of requests hold the errors."""
    loggers = [logging.getLogger(name) for name in ("transformers", "ContinuousBatchingLogger")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give torch one thread: more threads do not help a small model, and cost much on shared cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

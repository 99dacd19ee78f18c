"""The demo's engine: continuous batching of transformers on the CPU, disturbed in mid-flight."""

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
    Note,
    Outcome,
    RoundTrip,
    Workload,
    measure_speed,
    round_trip,
)

STALL_SECONDS = 120.0  # without a token for so long, the engine is given up
VOCABULARY = 1024


WRITTEN_FOR = "5.23.0"  # the version of transformers whose members are used here


def import_engine() -> dict[str, str]:
    """Import all that the engine needs, and give the versions.

    Raises:
        ImportError: torch or transformers is missing, or so old that it has no continuous batching.
    """
    import torch
    import transformers
    from transformers import ContinuousBatchingConfig  # noqa: F401  # since 5.0

    return {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}


def run(workload: Workload, note: Note) -> Outcome:
    """Generate undisturbed, then with the blocks of all requests moved away and back, and compare the tokens.

    Args:
        workload: what is asked.
        note: told what is going on.

    Raises:
        ImportError: as :func:`import_engine` says.
        DemoError: the engine failed, or was done before it could be disturbed.
    """
    versions = import_engine()
    with _quiet(), _one_thread():
        model = _model()
        prompts = workload.prompts(VOCABULARY)
        undisturbed = generate(model, prompts, workload, note, "Undisturbed run")
        trips: list[RoundTrip] = []

        def disturb(manager: Any) -> None:
            trips.append(move_blocks(manager, list(undisturbed), workload))

        def lose(manager: Any) -> None:
            move_blocks(manager, list(undisturbed), workload, load=False)

        disturbed = generate(model, prompts, workload, note, "Disturbed run", disturb)
        control = generate(model, prompts, workload, note, "Control run, without the load", lose)
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
        speed=measure_speed(trips[0], workload, note),
    )


def generate(
    model: Any,
    prompts: list[list[int]],
    workload: Workload,
    note: Note,
    what: str,
    disturb: Callable[[Any], None] | None = None,
) -> dict[str, list[int]]:
    """Run all prompts at once, greedily, and give the tokens that each request generated.

    All requests are queued before the engine starts, so that every run forms the same batches: greedy tokens then
    depend on nothing but the cache.

    Args:
        model: of transformers.
        prompts: token ids.
        workload: tokens to generate, and when to disturb.
        note: told of every token.
        what: to call this run in notes.
        disturb: called once with the paused manager, when every request has generated ``workload.pause_after`` tokens.
    """
    import transformers

    engine: Any = transformers  # not all of it is typed
    blocks = sum(ceil((len(prompt) + workload.new_tokens) / workload.page_tokens) for prompt in prompts)
    manager = model.init_continuous_batching(
        generation_config=engine.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=workload.new_tokens),
        continuous_batching_config=engine.ContinuousBatchingConfig(
            page_size=workload.page_tokens,
            num_blocks=3 * blocks,  # what all requests need, a second place to move to, and room for the scheduler
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
            note(what, done=sum(counts), total=len(prompts) * workload.new_tokens)
            if disturb is not None and min(counts) >= workload.pause_after:
                with manager.pause():  # between two steps; the cache and the requests in flight stay
                    disturb(manager)
                disturb = None
    finally:
        manager.stop(hard_stop=True)
    if disturb is not None:
        raise DemoError("the engine was done before it could be disturbed")
    return tokens


def move_blocks(manager: Any, names: list[str], workload: Workload, *, load: bool = True) -> RoundTrip:
    """Move every request of a paused engine to other blocks of its cache, by way of a host pool.

    Args:
        manager: a paused ``ContinuousBatchingManager``.
        names: ids of the requests.
        workload: see :class:`~kvplan.cli.demo_run.round_trip.Workload`.
        load: False leaves the new blocks empty.

    Raises:
        DemoError: a request that is not in flight, no blocks left, or old blocks that the engine can still read.
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
            raise DemoError(f"{name} is not in flight any more; ask for more tokens (--tokens)")
        old = list(allocator.block_table[name])
        new = _free_blocks(allocator, len(old))
        moves.append(Move(name, state.current_len(), old, [], new, generated=state.generated_len()))
    # Bytes by the engine's own account of them: row b is block b.
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
    """Whether attention, which finds a request's tokens by these indices, would read nothing but NaN."""
    rows = allocator.get_read_indices(move.request, move.cached_tokens, 0)
    views = (view for pair in allocator._kv_token_views.values() for view in pair)
    return all(bool(view[rows].isnan().all()) for view in views)


def _outputs(manager: Any, unfinished: int) -> Iterator[Any]:
    """Outputs as they come, until every request has finished.

    Raises:
        DemoError: the engine failed, or nothing came for long.
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
    """A small Llama, its weights ten times wider than usual: else greedy tokens repeat and tell little of the cache."""
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
    """Without the engine's log: what goes wrong comes out of the requests."""
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
    """One thread for torch: so small a model gains nothing by more, and loses much where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

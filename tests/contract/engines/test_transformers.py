"""Continuous batching of transformers under cache pressure: its decisions, kvplan's transfers, the same tokens."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan.engines import transformers as engine
from tests.patience import PATIENCE

torch = pytest.importorskip("torch", reason="the engine is torch's")
transformers = pytest.importorskip("transformers", reason="the engine is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(transformers.__version__ != engine.WRITTEN_FOR, reason="another version of transformers"),
]

PAGE, NEW_TOKENS, PLENTY = 8, 40, 200
LENGTHS = (17, 23, 9, 31, 12, 28)
GIB = 0.01


def model_of(kind: str):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
    if kind == "hybrid":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(
            **sizes, num_hidden_layers=3, layer_types=layers, sliding_window=16, query_pre_attn_scalar=16
        )
        return transformers.Gemma3ForCausalLM(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=3)).eval()


@pytest.fixture(scope="module", params=["full", "hybrid"])
def model(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield model_of(request.param)
    logger.setLevel(level)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plenty(model) -> dict[str, list[int]]:
    """The tokens of every request where no request must leave."""
    made = generate(manager_of(model, PLENTY))
    gc.collect()
    gc.freeze()  # the engine collects garbage at each end, and has imported a thousand modules
    return made


def manager_of(model, blocks: int, *, space: float = 0.0, sharing: bool = False):
    return model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=NEW_TOKENS),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=blocks, max_batch_tokens=256, allow_block_sharing=sharing, use_cuda_graph=False,
            use_async_batching=False, auto_switch_to_flash=False, cpu_offload_space=space,
        ),
    )  # fmt: skip


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, 512, length).tolist() for length in LENGTHS]


def generate(manager) -> dict[str, list[int]]:
    """The tokens of every request; all are queued before the engine starts, so that batches are the same each time."""
    for k, prompt in enumerate(prompts()):
        manager.add_request(prompt, request_id=f"r{k}")
    manager.start()
    made = {}
    try:
        while len(made) < len(LENGTHS):
            output = manager.get_result(timeout=PATIENCE)
            assert output is not None, "the engine gives no tokens"
            assert output.error is None, output.error
            if output.is_finished():
                made[output.request_id] = list(output.generated_tokens)
    finally:
        manager.stop(hard_stop=True)
    return made


def blocks_of(model) -> int:
    """So few blocks that requests must leave."""
    return 24 if model.config.model_type == "llama" else 14


def test_tokens_are_those_of_the_engine(model, plenty):
    mine = manager_of(model, blocks_of(model), space=GIB)
    offloading = engine.offload(mine)
    assert generate(mine) == plenty
    stats = offloading.executor.stats()
    assert stats.transfers >= 2
    assert stats.failed == 0
    block = next(iter(offloading.cache.cache_allocators.values())).bytes_per_block
    assert stats.nbytes >= 2 * block


@pytest.mark.parametrize("error", [kvplan.TransferError, kvplan.HostMemoryError])
def test_requests_that_cannot_be_stored_are_computed_anew(model, plenty, error, monkeypatch, caplog):
    manager = manager_of(model, blocks_of(model), space=GIB)
    offloading = engine.offload(manager)

    def fail(plan, **more):
        raise error("the driver is gone")

    monkeypatch.setattr(offloading.executor, "submit", fail)
    with caplog.at_level(logging.ERROR, logger="kvplan.engines.transformers"):
        assert generate(manager) == plenty
    assert "could not be stored; they are computed anew" in caplog.text


def test_a_pool_too_small_for_all_stores_some(model, plenty):
    manager = manager_of(model, blocks_of(model))
    cache = manager._create_batch_processor().cache
    space = 2 * cache.bytes_per_sector / 2**30
    manager = manager_of(model, blocks_of(model))
    small = engine.offload(manager, cpu_offload_space=space)
    assert generate(manager) == plenty
    assert small.pool.num_blocks == 2


def test_prefixes_that_requests_share_are_found_again(model):
    if model.config.model_type != "llama":
        pytest.skip("sliding windows share no blocks")
    plenty = generate(manager_of(model, PLENTY, sharing=True))
    manager = manager_of(model, blocks_of(model), space=GIB, sharing=True)
    offloading = engine.offload(manager)
    assert generate(manager) == plenty
    assert offloading.executor.stats().transfers >= 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cpu_offload_space": 0}, "cpu_offload_space is 0; give a positive number of GiB"),
        ({"cpu_offload_space": -1.0}, r"cpu_offload_space is -1\.0"),
        ({}, r"cpu_offload_space is 0\.0"),
        ({"cpu_offload_space": 1e-9}, "too small for one sector of [0-9]+ bytes"),
    ],
)
def test_space_that_is_none_is_refused(model, change, said):
    manager = manager_of(model, PLENTY)
    with pytest.raises(kvplan.KVPlanError, match=said):
        engine.offload(manager, **change)
    assert manager.continuous_batching_config.cpu_offload_space == 0.0


def test_the_example_runs_on_any_machine(tmp_path):
    kept = tmp_path / "offload.json"
    script = Path(__file__).parents[3] / "examples" / "transformers_offload.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), "--device", "cpu", "--json", str(kept)], env=environment,
                          capture_output=True, text=True, check=False, timeout=PATIENCE)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(kept.read_text())["rows"]
    assert [(row["way"], row["tokens_equal"]) for row in rows] == [
        ("plenty", "8 of 8"), ("kvplan", "8 of 8"), ("recompute", "8 of 8")
    ]  # fmt: skip
    assert rows[1]["moved_gb"] > 0
    assert done.stdout.count("\n") == 4

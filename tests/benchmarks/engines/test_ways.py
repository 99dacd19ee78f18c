"""Ways of offloading: what vLLM is configured with, and which engines run side by side."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.engines import engine, ways
from benchmarks.engines.shapes import FULL, SHAPES, SMOKE
from benchmarks.engines.ways import DEFAULT, batches, way_of


def configured(name):
    return engine.transfer_config(way_of(name), SHAPES["8b"], FULL)


def test_every_default_way_has_a_title_of_its_own():
    assert len({way_of(name).title for name in DEFAULT}) == len(DEFAULT)


def test_without_offloading_there_is_no_connector():
    assert configured("none") is None


@pytest.mark.parametrize("name", [name for name in DEFAULT if name not in ("none", "lmcache")])
def test_every_way_has_the_same_host_pool(name):
    extra = configured(name)["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == FULL.host_tokens * SHAPES["8b"].token_nbytes


def test_lmcache_has_the_same_host_pool():
    gib = float(engine.environment(way_of("lmcache"), SHAPES["8b"], FULL)["LMCACHE_MAX_LOCAL_CPU_SIZE"])
    assert gib * 2**30 == pytest.approx(engine.pool_nbytes(SHAPES["8b"], FULL), rel=1e-3)


def test_the_prefixes_are_whole_chunks_of_lmcache():
    chunk = int(way_of("lmcache").env["LMCACHE_CHUNK_SIZE"])
    assert all(held % chunk == 0 and held % FULL.block == 0 for held in FULL.held)


def test_kvplan_by_layer_is_kvplan_and_one_key_more():
    plain, layers = configured("kvplan"), configured("kvplan-layers")
    assert layers["kv_connector_extra_config"].pop("load_by_layer") is True
    assert layers == plain


def test_a_path_is_named_for_kvplan():
    assert configured("kvplan-layers-kernel")["kv_connector_extra_config"]["kvplan"] == {"path": "kernel"}


def test_ways_do_not_share_their_configuration():
    configured("own")["kv_connector_extra_config"]["more"] = 1
    assert "more" not in configured("own")["kv_connector_extra_config"]


def test_the_layout_of_vllm_is_an_environment_variable():
    assert engine.environment(way_of("own-packed"), SHAPES["8b"], FULL)["VLLM_KV_CACHE_LAYOUT"] == "BLHNC"
    assert "VLLM_KV_CACHE_LAYOUT" not in engine.environment(way_of("own"), SHAPES["8b"], FULL)


@pytest.mark.parametrize("name", ["", "owner", "own-", "own-fast", "layers"])
def test_an_unknown_way_is_refused(name):
    with pytest.raises(ValueError, match="unknown way"):
        way_of(name)


@pytest.mark.parametrize("at_once", [2, 3, 5, 9, 20])
def test_every_way_is_in_one_batch_and_by_layer_in_all(at_once):
    made = batches(DEFAULT, at_once)
    assert all(len(batch) <= at_once for batch in made)
    assert all("kvplan-layers" in batch for batch in made)
    others = [name for batch in made for name in batch if name != "kvplan-layers"]
    assert sorted(others) == sorted(set(DEFAULT) - {"kvplan-layers"})


def test_a_missing_package_is_noted():
    absent = ways.Way("x", "x", {}, {}, needs="a_package_that_is_nowhere")
    assert absent.missing
    assert not way_of("own").missing


@pytest.mark.parametrize("work", [FULL, SMOKE], ids=["full", "smoke"])
def test_the_host_holds_what_the_gpu_cannot(work):
    """Chats and short prefixes exceed the GPU's cache, and fit the host pool; the requests in flight fit the GPU."""
    chats = work.chats
    assert chats.sessions * chats.context > work.gpu_tokens
    assert work.prompts[0] * work.held[0] > work.gpu_tokens
    for held, prompts in zip(work.held, work.prompts, strict=True):
        assert prompts * held < work.host_tokens
    assert chats.sessions * chats.session_tokens < work.host_tokens
    assert chats.in_flight * chats.session_tokens <= work.gpu_tokens
    assert work.longest <= work.gpu_tokens


def test_the_pools_of_all_engines_fit():
    for name in ("8b", "gqa1", "mla"):
        shape = SHAPES[name]
        assert shape.at_once * engine.pool_nbytes(shape, FULL) < 80 << 30


def test_a_setup_survives_the_command_line():
    setup = engine.Setup("8b", "own", FULL, "cuda")
    assert engine.Setup.read(json.dumps(asdict(setup))) == setup


@pytest.mark.parametrize("graphs", ["piecewise", "decode"])
def test_graphs_are_captured_for_the_steps_that_are_measured(graphs):
    setup = engine.Setup("8b", "own", FULL, "cuda", graphs)
    config = engine.engine_arguments(setup)["compilation_config"]
    assert {FULL.decoders, FULL.chats.in_flight} <= set(config["cudagraph_capture_sizes"])
    prefills = {FULL.suffix, FULL.suffix + FULL.decoders, FULL.batch}
    assert (prefills <= set(config["cudagraph_capture_sizes"])) == (graphs == "piecewise")

"""Whole vLLM engines with kvplan: tokens are those without offloading, and vLLM's own metrics say what was moved."""

from __future__ import annotations

import pytest

from tests.whole_engines import cases
from tests.whole_engines.cases import BLOCK_NBYTES
from tests.whole_engines.counters import (
    ASKED,
    FAILED,
    HITS,
    LOADED,
    OWN_HITS,
    PINNED,
    PREEMPTED,
    READ,
    STORED,
    WRITTEN,
)
from tests.whole_engines.model import TOKEN_NBYTES
from tests.whole_engines.work import BLOCK, HELD, SESSIONS, WAITING

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def each(some):
    return pytest.mark.parametrize("case", some, ids=lambda case: case.name)


def check(case, found, plain, note):
    """Check what holds for every case of the offloading connectors, and return the metrics."""
    metrics = found["metrics"]
    check_tokens(case, found, plain, note, f"{metrics[STORED] / 1e6:.1f}", f"{metrics[LOADED] / 1e6:.1f}")
    assert found["worker"] == "KVPlanOffloadingWorker"
    assert metrics[PINNED] == 0
    assert metrics[STORED] > 0
    assert metrics[STORED] % BLOCK_NBYTES == metrics[LOADED] % BLOCK_NBYTES == 0
    return metrics


def check_tokens(case, found, plain, note, stored, loaded):
    """Check that the tokens are those of no offloading, and that nothing is left."""
    wanted, answers = plain[case.work], found["answers"][case.work]
    different = [one["request"] for one, other in zip(answers, wanted, strict=True) if one["tokens"] != other["tokens"]]
    metrics = found["metrics"]
    note(
        f"{len(wanted) - len(different)} of {len(wanted)} equal", stored, loaded,
        f"{metrics[HITS]:,.0f} of {metrics[ASKED]:,.0f}", f"{metrics[PREEMPTED]:.0f}",
        ", ".join(f"{count} {what}" for what, count in found["faults"].items()),
    )  # fmt: skip
    assert different == []
    assert found["connector"] == case.connector["kv_connector"]
    assert {what: count for what, count in found["left"].items() if count} == {}
    assert found["threads"] == []


def whole_blocks(answers, *, prompts_only=True):
    """Number of blocks that the sessions fill in the end."""
    return sum(stored_tokens(one, prompts_only=prompts_only) // BLOCK for one in answers[-SESSIONS:])


def stored_tokens(one, *, prompts_only):
    """Tokens of a request that may be stored; the last token of an answer is not in the cache."""
    return one["prompt"] if prompts_only else one["prompt"] + len(one["tokens"]) - 1


def test_tokens_depend_on_the_first_token_of_a_prompt(plain):
    """Otherwise, equal tokens would say nothing about a prefix that was loaded."""
    first, second = (one["tokens"] for one in plain["prefixes"])
    assert first != second


@each(cases.WHOLE)
def test_a_prefix_of_the_host_is_loaded(case, served, plain, note):
    found = served(case)
    metrics = check(case, found, plain, note)
    answers = found["answers"]["chats"]
    prompts_only = case.extra.get("offload_prompt_only", True)
    # Each later turn finds all whole blocks of the turn before: on the host, or still in the cache.
    before = {}
    for one in answers:
        session = int(one["request"].split()[-1])
        if session in before:
            cached = stored_tokens(before[session], prompts_only=False) // BLOCK * BLOCK
            host = stored_tokens(before[session], prompts_only=prompts_only) // BLOCK * BLOCK
            assert one["cached"] in {host, cached}
        before[session] = one
    assert metrics[HITS] + metrics[OWN_HITS] == sum(one["cached"] for one in answers)
    assert metrics[HITS] > metrics[OWN_HITS]
    assert metrics[LOADED] == metrics[HITS] * TOKEN_NBYTES
    assert metrics[STORED] == whole_blocks(answers, prompts_only=prompts_only) * BLOCK_NBYTES


@each(cases.SMALL_POOL)
def test_a_small_pool_evicts(case, served, plain, note):
    found = served(case)
    metrics = check(case, found, plain, note)
    assert metrics[STORED] > 2 * case.pool
    assert metrics[LOADED] == metrics[HITS] * TOKEN_NBYTES > 0
    # An evicted block is stored once more.
    assert metrics[STORED] > whole_blocks(found["answers"]["chats"]) * BLOCK_NBYTES


@each(cases.TIERED)
def test_files_hold_what_the_pool_evicts(case, served, plain, note):
    found = served(case)
    metrics = check(case, found, plain, note)
    assert metrics[WRITTEN] == metrics[STORED] > 1.5 * case.pool
    assert metrics[READ] > 0
    assert metrics[LOADED] == metrics[HITS] * TOKEN_NBYTES > 0


@each(cases.PREEMPTED)
def test_preempted_requests_go_on(case, served, plain, note):
    metrics = check(case, served(case), plain, note)
    assert metrics[PREEMPTED] > 0
    # vLLM counts the hits of new requests. Blocks of preempted requests are loaded, too.
    assert metrics[LOADED] > metrics[HITS] * TOKEN_NBYTES > 0


@each(cases.WAITING)
def test_hits_wait_for_a_step_that_loads_them(case, served, plain, note):
    """Two of five fit into a step: three wait for the second step, and one of them for the third."""
    found = served(case)
    metrics = check(case, found, plain, note)
    assert [one["cached"] for one in found["answers"][case.work]] == [HELD] * WAITING
    assert metrics[LOADED] == WAITING * HELD * TOKEN_NBYTES
    assert found["waits"] == 4


@each(cases.FAILING)
def test_failed_transfers_are_recomputed(case, served, plain, note):
    found = served(case)
    metrics = check(case, found, plain, note)
    for what in case.faults:
        kinds = {kind.split()[-1] for kind in found["faults"] if what[:-1] in kind}
        # In a crowd, the number of jobs depends on the pace of the transfers.
        assert kinds == {"refused", "lost"} or (kinds and case.work == "crowd")
    assert metrics[FAILED] > 0
    assert metrics[LOADED] > 0


@each(cases.HOPELESS)
def test_a_request_whose_load_fails_is_computed(case, served, plain, note):
    """Such a request tries no second load: it would never end."""
    found = served(case)
    check_tokens(case, found, plain, note, f"{found['metrics'][STORED] / 1e6:.1f}", "0.0")
    assert LOADED not in found["metrics"]
    assert 0 < sum(found["faults"].values()) <= len(plain[case.work])


@each(cases.HYBRID)
def test_a_model_with_sliding_windows(case, served, plain_hybrid, note):
    found = served(case)
    metrics = found["metrics"]
    check_tokens(case, found, plain_hybrid, note, f"{metrics[STORED] / 1e6:.1f}", f"{metrics[LOADED] / 1e6:.1f}")
    assert metrics[HITS] > 0
    assert metrics[LOADED] > 0
    assert bool(found["faults"]) == bool(case.faults)


@each(cases.CACHED)
def test_lmcache_moves_its_tokens_by_kvplan(case, served, plain, note):
    pytest.importorskip("lmcache", reason="tests/whole_engines/install.py installs LMCache")
    found = served(case)
    check_tokens(case, found, plain, note, "", "")
    assert found["worker"] == "Connector"
    assert found["metrics"][HITS] > 0
    assert found["metrics"][PREEMPTED] > 0 or case.work != "crowd"

"""Whole vLLM engines on a GPU with kvplan: tokens are those without offloading, up to the rounding of 16 bits."""

from __future__ import annotations

import math

import pytest

from tests.whole_engines.cases import LARGE, LAYERS, OURS, VLLMS, Case
from tests.whole_engines.closeness import NEAR, gap
from tests.whole_engines.counters import (
    ASKED,
    HITS,
    LOADED,
    PINNED,
    PREEMPTED,
    READ,
    STORED,
    WRITTEN,
)
from tests.whole_engines.gpu_cases import (
    CONFIGURATIONS,
    HYBRID,
    ONE_OF_EACH_MODEL,
    OTHERS,
    STATES,
    USUAL_CONFIGURATION,
    WAYS,
    token_nbytes,
)

pytestmark = [pytest.mark.engines, pytest.mark.gpu, pytest.mark.slow]


def check(case, found, plain, note):
    """Check what holds for every case, note a row of the summary, and return the metrics."""
    wanted, answers, metrics = plain[case.work], found["answers"][case.work], found["metrics"]
    gaps = [gap(answer, other) for answer, other in zip(answers, wanted, strict=True)]
    near = [one for one in gaps if 0 < one <= NEAR]
    note(
        f"{gaps.count(0.0)} of {len(gaps)} equal" + (f", {len(near)} by rounding" if near else ""),
        f"{metrics.get(STORED, math.nan) / 1e6:.1f}", f"{metrics.get(LOADED, math.nan) / 1e6:.1f}",
        f"{metrics[HITS]:,.0f} of {metrics[ASKED]:,.0f}", f"{metrics[PREEMPTED]:.0f}",
        ", ".join(f"{count} {what}" for what, count in found["faults"].items()),
    )  # fmt: skip
    assert max(gaps) <= NEAR
    assert found["connector"] == case.connector["kv_connector"]
    assert metrics[HITS] > 0
    assert {what: count for what, count in found["left"].items() if count} == {}
    assert found["threads"] == []
    return metrics


def check_bytes(case, metrics):
    """Check the bytes of kvplan's worker: what was hit was loaded."""
    assert metrics[PINNED] == 0
    assert metrics[STORED] > 0
    assert metrics[LOADED] > 0
    if token_nbytes(case) and case.work != "crowd" and not case.faults:
        assert metrics[LOADED] == metrics[HITS] * token_nbytes(case)


# Configurations take turns, so that engines side by side do not wait for the tokens of the same one.
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda one: one.name)
def test_backends_layouts_and_models(configuration, way, plain_on_gpu, served_on_gpu, note):
    case = configuration.put_into(way)
    plain = plain_on_gpu(configuration)
    found = served_on_gpu(case)
    assert found["worker"] == "KVPlanOffloadingWorker"
    check_bytes(case, check(case, found, plain, note))


@pytest.mark.parametrize("configuration", ONE_OF_EACH_MODEL, ids=lambda one: one.name)
def test_answers_show_wrong_bytes(configuration, plain_on_gpu, served_on_gpu):
    """Otherwise, equal tokens would say nothing about a prefix that was loaded."""
    case = configuration.put_into(Case("garbage is loaded", OURS, faults={"silent": 1}))
    found = served_on_gpu(case)
    gaps = [gap(one, other) for one, other in zip(found["answers"][case.work], plain_on_gpu(configuration)[case.work],
                                                 strict=True)]  # fmt: skip
    assert sum(one > NEAR for one in gaps) >= 3


def test_states_come_too_late_in_vllms_own_loads_of_a_step(plain_on_gpu, served_on_gpu):
    """kvplan's connector loads asynchronously for this reason. If vLLM mends it, kvplan can load by layer here, too."""
    case = STATES.put_into(Case("in the step", VLLMS, {"sync_load_budget_bytes": LARGE}))
    found, plain = served_on_gpu(case), plain_on_gpu(STATES)
    gaps = [gap(one, other) for one, other in zip(found["answers"][case.work], plain[case.work], strict=True)]
    assert max(gaps) > NEAR


def test_a_hybrid_model_recomputes_failed_loads(plain_on_gpu, served_on_gpu, note):
    """vLLM itself ends an engine of several KV-cache groups whose loads fail in the step."""
    case = HYBRID.put_into(Case("loads by layer fail", OURS, LAYERS, faults={"loads": 2}))
    found = served_on_gpu(case)
    check_bytes(case, check(case, found, plain_on_gpu(HYBRID), note))
    assert found["faults"]


@pytest.mark.parametrize("other", OTHERS, ids=lambda case: case.name)
def test_cases_of_the_cpu(other, plain_on_gpu, served_on_gpu, note):
    case = USUAL_CONFIGURATION.put_into(other)
    found = served_on_gpu(case)
    metrics = check(case, found, plain_on_gpu(USUAL_CONFIGURATION), note)
    check_bytes(case, metrics)
    if case.tiers:
        assert metrics[WRITTEN] > 0
        assert metrics[READ] > 0
    if case.work == "crowd":
        assert metrics[PREEMPTED] > 0
    for what in case.faults:
        assert any(what[:-1] in kind for kind in found["faults"])

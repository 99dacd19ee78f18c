"""Whole SGLang engines whose HiCache is moved by kvplan: tokens are those without any cache."""

from __future__ import annotations

import pytest

from tests.whole_engines.work import BLOCK

pytestmark = [pytest.mark.engines, pytest.mark.slow]

KVPLAN = {"KVPLAN_SGLANG": "auto"}
THROUGH, BACK = {"hicache_write_policy": "write_through"}, {"hicache_write_policy": "write_back"}
ALL = {"hicache_ratio": 4.0}  # of the device's pool: all chats fit into the host's


@pytest.mark.parametrize(
    ("work", "more"),
    [
        pytest.param("chats", THROUGH | ALL, id="write through"),
        pytest.param("chats", BACK | ALL, id="write back"),
        pytest.param("chats", THROUGH | {"hicache_ratio": 1.5}, id="small pool"),
        pytest.param("chats", THROUGH | ALL | {"hicache_mem_layout": "page_first_direct"}, id="page first direct"),
        pytest.param("chats", THROUGH | ALL | {"page_size": 2 * BLOCK}, id="larger pages"),
        pytest.param("crowd", THROUGH | ALL, id="crowd"),
    ],
)
def test_pages_of_the_host_are_loaded(work, more, served, plain):
    answers, log = served(work, more, KVPLAN)
    different = [
        one["request"] for one, other in zip(answers, plain[work], strict=True) if one["tokens"] != other["tokens"]
    ]
    assert different == []
    assert "kvplan moves the pages of MHATokenToKVPoolHost and MHATokenToKVPool" in log
    assert "left to SGLang's own transfers" not in log
    host = sum(one["host"] for one in answers)
    assert host > 0
    assert host % BLOCK == 0


def test_tokens_depend_on_the_first_token_of_a_prompt(plain):
    """Otherwise, equal tokens would say nothing about a prefix that was loaded."""
    first, second = (one["tokens"] for one in plain["prefixes"])
    assert first != second


def test_without_the_plugin_nothing_moves(served):
    """SGLang's own transfers are compiled kernels, which are absent here: so it is kvplan that moved the pages."""
    with pytest.raises(AssertionError, match="name 'transfer_kv_all_layer_direct_lf_pf' is not defined"):
        served("chats", THROUGH | ALL, {"KVPLAN_SGLANG": "0"})

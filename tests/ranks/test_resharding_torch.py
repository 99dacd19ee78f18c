"""Resharding torch caches on the CPU: four ranks into a pool of no topology, and out of it into two."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.ranks import torch_caches


@pytest.mark.parametrize(
    "moved",
    [
        torch_caches.four_ranks_into_a_pool_and_into_two,
        torch_caches.replicas_store_in_turn_and_all_load,
        torch_caches.dealt_tokens_are_gathered_and_dealt_otherwise,
    ],
)
def test_ranks_on_the_cpu(moved):
    moved("cpu", "auto")

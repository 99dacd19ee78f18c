"""Resharding through GPUs: four ranks into a pool of no topology, and out of it into two, by every path."""

from __future__ import annotations

import pytest

from tests.ranks import torch_caches

pytestmark = pytest.mark.gpu
every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])


@every_path
def test_four_ranks_into_a_pool_and_into_two(path):
    torch_caches.four_ranks_into_a_pool_and_into_two("cuda:0", path)


@every_path
def test_replicas_store_in_turn_and_all_load(path):
    torch_caches.replicas_store_in_turn_and_all_load("cuda:0", path)


@every_path
def test_dealt_tokens_are_gathered_and_dealt_otherwise(path):
    torch_caches.dealt_tokens_are_gathered_and_dealt_otherwise("cuda:0", path)

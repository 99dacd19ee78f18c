"""vLLM's offloading worker over a GPU's cache: by every path, behind the engine's stream, expedited and not."""

from __future__ import annotations

import pytest

from tests.contract.engines.vllm.worker_moves import store_and_load_elsewhere

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
@pytest.mark.parametrize("page", [656, 8192, 65536])
@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("expedited", [False, True])
def test_what_the_engine_writes_is_stored_and_loaded_elsewhere(path, page, per_chunk, expedited):
    store_and_load_elsewhere("cuda:0", path, page, per_chunk, expedited)

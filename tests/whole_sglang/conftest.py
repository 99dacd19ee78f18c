"""A model, and the tokens of an engine without any cache of prefixes; where no SGLang is, all is skipped."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kvplan.engines.versions import SGLANG
from tests.whole_engines import model, processes
from tests.whole_engines.sharing import filled, shared_folder
from tests.whole_engines.work import BLOCK, WORKS

STAND_INS = Path(__file__).parent / "stand_ins"
ARGUMENTS = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "skip_tokenizer_init": True, "page_size": BLOCK,
    "mem_fraction_static": 0.1, "log_level": "info",
}  # fmt: skip


def installed() -> str | None:
    """The version of SGLang in this environment."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def pytest_collection_modifyitems(items):
    if installed() != SGLANG.written_for:
        skip = pytest.mark.skip(reason=f"SGLang is {installed()}; `make test-sglang` makes an environment")
        for item in items:
            if "whole_sglang" in item.nodeid:
                item.add_marker(skip)


def serve(folder: Path, arguments, works, env=()):
    """Start an engine, let it serve works, and return its answers and its log."""
    setup, answer = folder / "setup.json", folder / "answer.json"
    setup.write_text(json.dumps({"arguments": arguments, "works": works}))
    paths = os.pathsep.join((str(STAND_INS), processes.ENVIRONMENT["PYTHONPATH"]))
    command = [sys.executable, "-m", "tests.whole_sglang.sglang_engine", str(setup), str(answer)]
    processes.run(command, folder, {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", **dict(env)})
    return json.loads(answer.read_text()), (folder / "log").read_text(errors="replace")


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all workers of pytest-xdist share, and that one of them has filled."""
    with filled(shared_folder(tmp_path_factory) / "sglang") as (folder, new):
        if new:
            path = str(model.write(folder / "model"))
            plain = {"model_path": path, "disable_radix_cache": True, "max_total_tokens": 8192}
            serve(folder, plain | ARGUMENTS, list(WORKS))
    return folder


@pytest.fixture(scope="session")
def plain(shared):
    """Answers without any cache of prefixes, from an engine that holds all requests."""
    return json.loads((shared / "answer.json").read_text())


@pytest.fixture
def served(shared, tmp_path):
    """Run an engine with HiCache."""

    def run(work, more, env):
        given = {"model_path": str(shared / "model"), "enable_hierarchical_cache": True, "hicache_io_backend": "direct"}
        answers, log = serve(tmp_path, given | ARGUMENTS | {"max_total_tokens": 2048} | more, [work], env)
        return answers[work], log

    return run

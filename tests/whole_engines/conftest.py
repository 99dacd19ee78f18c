"""A model and the tokens of an engine without offloading; where no vLLM is that can run, all is skipped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import uuid
from pathlib import Path

import pytest

from kvplan.engines.vllm.releases import VERSIONS
from tests.whole_engines import model, processes, summary
from tests.whole_engines.cases import HYBRID, Case
from tests.whole_engines.gpu_cases import LIKELY, USUAL_CONFIGURATION, Configuration
from tests.whole_engines.gpu_models import MODELS
from tests.whole_engines.install import RELEASES, installed
from tests.whole_engines.work import BLOCK, WORKS

COLUMNS = ("tokens", "stored, MB", "loaded, MB", "hits of the host", "preemptions", "failures")
SUMMARY = "row of the summary"
INSTALLED = installed()
VERSION = {f"{version.release}+cpu": version for version in VERSIONS}.get(INSTALLED)
GPU_VERSION = {version.release: version for version in VERSIONS}.get(INSTALLED)
rows: dict[str, tuple[str, ...]] = {}
failed: list[str] = []


def missing(item) -> str:
    """Why a test does not run here, or ""."""
    if item.get_closest_marker("gpu"):
        return "" if GPU_VERSION and has_gpu() else f"vLLM is {INSTALLED}; on a machine with a GPU, install vLLM"
    if VERSION is None:
        return f"vLLM is {INSTALLED}, not {RELEASES[0]}+cpu; `make test-engines` makes an environment"
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    lacks = VERSION.lacks if isinstance(case, Case) else ()
    return "".join(f"vLLM {VERSION.release} has no interface for {key}" for key in lacks if key in case.extra)


def has_gpu() -> bool:
    """Whether this machine has a GPU for CUDA."""
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="write the summary of whole engines to this JSON file")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("engines") and (why := missing(item)):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def vllm_version():
    """The row of this vLLM in the table of versions."""
    return VERSION


def shared_folder(tmp_path_factory) -> Path:
    """A folder of all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"


@contextlib.contextmanager
def filled(folder: Path):
    """Give a folder, and whether an engine's answer is still to be put there; other processes wait meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, not (folder / "answer.json").exists()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all workers of pytest-xdist share, and that one of them has filled."""
    with filled(shared_folder(tmp_path_factory)) as (folder, new):
        if new:
            model.write(folder / "model")
            case = Case("without offloading")
            arguments = case.arguments(str(folder / "model"), "", "")
            arguments |= {"enable_prefix_caching": False, "num_gpu_blocks_override": 400}
            processes.serve(arguments, list(WORKS), folder, case)
    return folder


@pytest.fixture(scope="session")
def model_folder(shared):
    return str(shared / "model")


@pytest.fixture(scope="session")
def plain(shared):
    """Answers without offloading and without any cache of prefixes, from an engine that holds all requests."""
    return json.loads((shared / "answer.json").read_text())["answers"]


@pytest.fixture(scope="session")
def plain_hybrid(tmp_path_factory):
    """The same of the model with sliding windows."""
    with filled(shared_folder(tmp_path_factory) / "hybrid") as (folder, new):
        if new:
            case = Case("without offloading", engine=HYBRID[0].engine)
            arguments = case.arguments(model.write_config(folder / "model", MODELS[HYBRID[0].model]), "", "")
            arguments |= {"enable_prefix_caching": False, "num_gpu_blocks_override": 400}
            processes.serve(arguments, [case.work], folder, case)
    return json.loads((folder / "answer.json").read_text())["answers"]


@pytest.fixture
def nothing_left():
    """The test leaves nothing in /dev/shm."""
    before = processes.shared_names()
    yield
    assert processes.left_behind(before) == set()


@pytest.fixture
def served(model_folder, tmp_path, nothing_left):
    """Run a case."""

    def run(case: Case):
        folder = model.write_config(tmp_path / "model", MODELS[case.model]) if case.model else model_folder
        arguments = case.arguments(folder, f"kvplan-{uuid.uuid4()}", str(tmp_path / "tier"))
        return processes.serve(arguments, [case.work], tmp_path, case)

    return run


@pytest.fixture(scope="session")
def plain_on_gpu(tmp_path_factory):
    """Answers without offloading of a configuration on the GPU, from an engine that holds all requests."""

    def answers(configuration: Configuration):
        with filled(shared_folder(tmp_path_factory) / configuration.name) as (folder, new):
            if new:
                case = configuration.put_into(Case("without offloading"))
                arguments = case.arguments(model.write_config(folder / "model", MODELS[case.model]), "", "")
                arguments |= {"enable_prefix_caching": False, "num_gpu_blocks_override": 400}
                crowd = ["crowd"] if configuration == USUAL_CONFIGURATION else []
                processes.serve(arguments, [case.work, *crowd], folder, case, LIKELY)
        return json.loads((folder / "answer.json").read_text())["answers"]

    return answers


@pytest.fixture
def served_on_gpu(tmp_path, nothing_left):
    """Run a case on the GPU."""

    def run(case: Case):
        folder = model.write_config(tmp_path / "model", MODELS[case.model])
        # Folders of several workers may have the same name, and vLLM's region has the engine's.
        arguments = case.arguments(folder, f"kvplan-{uuid.uuid4()}", str(tmp_path / "tier"))
        return processes.serve(arguments, [case.work], tmp_path, case, LIKELY)

    return run


@pytest.fixture
def note(request):
    """Add a row to the summary of the run."""
    return lambda *cells: request.node.user_properties.append((SUMMARY, cells))


def pytest_runtest_logreport(report):
    name = report.nodeid.rpartition("::")[2]
    if report.failed:
        failed.append(name)
    rows.update({name.partition("[")[2][:-1] or name: cells for what, cells in report.user_properties
                 if what == SUMMARY and report.when == "call"})  # fmt: skip


def pytest_terminal_summary(terminalreporter, config):
    if not rows:
        return
    if config.getoption("record") and not hasattr(config, "workerinput"):  # workers know their own rows only
        summary.write(config.getoption("record"), COLUMNS, rows, failed)
    terminalreporter.write_line(f"vLLM {INSTALLED}, Python {sys.version.split()[0]}, blocks of {BLOCK} tokens")
    lines = [("case", *COLUMNS), *((name, *rows[name]) for name in sorted(rows))]
    widths = [max(len(line[k]) for line in lines) for k in range(len(COLUMNS) + 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())

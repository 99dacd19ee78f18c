"""A model and the tokens of an engine without offloading; where no vLLM is that can run, all is skipped."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pytest

from tests.whole_engines import model, processes, summary
from tests.whole_engines.cases import HYBRID, Case
from tests.whole_engines.gpu_cases import LIKELY, OTHERS, USUAL_CONFIGURATION, Configuration
from tests.whole_engines.gpu_models import MODELS
from tests.whole_engines.install import RELEASE, installed
from tests.whole_engines.sharing import filled, shared_folder
from tests.whole_engines.work import BLOCK, WORKS

COLUMNS = ("tokens", "stored, MB", "loaded, MB", "hits of the host", "preemptions", "failures")
SUMMARY = "row of the summary"
INSTALLED = installed()
rows: dict[str, tuple[str, ...]] = {}
failed: list[str] = []


def missing(item) -> str:
    """Why a test does not run here, or ""."""
    if item.get_closest_marker("gpu"):
        here = INSTALLED == RELEASE and has_gpu()
        return "" if here else f"vLLM is {INSTALLED}; on a machine with a GPU, install vLLM {RELEASE}"
    if f"{RELEASE}+cpu" == INSTALLED:
        return ""
    return f"vLLM is {INSTALLED}, not {RELEASE}+cpu; `make test-engines` makes an environment"


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


def plain_answers(folder: Path, case: Case, works, likely: int = 0):
    """Answers of a case's engine without any cache of prefixes, which holds all requests; one worker asks for them."""
    with filled(folder) as (_, new):
        if new:
            path = folder / "model"
            made = model.write_config(path, MODELS[case.model]) if case.model else str(model.write(path))
            arguments = case.arguments(made, "", "")
            arguments |= {"enable_prefix_caching": False, "num_gpu_blocks_override": 400}
            processes.serve(arguments, works, folder, case, likely)
    return json.loads((folder / "answer.json").read_text())["answers"]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Answers without offloading and without any cache of prefixes, from an engine that holds all requests."""
    return plain_answers(shared_folder(tmp_path_factory), Case("without offloading"), list(WORKS))


@pytest.fixture(scope="session")
def model_folder(plain, tmp_path_factory):
    """The folder of the model, which is made with the first answers."""
    return str(shared_folder(tmp_path_factory) / "model")


@pytest.fixture(scope="session")
def plain_hybrid(tmp_path_factory):
    """The same of the model with sliding windows."""
    case = Case("without offloading", engine=HYBRID[0].engine, model=HYBRID[0].model)
    return plain_answers(shared_folder(tmp_path_factory) / "hybrid", case, [case.work])


@pytest.fixture
def nothing_left():
    """The test leaves nothing in /dev/shm."""
    before = processes.shared_names()
    yield
    assert processes.left_behind(before) == set()


def serve_case(case: Case, tmp_path: Path, model_folder: str, likely: int = 0):
    """Run a case."""
    folder = model.write_config(tmp_path / "model", MODELS[case.model]) if case.model else model_folder
    # Folders of several workers may have the same name, and vLLM's region has the engine's.
    arguments = case.arguments(folder, f"kvplan-{uuid.uuid4()}", str(tmp_path / "tier"))
    return processes.serve(arguments, [case.work], tmp_path, case, likely)


@pytest.fixture
def served(model_folder, tmp_path, nothing_left):
    """Run a case."""
    return lambda case: serve_case(case, tmp_path, model_folder)


@pytest.fixture(scope="session")
def plain_on_gpu(tmp_path_factory):
    """Answers without offloading of a configuration on the GPU, from an engine that holds all requests."""

    def answers(configuration: Configuration):
        case = configuration.put_into(Case("without offloading"))
        others = [other.work for other in OTHERS] if configuration == USUAL_CONFIGURATION else []
        folder = shared_folder(tmp_path_factory) / configuration.name
        works = dict.fromkeys([case.work, *(configuration.put_into(Case("", work=work)).work for work in others)])
        return plain_answers(folder, case, list(works), LIKELY)

    return answers


@pytest.fixture
def served_on_gpu(tmp_path, nothing_left):
    """Run a case on the GPU."""
    return lambda case: serve_case(case, tmp_path, "", LIKELY)


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

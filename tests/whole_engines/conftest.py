"""A model and the tokens of an engine without offloading; elsewhere than in `make test-engines`, all is skipped."""

from __future__ import annotations

import fcntl
import json
import os
import sys

import pytest

from kvplan.engines.vllm.releases import VERSIONS
from tests.whole_engines import model, processes
from tests.whole_engines.cases import Case
from tests.whole_engines.install import RELEASES, installed
from tests.whole_engines.work import BLOCK, WORKS

COLUMNS = ("tokens", "stored, MB", "loaded, MB", "hits of the host", "preemptions", "failures")
SUMMARY = "row of the summary"
INSTALLED = installed()
VERSION = {f"{version.release}+cpu": version for version in VERSIONS}.get(INSTALLED)
rows: dict[str, tuple[str, ...]] = {}


def missing(item) -> str:
    """Why a test does not run here, or ""."""
    if VERSION is None:
        return f"vLLM is {INSTALLED}, not {RELEASES[0]}+cpu; `make test-engines` makes an environment"
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    lacks = VERSION.lacks if isinstance(case, Case) else ()
    return "".join(f"vLLM {VERSION.release} has no interface for {key}" for key in lacks if key in case.extra)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("engines") and (why := missing(item)):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def vllm_version():
    """The row of this vLLM in the table of versions."""
    return VERSION


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all workers of pytest-xdist share, and that one of them has filled."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "answer.json").exists():
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
        arguments = case.arguments(model_folder, f"kvplan-{tmp_path.name}", str(tmp_path / "tier"))
        return processes.serve(arguments, [case.work], tmp_path, case)

    return run


@pytest.fixture
def note(request):
    """Add a row to the summary of the run."""
    return lambda *cells: request.node.user_properties.append((SUMMARY, cells))


def pytest_runtest_logreport(report):
    rows.update({report.nodeid.partition("[")[2][:-1]: cells for what, cells in report.user_properties
                 if what == SUMMARY and report.when == "call"})  # fmt: skip


def pytest_terminal_summary(terminalreporter):
    if not rows:
        return
    terminalreporter.write_line(f"vLLM {INSTALLED}, Python {sys.version.split()[0]}, blocks of {BLOCK} tokens")
    lines = [("case", *COLUMNS), *((name, *rows[name]) for name in sorted(rows))]
    widths = [max(len(line[k]) for line in lines) for k in range(len(COLUMNS) + 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())

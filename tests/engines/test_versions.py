"""Adapters say which versions they were held against, and check the one that runs."""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvplan import KVPlanError
from kvplan.cli.demo_run import engine as demo_engine
from kvplan.engines import versions
from kvplan.engines.versions import ENGINES, LMCACHE, NIXL, SGLANG, TRANSFORMERS, VLLM, check, release
from tests.commands import ROOT

PAGE = (ROOT / "docs" / "reference" / "engines.md").read_text(encoding="utf-8")


@pytest.fixture
def installed(monkeypatch):
    """A function that makes the check see a version of every package."""
    monkeypatch.setattr(versions, "_warned", set())

    def see(running):
        monkeypatch.setattr(versions, "version", lambda package: running)

    return see


@pytest.mark.parametrize("held", ENGINES, ids=lambda held: held.name)
def test_held_versions_are_accepted_in_silence(installed, caplog, held):
    for running in held.versions:
        installed(running)
        check(held)
        assert held.judged(f"{running}+cu128") == ("held", "")
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_later_version_is_warned_of_once(installed, caplog):
    installed("1.6.0")
    for _ in range(3):
        check(NIXL)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "kvplan.engines"
    assert record.getMessage() == (
        "NIXL 1.6.0: kvplan's adapter was held against NIXL 1.5.1, and its members may differ"
    )


@pytest.mark.parametrize(("held", "running", "verdict"), [
    (VLLM, "0.33.7", "held"), (VLLM, "0.34.0", "refused"), (VLLM, "dev", "refused"), (SGLANG, "0.5.24", "unknown"),
    (SGLANG, "0.5.23.post1", "held"), (TRANSFORMERS, "5.17.0", "refused"), (TRANSFORMERS, "4.57.1", "refused"),
    (TRANSFORMERS, "5.20.0", "unknown"), (TRANSFORMERS, "5.24.0.dev0", "unknown"),
])  # fmt: skip
def test_verdicts(held, running, verdict):
    found, why = held.judged(running)
    assert found == verdict
    assert (running in why) == (verdict != "held")


def test_a_version_that_is_known_to_differ_is_refused_with_the_one_to_install(installed):
    installed("5.17.0")
    with pytest.raises(KVPlanError, match=r"transformers 5\.17\.0 differs: .*: install transformers==5\.23\.0"):
        check(TRANSFORMERS)


def test_without_the_package_there_is_nothing_to_check():
    check(versions.Held("nothing", "kvplan-no-such-package", ("1.0",), 2, "9.0", "it differs"))


def test_adapters_check_at_their_first_use(installed, monkeypatch):
    from kvplan.engines import lmcache
    from kvplan.engines.sglang import attach

    def refuse(held):
        raise KVPlanError(f"checked {held.name}")

    monkeypatch.setattr(versions, "check", refuse)
    with pytest.raises(KVPlanError, match="checked SGLang"):
        attach(SimpleNamespace())
    with pytest.raises(KVPlanError, match="checked LMCache"):
        lmcache.connector_for(None, None, serving="VLLM")


def test_the_adapter_of_transformers_checks_when_it_is_imported():
    code = (
        "from kvplan.engines import versions\n"
        "seen = []\n"
        "versions.check = seen.append\n"
        "import kvplan.engines.transformers, kvplan.engines.lmcache, kvplan.engines.sglang.plugin\n"
        "print(*(held.package for held in seen))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.stdout.split() == ["transformers"]  # plugins of the others are loaded where nobody uses them


def test_what_adapters_say_is_in_the_table():
    for name, held in (("vllm", VLLM), ("sglang", SGLANG), ("lmcache", LMCACHE)):
        assert held.written_for == importlib.import_module(f"kvplan.engines.{name}").WRITTEN_FOR
    assert TRANSFORMERS.written_for == demo_engine.WRITTEN_FOR


def refused(held):
    return "all others" if held.only else f"before {held.least}" if held.least else "-"


def test_the_table_of_the_documentation_is_that_of_the_code():
    table = PAGE[PAGE.index("<!-- versions -->") : PAGE.index("<!-- end of versions -->")]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| `kvplan\.engines\.(\w+)` \|$", table, re.MULTILINE)
    assert rows == [(held.name, ", ".join(held.versions), refused(held), held.package) for held in ENGINES]


def test_the_example_says_which_transformers_it_needs(tmp_path):
    pytest.importorskip("transformers")
    text = (ROOT / "examples" / "transformers_offload.py").read_text(encoding="utf-8")
    assert "It needs transformers 5.21 or newer" in text
    code = (
        "import sys, runpy, transformers\n"
        "transformers.__version__ = '5.17.0'\n"
        "sys.argv = ['transformers_offload.py']\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'transformers_offload.py')!r}, run_name='__main__')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 2
    assert (
        "transformers 5.17.0 is installed; this example needs 5.21 or newer: pip install transformers==5." in run.stderr
    )
    assert "Traceback" not in run.stderr


def test_numbers_of_versions():
    assert release("0.33.0+cpu") == (0, 33, 0)
    assert release("dev") is None

"""The switch: one environment variable puts kvplan's agent in the place of NIXL's, whenever NIXL is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PACKAGE = {  # as NIXL's: the package takes its modules from another package, and repeats their names
    "nixl_cu0/__init__.py": "",
    "nixl_cu0/_api.py": "class nixl_agent:\n    def __init__(self, name, conf=None, every=False):\n"
    "        self.name = name\n\nclass nixl_agent_config: pass\n",
    "nixl/__init__.py": "import sys, nixl_cu0._api as _api\nsys.modules['nixl._api'] = _api\n"
    "from nixl_cu0._api import nixl_agent, nixl_agent_config\n",
    "nixl/_api.py": "raise ImportError('a stub')\n",
}
SEEN = """
import nixl
from nixl._api import nixl_agent, nixl_agent_config
import nixl_cu0._api
from kvplan.engines.nixl import Agent
print(nixl_agent is Agent, nixl.nixl_agent is Agent, nixl_cu0._api.nixl_agent is Agent, nixl_agent("a").name)
"""


@pytest.fixture
def run(tmp_path):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(code, **variables):
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"} | variables
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True, timeout=600
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("before", ["", "import nixl\n", "import nixl._api\n"])
@pytest.mark.parametrize(
    ("switch_on", "wanted"),
    [
        ("from kvplan.engines.nixl import plugin; plugin(); plugin()", "True True True a"),
        ("from kvplan.engines.nixl import install; install(); install()", "True True True a"),
    ],
)
def test_the_class_is_replaced_before_and_after_the_import(run, before, switch_on, wanted):
    assert run(before + switch_on + SEEN, KVPLAN_NIXL="1") == wanted


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_is_replaced(run, value):
    code = "from kvplan.engines.nixl import plugin; plugin()" + SEEN
    assert run(code, KVPLAN_NIXL=value) == "False False False a"


def test_switching_on_does_not_import_nixl(run):
    code = "import sys; from kvplan.engines.nixl import plugin; plugin(); print({'nixl', 'torch'} & set(sys.modules))"
    assert run(code, KVPLAN_NIXL="1") == "set()"


def test_an_agent_of_a_broken_nixl_is_refused_with_the_remedy(run, tmp_path):
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('libucp.so.0 is missing')")
    code = "from kvplan import PathError\nfrom kvplan.engines.nixl import Agent, install\ninstall()\n"
    code += "try: Agent('a')\nexcept PathError as error: print(error)"
    assert run(code) == "this agent needs NIXL: pip install nixl (libucp.so.0 is missing)"


@pytest.mark.parametrize("text", ["", "raise ImportError('a stub')", "class Agent: pass"])
@pytest.mark.parametrize("before", ["", "import nixl\n"])
def test_another_package_of_this_name_is_imported_as_before(run, tmp_path, text, before):
    (tmp_path / "nixl" / "__init__.py").write_text("")
    (tmp_path / "nixl" / "_api.py").write_text(text)
    assert (
        run(before + "from kvplan.engines.nixl import plugin\nplugin()\nimport nixl; print('it is')", KVPLAN_NIXL="1")
        == "it is"
    )

"""The switch: one environment variable puts kvplan's agent in the place of NIXL's, whenever NIXL is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvplan import KVPlanError
from kvplan.engines import after_import
from kvplan.engines.nixl import Agent, own_class, switch

ROOT = Path(__file__).parents[3]
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


@pytest.mark.parametrize(("handled", "wanted"), [(False, 2), (True, 0)])
def test_lines_are_seen_where_the_engine_handles_its_own_only(run, handled, wanted):
    """vLLM handles the lines of its loggers; SGLang handles all."""
    code = "import logging, sys, io; sys.stderr = made = io.StringIO()\n"
    code += "from kvplan.engines.nixl import plugin; plugin(); plugin()\n"
    code += "logging.basicConfig(level=logging.INFO, stream=io.StringIO())\n" if handled else ""
    code += "import nixl; from nixl._api import nixl_agent\nlogging.getLogger('kvplan.engines.nixl').info('seen')\n"
    assert run(code + "print(made.getvalue().count('INFO [kvplan.engines.nixl] '))", KVPLAN_NIXL="1") == str(wanted)


def test_an_agent_of_a_broken_nixl_serves_this_machine(run, tmp_path):
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('libucp.so.0 is missing')")
    code = "from kvplan.engines.nixl import Agent, install\ninstall()\nprint(type(Agent('a')._kvplan.real).__name__)"
    assert run(code) == "StandaloneAgent"


@pytest.mark.parametrize("text", ["", "raise ImportError('a stub')", "class Agent: pass"])
@pytest.mark.parametrize("before", ["", "import nixl\n"])
def test_another_package_of_this_name_is_imported_as_before(run, tmp_path, text, before):
    (tmp_path / "nixl" / "__init__.py").write_text("")
    (tmp_path / "nixl" / "_api.py").write_text(text)
    assert (
        run(before + "from kvplan.engines.nixl import plugin\nplugin()\nimport nixl; print('it is')", KVPLAN_NIXL="1")
        == "it is"
    )


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(switch.VARIABLE, "yes")
    with pytest.raises(KVPlanError, match=r"KVPLAN_NIXL is 'yes'; give '1', or '0' to do nothing"):
        switch.plugin()


def test_the_class_is_replaced_in_this_process(monkeypatch):
    """As above, where the lines are counted."""
    own = type("nixl_agent", (), {"__init__": lambda self, name, *given: setattr(self, "name", name)})
    package, module = ModuleType("nixl"), ModuleType("nixl._api")
    package.nixl_agent = module.nixl_agent = own
    monkeypatch.setattr(own_class, "replaced", [])
    monkeypatch.setattr(switch, "replaced", own_class.replaced)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(switch.log, "handlers", [])
    monkeypatch.setenv(switch.VARIABLE, "1")
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    switch.plugin()
    switch.plugin()
    finder = sys.meta_path[0]
    assert finder.find_spec("numpy", None) is None
    spec = finder.find_spec("nixl", None)
    assert spec is None or hasattr(spec.loader, "exec_module")
    theirs = SimpleNamespace(create_module=lambda spec: None, exec_module=lambda made: None, path="p")
    loader = after_import._Loader(theirs, switch._replace)
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", module)
    assert own_class.agent_class() is own
    assert loader.create_module(None) is None
    assert loader.path == "p"
    loader.exec_module(package)
    switch.install()
    assert package.nixl_agent is module.nixl_agent is Agent
    assert own_class.agent_class() is own
    assert Agent("made").name == "made"
    monkeypatch.setenv(switch.VARIABLE, "0")
    switch.plugin()

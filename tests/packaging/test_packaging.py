"""kvplan imports whole from a wheel, an sdist, an editable install and a bare clone; none needs a package index."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvplan import __version__

ROOT = Path(__file__).parents[2]
DATA = ("kvplan/catalogue/*.toml", "kvplan/cost/profiles/*.json", "kvplan/cost/profiles/wires/*.json")
pytestmark = [pytest.mark.slow, pytest.mark.package]

PROBE = """
import importlib, json, pkgutil
import kvplan, kvplan.backends
backends = sorted(module.name for module in pkgutil.iter_modules(kvplan.backends.__path__))
for name in backends:
    importlib.import_module("kvplan.backends." + name)
print(json.dumps({"file": kvplan.__file__, "version": kvplan.__version__, "backends": backends}))
"""


def run(*command, cwd, **environment):
    """Standard output of a command that must succeed, and that no PYTHONPATH of ours helps."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def probe(cwd, python=sys.executable, **environment):
    """What an interpreter finds of kvplan from another directory; its command line must answer too."""
    version = run(python, "-m", "kvplan", "--version", cwd=cwd, **environment)
    assert __version__ in version
    found = json.loads(run(python, "-c", PROBE, cwd=cwd, **environment))
    assert found["version"] == __version__
    assert found["backends"] == backends()
    return Path(found["file"])


def tree_files():
    """Files of the tree that git knows or would take, as a clone has them."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    names = sorted({Path(name) for name in listed.split("\0") if name})
    return [name for name in names if (ROOT / name).is_symlink() or (ROOT / name).is_file()]


def backends():
    return sorted(name.stem for name in tree_files() if name.parent == Path("backends") and is_module(name))


def is_module(name):
    return name.suffix == ".py" and name.stem != "__init__"


def packaged():
    """Files of the package as a wheel holds them."""
    kept = {
        name for name in tree_files() if name.suffix == ".py" or name.name == "py.typed" or any(map(name.match, DATA))
    }
    inside = {str(name) for name in kept if name.parts[0] == "kvplan"}
    return inside | {f"kvplan/{name}" for name in kept if name.parts[0] == "backends"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the tree, the committed link kept a link."""
    target = tmp_path_factory.mktemp("clone") / "kvplan"
    for name in tree_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    assert (target / "kvplan" / "backends").readlink() == Path("../backends")
    return target


@pytest.fixture(scope="module")
def wheel_and_sdist(clone, tmp_path_factory):
    """Both built from the tree itself."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", out, clone, cwd=out)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def wheel_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_no_module_bears_the_name_of_a_public_function():
    """Importing kvplan.allocate, were it a module, would put the module in the place of the function."""
    import kvplan

    assert not {module.name for module in pkgutil.iter_modules(kvplan.__path__)} & set(kvplan.__all__)


def test_a_bare_clone_imports(clone, tmp_path):
    assert probe(tmp_path, PYTHONPATH=str(clone)) == clone / "kvplan" / "__init__.py"


def test_the_wheel_holds_the_package_and_nothing_else(wheel_and_sdist):
    wheel, _ = wheel_and_sdist
    names = wheel_names(wheel)
    info = f"kvplan-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == packaged()
    assert {"kvplan/py.typed", "kvplan/backends/flash_attention.py"} <= names
    assert {info + "METADATA", info + "entry_points.txt", info + "licenses/LICENSE"} <= names


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_tree(wheel_and_sdist, tmp_path):
    wheel, sdist = wheel_and_sdist
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, unpacked, cwd=tmp_path)
    assert wheel_names(next(tmp_path.glob("*.whl"))) == wheel_names(wheel)


def test_an_installed_wheel_imports(wheel_and_sdist, tmp_path):
    wheel, _ = wheel_and_sdist
    target = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel,
        cwd=tmp_path)  # fmt: skip
    assert probe(tmp_path, PYTHONPATH=str(target)) == target / "kvplan" / "__init__.py"


@pytest.fixture(scope="module")
def editable(clone, tmp_path_factory):
    """An environment of its own, into which `pip install -e` has put the clone."""
    folder = tmp_path_factory.mktemp("editable")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    own = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    # The packages of this interpreter, itself perhaps a virtual environment: dependencies, setuptools, pip.
    (own / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
        "--editable", clone, cwd=folder)  # fmt: skip
    return python


def test_an_editable_install_imports(clone, editable, tmp_path):
    assert probe(tmp_path, editable) == clone / "kvplan" / "__init__.py"
    assert __version__ in run(editable.with_name("kvplan"), "--version", cwd=tmp_path)


def test_an_editable_install_is_not_shadowed_by_its_clone(clone, editable):
    """From the folder above, the clone is a folder named kvplan without an `__init__.py`, as a namespace package is."""
    assert clone.name == "kvplan"
    assert probe(clone.parent, editable) == clone / "kvplan" / "__init__.py"

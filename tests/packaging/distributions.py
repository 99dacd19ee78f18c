"""``python -m tests.packaging.distributions dist/*``: install each file into a fresh environment and try it there.

Dependencies come from the package index. `make dist` runs this; tests build and install without an index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIGHT = """
import sys
import kvplan

loaded = {"torch", "triton", "numba", "cuda"} & set(sys.modules)
assert not loaded, loaded
assert "site-packages" in kvplan.__file__, kvplan.__file__
"""


def example() -> str:
    """The README's example."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[0]


def attempt(distribution: Path) -> None:
    """Install a wheel or a source distribution, and run from another folder what a new user runs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        binaries = Path(folder, "venv", "bin")
        elsewhere = Path(folder, "elsewhere")
        elsewhere.mkdir()
        for command in (
            [binaries / "python", "-m", "pip", "install", "--quiet", distribution],
            [binaries / "python", "-c", LIGHT],
            [binaries / "python", "-c", example()],
            [binaries / "kvplan", "--help"],
        ):
            subprocess.run(
                list(map(str, command)), cwd=elsewhere, env=environment, check=True, stdout=subprocess.DEVNULL
            )
    sys.stdout.write(f"{distribution.name}: installs, imports, runs the README's example\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        attempt(Path(name).resolve())

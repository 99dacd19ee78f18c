"""Put SGLang into an environment without CUDA: its Python runs ``python -m tests.whole_sglang.install``.

SGLang's own requirements name packages of CUDA. Only the standard library is imported.
"""

from __future__ import annotations

from tests.whole_engines.install import TORCH, install

SGLANG = "sglang==0.5.23"
PLAIN = ("torchvision==0.29.1",)  # built for CUDA: only its Python code is used; see stand_ins
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


def main() -> None:
    """Install."""
    install(f"torch=={TORCH}", *NEEDED)
    install("--no-deps", SGLANG, *PLAIN)


if __name__ == "__main__":
    main()

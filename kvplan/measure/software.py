"""The doctor's checks of the packages that kvplan uses: torch, Triton and numba."""

from __future__ import annotations

from kvplan.measure.facts import Facts
from kvplan.measure.finding import Finding, State, cuda_version

FIRST_TRITON = (3, 3)


def torch(facts: Facts) -> Finding:
    """Check that torch is installed, and built for a CUDA version that the driver supports."""
    if "torch" not in facts.packages:
        what = f"{facts.missing.get('torch', 'not installed')}; needed for streams, events and tensors of a GPU"
        return Finding("torch", "warning", what, "pip install torch triton")
    version = facts.packages["torch"] or "of unknown version"
    if facts.torch_cuda is None:
        why = facts.missing.get("torch_cuda", "its version.py does not tell")
        return Finding("torch", "unknown", f"{version}; for which CUDA? {why}")
    if not facts.torch_cuda:
        if facts.cuda is None:
            return Finding("torch", "ok", f"{version}, built without CUDA")
        advice = "install a build for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return Finding("torch", "problem", f"{version}, built without CUDA: it makes no tensors on the GPU", advice)
    built = f"{version}, built for CUDA {facts.torch_cuda}"
    if facts.cuda is None:
        return Finding("torch", "ok", f"{built}; there is no driver for it")
    if int(facts.torch_cuda.partition(".")[0] or 0) > facts.cuda // 1000:
        advice = f"update the NVIDIA driver, or install a torch for CUDA {facts.cuda // 1000}"
        return Finding("torch", "problem", f"{built}; the driver serves {cuda_version(facts.cuda)}", advice)
    return Finding("torch", "ok", built)


def triton(facts: Facts) -> Finding:
    """Check that Triton 3.3 or newer is installed."""
    advice = 'pip install "triton>=3.3"'
    need: State = "warning" if facts.cuda is None else "problem"
    if "triton" not in facts.packages:
        what = f"{facts.missing.get('triton', 'not installed')}: no paths kernel and staged"
        return Finding("Triton", need, what, advice)
    version = facts.packages["triton"]
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        return Finding("Triton", "unknown", f"{version or 'of unknown version'}; 3.3 is needed", advice)
    if (int(major), int(minor)) < FIRST_TRITON:
        return Finding("Triton", need, f"{version}; 3.3 is needed by the paths kernel and staged", advice)
    return Finding("Triton", "ok", version)


def numba(facts: Facts) -> Finding:
    """Check that numba is installed, and has a folder where it may write."""
    if "numba" not in facts.packages:
        what = f"{facts.missing.get('numba', 'not installed')}; plans are made by loops that it compiles"
        return Finding("numba", "problem", what, 'pip install "numba>=0.60"')
    version = facts.packages["numba"] or "of unknown version"
    if facts.numba_cache is None:
        return Finding("numba", "unknown", f"{version}; where it keeps loops: {facts.missing.get('numba_cache', '?')}")
    if not facts.numba_cache:
        what = f"{version}; no folder to keep loops in: each process compiles them anew, for seconds"
        return Finding("numba", "warning", what, "export NUMBA_CACHE_DIR=/a/folder/that/may/be/written")
    return Finding("numba", "ok", f"{version}, keeps loops in {facts.numba_cache}")

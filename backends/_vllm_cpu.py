"""Packing of K and V inside one (block, head) by vLLM's CPU kernels. Shapes and strides do not show it.

Source: vLLM 0.33.0, ``csrc/cpu/cpu_attn_*.hpp`` (``reshape_and_cache``), ``csrc/cpu/cpu_attn_fp8.hpp`` and
``v1/attention/backends/cpu_attn.py`` (``_get_attn_isa``); 0.30.0, 0.26.0 and 0.20.2, the same files.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from kvplan.errors import LayoutError


class Packing(NamedTuple):
    """One way to store the tokens and the content of a (block, head).

    Attributes:
        k, v: axes of K and of V in the order of memory, outermost first.
        k_sizes, v_sizes: extents of their inner factors.
    """

    k: str
    v: str
    k_sizes: dict[str, int]
    v_sizes: dict[str, int]

    def sides(self, tokens: int) -> tuple[tuple[str, dict[str, int]], tuple[str, dict[str, int]]]:
        """Return the axes of K and of V, with the extents that shapes do not show; ``tokens`` is tokens per block."""
        return (self.k, _extents(self.k, self.k_sizes, tokens)), (self.v, _extents(self.v, self.v_sizes, tokens))


def _extents(axes: str, sizes: dict[str, int], tokens: int) -> dict[str, int]:
    if "token" not in axes:
        return {}
    return sizes | {"token.0": tokens // sizes["token.1"]} if sizes else {"token": tokens}


def _grouped(k_tokens: int, k_dims: int, v_tokens: int, v_dims: int) -> Packing:
    """Return a packing of K in groups of tokens, and V in groups of content."""
    return Packing("token.0 dim.0 token.1 dim.1", "dim.0 token.0 dim.1 token.1",
                   {"token.1": k_tokens, "dim.1": k_dims}, {"token.1": v_tokens, "dim.1": v_dims})  # fmt: skip


_VECTOR = Packing("dim token", "token dim", {}, {})  # K is transposed, V is plain rows
_AMX = _grouped(16, 2, 2, 16)  # elements of 2 bytes, and fp8 as well
_BFMMLA = _grouped(8, 4, 4, 8)
_BFMMLA_TO_0_30 = _grouped(8, 4, 4, 2)
BFMMLA_CHANGED = (0, 31)  # from here on, V is in groups of 8 dims; before, of 2

OPAQUE = Packing("dim", "dim", {}, {})

# vLLM's own names, and two for the kernels behind "neon": the build of vLLM decides which of them runs.
ISAS = ("vec", "vec16", "amx", "neon", "neon_fmla", "neon_bfmmla", "rvv", "vxe", "vsx")


def packing_of(
    isa: str | None,
    version: tuple[int, int] | None,
    dtype: Any,
    *,
    itemsize: int,
    tokens: int,
    dim: int,
    planes: bool = False,
) -> Packing:
    """Return the packing of a cache; :data:`OPAQUE` if the instruction set is not known.

    Args:
        isa: one of :data:`ISAS`; None takes that of vLLM, if this process has loaded it.
        version: version of vLLM, if it is known.
        dtype: type of the cache.
        itemsize: bytes per element.
        tokens: token slots per block of the kernel.
        dim: elements of K, or of V, per (token, head).
        planes: whether K and V are in separate planes, as they are to 0.22.

    Raises:
        LayoutError: the instruction set is unknown, groups do not divide the block, or the version is missing.

    >>> packing_of("vec", None, "float16", itemsize=2, tokens=32, dim=64).k
    'dim token'
    >>> packing_of("amx", None, "bfloat16", itemsize=2, tokens=32, dim=64).v_sizes
    {'token.1': 2, 'dim.1': 16}
    """
    if isa is None:
        isa = _told_by_vllm(dtype, itemsize, tokens, dim)
    elif isa not in ISAS:
        raise LayoutError(f"isa is {str(isa)[:40]!r}; it is one of {', '.join(ISAS)}, or left out: blocks are then "
                          "opaque and move whole")  # fmt: skip
    if isa == "neon":
        isa = None if str(dtype).endswith("bfloat16") else "neon_fmla"
    if isa is None:
        return OPAQUE
    packing = _VECTOR
    widths: tuple[int, ...] = (1, 2, 4)
    if isa == "amx":
        packing, widths = _AMX, (1, 2)
    elif isa == "neon_bfmmla":
        if version is None and not planes:
            raise LayoutError("isa='neon_bfmmla' needs version=, of vLLM: V is packed in another way from 0.31 on")
        older = version is None or version < BFMMLA_CHANGED
        packing, widths = _BFMMLA_TO_0_30 if older else _BFMMLA, (2,)
    if itemsize not in widths:
        raise LayoutError(
            f"the cache has elements of {itemsize} bytes; isa={isa!r} has {' or '.join(map(str, widths))}"
        )
    for sizes in (packing.k_sizes, packing.v_sizes):
        group_tokens, group_dims = sizes.get("token.1", 1), sizes.get("dim.1", 1)
        if tokens % group_tokens or dim % group_dims:
            raise LayoutError(
                f"isa={isa!r} packs groups of {group_tokens} tokens and {group_dims} dims; the cache has blocks of "
                f"{tokens} token slots and heads of {dim} dims"
            )
    return packing


def _told_by_vllm(dtype: Any, itemsize: int, tokens: int, dim: int) -> str | None:
    """Return the kernels that vLLM uses on this machine; None if vLLM is not loaded, or the answer is not certain.

    The model's type decides, too. A cache of single bytes (fp8) does not show that type.
    """
    choose = getattr(sys.modules.get("vllm.v1.attention.backends.cpu_attn"), "_get_attn_isa", None)
    if choose is None or itemsize == 1 or not str(dtype).startswith("torch."):
        return None
    isa = choose(dtype, tokens, dim)
    return isa if isa in ISAS else None


def version_of(version: str | None) -> tuple[int, int] | None:
    """Return the major and minor number of vLLM's version; by default of the vLLM that this process has loaded.

    >>> version_of("0.26.0"), version_of("0.31.0rc1+cpu")
    ((0, 26), (0, 31))
    """
    given = getattr(sys.modules.get("vllm"), "__version__", None) if version is None else version
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", given) if isinstance(given, str) else None
    if numbers is None and version is not None:
        raise LayoutError(f"version is {str(version)[:40]!r}; give vLLM's as text, such as '0.26.0'")
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))

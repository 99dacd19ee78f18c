"""SGLang's own staging kernels, from the files of its wheel: nothing else of SGLang is imported.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py`` and ``kernels/ops/kvcache/pd_dcp_gather.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

# Modules by the file that is loaded, in order: each needs those before it.
FILES = {
    "sglang.kernels.ops.memory.ptr_table": "sglang/kernels/ops/memory/ptr_table.py",
    "sglang.srt.disaggregation.common.staging_buffer": "sglang/srt/disaggregation/common/staging_buffer.py",
    "sglang.kernels.ops.kvcache.pd_dcp_gather": "sglang/kernels/ops/kvcache/pd_dcp_gather.py",
    "sglang.srt.disaggregation.common.dcp_pack": "sglang/srt/disaggregation/common/dcp_pack.py",
}


class Staging(NamedTuple):
    """The modules of SGLang's staging.

    Attributes:
        version: of SGLang, as its files say; empty if they do not.
        buffer: ``staging_buffer``, with the gather and the scatter of head slices.
        rows: ``pd_dcp_gather``, with the gather of latent rows.
        pack: ``dcp_pack``, which calls it.
    """

    version: str
    buffer: ModuleType
    rows: ModuleType
    pack: ModuleType


def load(root: Path) -> Staging:
    """Load the files of SGLang's staging.

    Args:
        root: folder with the folder ``sglang``: an unzipped wheel, or only the files of :data:`FILES`.

    Raises:
        OSError: a file is missing.
        ImportError: a file imports what is not installed.
    """
    made: dict[str, ModuleType] = {
        "sglang.srt.environ": _module("environ", envs=SimpleNamespace(SGLANG_STAGING_USE_TORCH=_Off())),
        "sglang.srt.utils": _module("utils", create_device_stream=_stream, device_stream_context=_within),
    }
    for name, path in FILES.items():
        spec = spec_from_file_location(f"{__name__}.{Path(path).stem}", root / path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{root / path} is no Python file")
        made[name] = sys.modules[spec.name] = module_from_spec(spec)
        with _standing_in(made):
            spec.loader.exec_module(made[name])
    found = root / "sglang" / "_version.py"
    text = found.read_text() if found.exists() else ""
    version = next((line.split("'")[1] for line in text.splitlines() if line.startswith("__version__ = ")), "")
    _, buffer, rows, pack = (made[name] for name in FILES)
    return Staging(version, buffer, rows, pack)


@contextmanager
def _standing_in(made: dict[str, ModuleType]) -> Iterator[None]:
    """Let modules be found by these names within a ``with``. Others that are imported meanwhile stay."""
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Off:
    def get(self) -> bool:
        return False


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def _stream(device: Any) -> Any:
    make: Any = torch.cuda.Stream
    return _NoStream() if torch.device(device).type == "cpu" else make(device)


def _within(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if isinstance(stream, _NoStream) else torch.cuda.stream(stream)


class _NoStream:
    """In the place of a stream, on the CPU."""

    def wait_stream(self, other: Any) -> None:
        del other

    def synchronize(self) -> None:
        pass


class _NoModule:
    """In the place of ``torch.cuda``, on the CPU."""

    def set_device(self, index: Any) -> None:
        del index

    def current_stream(self, device: Any) -> _NoStream:
        del device
        return _NoStream()


class Ring:
    """In the place of SGLang's ``StagingBuffer``, over memory that is given; SGLang's own is for GPUs only.

    Args:
        buffer: uint8, of any device.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.device = buffer.device
        self.device_module: Any = _NoModule() if buffer.device.type == "cpu" else torch.get_device_module(buffer.device)
        self._stream = _stream(buffer.device)

    def producer_stream(self) -> Any:
        """The stream that the gather waits for."""
        return self.device_module.current_stream(self.device)

    def get_gather_stream(self) -> Any:
        """The stream of the gather."""
        return self._stream

    def get_ptr(self) -> int:
        """The address."""
        return self.buffer.data_ptr()

    def get_size(self) -> int:
        """The bytes."""
        return self.buffer.numel()

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes fit."""
        return nbytes <= self.get_size()


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel, to be made again."""

    kernel: Any
    grid: Any
    given: Sequence[Any]
    named: dict[str, Any]

    def __call__(self) -> None:
        """Launch."""
        self.kernel[self.grid](*self.given, **self.named)


@contextmanager
def noted(module: ModuleType, kernel: str) -> Iterator[list[Launch]]:
    """Note the launches of a module's kernel within a ``with``; they are made, too."""
    launches: list[Launch] = []
    own = getattr(module, kernel)

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **named: Any) -> None:
                launches.append(Launch(own, grid, given, named))
                launches[-1]()

            return launch

    with mock.patch.object(module, kernel, Noting()):
        yield launches

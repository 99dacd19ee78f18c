"""``kvplan backends``: list the engines whose tensors kvplan can describe."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from kvplan.cli.answer import Answer, Part, Table
from kvplan.cli.screen import Tell


class Adapter(Part):
    """A module of kvplan.backends.

    Attributes:
        name: of the module.
        summary: the first line of its docstring; null if it cannot be imported.
        signature: of its describe; null if it cannot be imported.
        error: why it cannot be imported; null if it can.
    """

    name: str
    summary: str | None
    signature: str | None
    error: str | None

    def __str__(self) -> str:
        return f"cannot be imported: {self.error}" if self.error else f"{self.summary}\n{self.signature}"


class BackendsAnswer(Answer):
    """The engines whose tensors kvplan can describe.

    Attributes:
        backends: in order of their names.
    """

    schema = "backends/1"
    backends: tuple[Adapter, ...]

    def blocks(self) -> Iterable[Any]:
        """Return a row for each adapter."""
        return [Table([(one.name, str(one)) for one in self.backends] or [("none", "no adapter is installed")])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan backends\n  kvplan backends --json"


def run(args: argparse.Namespace, tell: Tell) -> BackendsAnswer:
    """Return every adapter; a finding if one cannot be imported."""
    modules = pkgutil.iter_modules(import_module("kvplan.backends").__path__)
    adapters = tuple(adapter(name) for name in sorted(module.name for module in modules) if name[0] != "_")
    return BackendsAnswer(adapters, status=int(any(one.error for one in adapters)))


def adapter(name: str) -> Adapter:
    """Return the summary and signature of one adapter, or the error of its import."""
    try:
        module = import_module(f"kvplan.backends.{name}")
        signature = inspect.signature(module.describe)
    except Exception as error:  # noqa: BLE001  # one broken adapter does not hide the others
        return Adapter(name, None, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
    names = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    return Adapter(name, summary, f"describe{inspect.Signature(names)}", None)

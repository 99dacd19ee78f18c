"""``kvplan backends``: list the engines whose tensors kvplan can describe."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
from importlib import import_module
from typing import Any

from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, show

EXAMPLES = """examples:
  kvplan backends
  kvplan backends --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.backends)")


def run(args: argparse.Namespace) -> int:
    """Print every adapter. Return 1 if an adapter cannot be imported."""
    adapters = [adapter_facts(name) for name in adapter_names()]
    if args.json:
        print_json("backends", {"backends": adapters})
    else:
        rows = [(adapter["name"], _text(adapter)) for adapter in adapters]
        show(fact_table(rows or [("none", "no adapter is installed")]))
    return int(any(adapter["error"] for adapter in adapters))


def adapter_names() -> list[str]:
    """Return the names of the adapter modules, in order."""
    package = import_module("kvplan.backends")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_")


def adapter_facts(name: str) -> dict[str, Any]:
    """Return the summary and signature of one adapter, or the error of its import."""
    facts: dict[str, Any] = {"name": name, "summary": None, "signature": None, "error": None}
    try:
        module = import_module(f"kvplan.backends.{name}")
        signature = f"describe{_names_only(inspect.signature(module.describe))}"
    except Exception as error:  # noqa: BLE001  # one broken adapter does not hide the others
        return facts | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return facts | {"summary": (module.__doc__ or "").strip().partition("\n")[0], "signature": signature}


def _names_only(signature: inspect.Signature) -> inspect.Signature:
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return inspect.Signature(parameters)


def _text(adapter: dict[str, Any]) -> str:
    if adapter["error"]:
        return f"cannot be imported: {adapter['error']}"
    return f"{adapter['summary']}\n{adapter['signature']}"

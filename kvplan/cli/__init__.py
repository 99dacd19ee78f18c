"""The command line: one file a command, each with ``add_arguments(parser)`` and ``run(args) -> exit code``."""

from __future__ import annotations

from kvplan.cli.main import main

__all__ = ["main"]

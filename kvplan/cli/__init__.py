"""The command line: each command has ``add_NAME(parser)`` and ``run_NAME(args, tell)``, which returns an answer.

``answer`` makes tables, JSON and schema of an answer's fields; ``arguments`` reads arguments, ``screen`` prints.
"""

from __future__ import annotations

from kvplan.cli.main import main

__all__ = ["main"]

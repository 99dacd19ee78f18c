"""The command line: a file for each command, with ``add_arguments(parser)`` and ``run(args, tell)``: an answer.

``answer`` makes tables, JSON and schema of an answer's fields; ``arguments`` reads arguments, ``screen`` prints.
"""

from __future__ import annotations

from kvplan.cli.main import main

__all__ = ["main"]

"""The command line: one file for each command, with ``add_arguments(parser)`` and ``run(args) -> exit code``.

Folders for all commands: ``arguments`` reads arguments, ``answers`` makes facts and rows, ``screen`` prints.
``demo_run`` is the demo.
"""

from __future__ import annotations

from kvplan.cli.main import main

__all__ = ["main"]

"""The page of every command's own help, which the site's build adds."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

from kvplan.cli.main import COMMANDS
from kvplan.cli.main import main as main_of_kvplan


def options() -> str:
    """Return the page of every command's own help."""
    lines = ["# Options of every command", "", "The text is each command's own help: `kvplan COMMAND --help`.", ""]
    for name in COMMANDS:
        shown = StringIO()
        with redirect_stdout(shown), patch.dict(os.environ, {"COLUMNS": "100"}):
            main_of_kvplan([name, "--help"])
        lines += [f"## kvplan {name}", "", "```text", shown.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)

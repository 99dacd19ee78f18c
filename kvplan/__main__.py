"""``python -m kvplan``: the same as ``kvplan``."""

from __future__ import annotations

import sys

from kvplan.cli import main

if __name__ == "__main__":
    sys.exit(main())

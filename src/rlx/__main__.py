"""`python -m rlx` is the `rlx` command."""

from __future__ import annotations

import sys

from rlx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

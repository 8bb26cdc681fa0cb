"""`python -m meshpar`: the `meshpar` command."""

from __future__ import annotations

import sys

from meshpar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m fp8console``."""

from __future__ import annotations

import sys

from fp8console.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

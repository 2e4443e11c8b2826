"""A script that never imports torch."""

import sys

assert "torch" not in sys.modules
print("no torch here")

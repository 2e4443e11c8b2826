"""Gives this process a GPU library that is none, as its environment describes it."""

import os
import pathlib
import sys

if "FAKE_GPU_LIBRARY" in os.environ:
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
    import fake_library

    fake_library.hook_as_described()

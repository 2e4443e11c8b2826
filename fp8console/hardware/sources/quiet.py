"""What libraries print, kept out of the way: also on the file descriptors, for they print from C as well."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator

MOST = 2000  # bytes kept of what was printed


class Printed:
    """``text`` is what was printed inside the block, once it is over."""

    text = ""


@contextlib.contextmanager
def quiet() -> Iterator[Printed]:
    """What Python or C code prints goes into ``text`` until the end of the block."""
    printed = Printed()
    kept = [os.dup(1), os.dup(2)]
    python = io.StringIO()
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with contextlib.redirect_stdout(python), contextlib.redirect_stderr(python):
                yield printed
        finally:
            for fd, own in zip((1, 2), kept):
                os.dup2(own, fd)
                os.close(own)
            file.seek(0)
            printed.text = (file.read(MOST).decode(errors="replace") + python.getvalue()[:MOST]).strip()

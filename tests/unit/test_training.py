"""The error that a failed training is shown with."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8console.supervisor.training import describe_end, last_error

PLAIN = """step 10 loss 2.0
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
RuntimeError: the loss went to the moon
"""
CHAINED = (
    PLAIN + "\nDuring handling of the above exception, another exception occurred:\n\n" + PLAIN.replace("moon", "sun")
)
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory
E1130 failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "run.py", line 9, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============
train.py FAILED
"""


@pytest.mark.parametrize(
    "text, error",
    [
        (PLAIN, "RuntimeError: the loss went to the moon"),
        (PLAIN + "atexit ran\n", "RuntimeError: the loss went to the moon"),
        (CHAINED, "RuntimeError: the loss went to the sun"),
        (TORCHRUN, "torch.cuda.OutOfMemoryError: CUDA out of memory"),
        ("Traceback (most recent call last):\n  File 'x'\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("all went well: ValueError: not really\n", None),
        ("", None),
    ],
)
def test_the_line_that_says_why(text: str, error: str | None, tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text(text)
    assert last_error(tmp_path) == error


def test_no_output_at_all(tmp_path: Path) -> None:
    assert last_error(tmp_path) is None
    assert describe_end(137, "SIGKILL")["text"] == "the training was ended by SIGKILL (exit status 137)"

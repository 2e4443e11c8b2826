"""What the screen shows, as one frozen record, and the thread that reads it from the run directory.

The thread only answers requests: while it reads, further requests collapse into one, so a slow file system makes the
screen old (and it says how old) but never piles anything up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8console.runs.reader import StepRecords
    from fp8console.runs.run import Run
    from fp8console.runs.status import RunStatus
    from fp8console.runs.utilisation import History, Utilisation

#: Kinds that are the bookkeeping of others and only fill a list.
HIDDEN = ("asked", "settings", "scaler")
#: Commands of which the probe's own events say more than the answer does.
SPEAKING = ("pause", "resume", "step", "checkpoint", "rollback")
#: A file that the probe leaves in the run directory when the script imports torch.
TORCH_MARK = "torch"
EVENTS_KEPT = 400
#: Lines of output in a snapshot: enough for a panel, and more while a screen shows nothing else.
OUTPUT_LINES = 60
OUTPUT_LINES_MOST = 2000


@dataclass(frozen=True)
class Snapshot:
    """One look at a run. ``time`` in seconds since the epoch; events oldest first."""

    time: float
    status: RunStatus
    steps: StepRecords
    count: int
    events: tuple[dict[str, Any], ...] = ()
    incidents: tuple[dict[str, Any], ...] = ()
    rollbacks: tuple[tuple[int, int], ...] = ()
    output: tuple[str, ...] = ()
    output_limit: int = OUTPUT_LINES
    socket: str | None = None
    torch_imported: bool = False
    utilisation: Utilisation | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of this run goes on."""
        return self.status.state in ("finished", "failed", "lost")

    @property
    def alerts(self) -> int:
        """Incidents that call for a look."""
        return sum(is_alert(event) for event in self.incidents)


def is_shown(event: dict[str, Any]) -> bool:
    """Whether an event belongs on the screen: no bookkeeping, and no answer that an event of the training tells."""
    if event["kind"] != "applied":
        return event["kind"] not in HIDDEN
    command = event.get("command")
    return not (isinstance(command, dict) and command.get("name") in SPEAKING)


def is_alert(event: dict[str, Any]) -> bool:
    """Whether an event calls for a look: not finite, clipped too often, hardware in trouble, ours broken,
    a restore point that is not whole."""
    kind = event["kind"]
    if kind in ("nonfinite", "fault", "clipping", "hardware"):
        return True
    if kind == "verified":
        return event.get("ok") is False
    if kind == "rolled_back":
        return event.get("digests_equal") is False
    return kind == "ended" and event.get("exit_status") not in (0, None)


def is_incident(event: dict[str, Any]) -> bool:
    """Whether an event belongs into the list of alerts."""
    return event["kind"] in ("nonfinite", "skipped", "rolled_back", "fault") or is_alert(event)


class Reader(threading.Thread):
    """Reads a run directory when asked to, and hands each snapshot, or the error, to ``deliver``."""

    def __init__(
        self, run_dir: Path, deliver: Callable[[Snapshot | Exception], None], clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(name="run-reader", daemon=True)
        self._clock = clock
        self._run_dir = run_dir
        self._deliver = deliver
        self._wanted = threading.Event()
        #: Lines of output to put into the next snapshots.
        self.output_lines = OUTPUT_LINES
        #: Seconds a column (None: the whole run) and columns of the utilisation wanted in the next snapshots.
        self.utilisation: tuple[float | None, int] | None = None
        self._history: tuple[tuple[float | None, int], History] | None = None
        self._samples_seen = 0
        self._stopped = False
        self._generation = -1
        self._seen = 0
        self._events: list[dict[str, Any]] = []
        self._incidents: list[dict[str, Any]] = []
        self._rollbacks: list[tuple[int, int]] = []

    def request(self) -> None:
        """Ask for a snapshot; returns at once."""
        self._wanted.set()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.set()

    def run(self) -> None:
        from fp8console.runs.run import Run

        run: Run | None = None
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopped:
                return
            try:
                if run is None:
                    run = Run(self._run_dir)
                answer: Snapshot | Exception = self.read(run)
            except Exception as error:  # a run directory may vanish or hold anything: the screen says so and stays
                answer = error
            if self._stopped:
                return
            self._deliver(answer)

    def read(self, run: Run) -> Snapshot:
        """One snapshot of the run as it is now."""
        from fp8console.runs.status import status

        run.refresh()
        moment = self._clock()
        now = status(run, moment)
        self._take_events(run)
        steps, limit = run.rank(0), self.output_lines
        return Snapshot(
            time=moment,
            status=now,
            steps=steps,
            count=len(steps),
            events=tuple(self._events),
            incidents=tuple(self._incidents[-EVENTS_KEPT:]),
            rollbacks=tuple(self._rollbacks),
            output=tuple(run.output.lines(limit)),
            output_limit=limit,
            torch_imported=(self._run_dir / TORCH_MARK).exists() or now.torch is not None or bool(len(steps)),
            socket=str(run.info["socket"]) if run.info.get("socket") else None,
            utilisation=self._utilisation(run),
        )

    def _utilisation(self, run: Run) -> Utilisation | None:
        """The map of utilisation while a screen asks for it; read anew where it asks for another."""
        wanted, log = self.utilisation, run.hardware
        if wanted is None:
            self._history = None
            return None
        fresh = log.taken - self._samples_seen
        self._samples_seen = log.taken
        kept = self._history is not None and self._history[0] == wanted and fresh <= len(log.history)
        if kept and self._history is not None and not (wanted[0] is None and self._history[1].is_full):
            for sample in list(log.history)[len(log.history) - fresh :]:
                self._history[1].add(sample)
        else:
            from fp8console.runs.utilisation import History, whole_width

            width, columns = wanted
            self._history = wanted, History(log.path, width or whole_width(log.path, columns), columns)
        return self._history[1].look()

    def _take_events(self, run: Run) -> None:
        """Take in the events that arrived since the last look; only rank 0's copy of what every rank writes."""
        from fp8console.runs.reader import is_primary

        log = run.events
        if log.generation != self._generation:
            self._generation, self._seen = log.generation, 0
            self._events, self._incidents, self._rollbacks = [], [], []
        fresh = [event for event in log.arrived[self._seen :] if is_primary(event)]
        self._seen = len(log.arrived)
        if not fresh:
            return
        visible = [event for event in fresh if is_shown(event)]
        self._events = sorted((self._events + visible)[-EVENTS_KEPT:], key=_time_of)
        self._incidents += [event for event in fresh if is_incident(event)]
        for event in fresh:
            to, at = event.get("to"), event.get("step")
            if event["kind"] == "rolled_back" and isinstance(to, int) and isinstance(at, int):
                self._rollbacks.append((to, at))


def _time_of(event: dict[str, Any]) -> float:
    return float(event["time"])

"""The rank's thread: writes records and events, talks to the supervisor. The training thread never waits for it."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.probe.agreement import Agreement
from fp8console.probe.recorder import Recorder
from fp8console.protocol.events import EventWriter
from fp8console.protocol.wire import LineBuffer, WireError, encode

#: Seconds between two looks at the queues; a command wakes the thread at once.
TICK = 0.1
#: Seconds between two progress messages, and between two tries to reach a supervisor that is gone.
PROGRESS = 0.5
RETRY = 2.0
#: Messages kept for a supervisor that is gone or does not read; older ones are dropped.
UNSENT = 10_000


class Link:
    """Queues in, one daemon thread out. Starts with ``start()``; ``close()`` writes what is left, within a second."""

    def __init__(self, address: str | None, recorder: Recorder, events_path: Path, agreement: Agreement) -> None:
        self.hello: dict[str, Any] = {}
        self.progress: Callable[[], dict[str, Any] | None] = lambda: None
        self.idle: Callable[[], None] = lambda: None
        self.layers: Any = None  # a LayerSampling, whose samples are written with the records
        self.agreement = agreement
        self._address = address
        self._recorder = recorder
        self._events = EventWriter(events_path)
        self._event_queue: deque[dict[str, Any]] = deque()
        self._out: deque[bytes] = deque()
        self._out_rest = b""
        self._lines = LineBuffer()
        self._socket: socket.socket | None = None
        self._next_try = 0.0
        self._next_progress = 0.0
        self._flush_lock = threading.Lock()
        self._said_problem: str | None = None
        self._closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="fp8console-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    # -- from the training thread: queues only --------------------------------------------------------------------
    def event(self, event: dict[str, Any]) -> None:
        self._event_queue.append(event)

    def record(self, record: bytes) -> None:
        self._recorder.add(record)

    def send(self, message: dict[str, Any]) -> None:
        """A message for the supervisor, sent at once; the oldest are dropped when none takes them."""
        self._put(message)
        self._wake()

    def flush(self) -> None:
        """Write records and events now, on the calling thread (a pause, the end of the process)."""
        with self._flush_lock:
            self._recorder.flush()
            while self._event_queue:
                self._events.write(self._event_queue.popleft())
            if self.layers is not None:
                self.layers.flush()

    def close(self) -> None:
        """Stop the thread and write the rest; waits a second at most."""
        self._closing = True
        self._wake()
        self._thread.join(1.0)
        if self._thread.is_alive() and not self._flush_lock.acquire(timeout=1.0):
            return  # the thread hangs in a write: no more can be written, and the process must end
        if self._thread.is_alive():
            self._flush_lock.release()
        self.flush()
        self._recorder.close()

    def _put(self, message: dict[str, Any]) -> None:
        while len(self._out) >= UNSENT:
            try:
                self._out.popleft()
            except IndexError:
                break
        self._out.append(encode(message))

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except (BlockingIOError, OSError):
            pass

    # -- the thread -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:  # the thread must outlive any one failure
                self._disconnect(repr(error))
                time.sleep(TICK)

    def _turn(self) -> None:
        now = time.monotonic()
        if self._socket is None and self._address and now >= self._next_try:
            self._next_try = now + RETRY
            self._connect()
        if self._wait():
            self._receive()
        if self._socket is not None and (self._out or self._out_rest):
            self._transmit()
        self.flush()
        self._say_problem()
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS
            self.idle()
            report = self.progress()
            if report is not None and self._socket is not None:
                self._put(report)

    def _wait(self) -> bool:
        """Sleep until something happens or a tick has passed; True when the supervisor has said something."""
        poll = select.poll()  # select() fails in a process with over 1,024 open files
        poll.register(self._wake_read, select.POLLIN)
        if self._socket is not None:
            sending = select.POLLOUT if self._out or self._out_rest else 0
            poll.register(self._socket.fileno(), select.POLLIN | sending)
        ready = {fd for fd, event in poll.poll(TICK * 1000) if event & ~select.POLLOUT}
        if self._wake_read in ready:
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass
        return self._socket is not None and self._socket.fileno() in ready

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(1.0)
            connection.connect(self._address)  # type: ignore[arg-type]
            connection.setblocking(False)
        except OSError:
            connection.close()
            return
        self._socket = connection
        self._lines = LineBuffer()
        self._out_rest = encode({"hello": "rank", **self.hello})
        self.agreement.supervisor_found()

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
            messages = self._lines.feed(data)
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self._disconnect(str(error))
            return
        if not data:
            self._disconnect("the supervisor closed the connection")
            return
        for message in messages:
            self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        if "prepare" in message:
            self._put(self.agreement.prepare(str(message["prepare"]), message.get("command") or {}))
        elif "commit" in message:
            step = int(message["step"])
            reason = self.agreement.commit(str(message["commit"]), step)
            if reason is not None:
                self._put({"done": str(message["commit"]), "step": step, "ok": False, "reason": reason})
        elif "abort" in message:
            self.agreement.abort(str(message["abort"]))

    def _transmit(self) -> None:
        assert self._socket is not None
        try:
            while self._out or self._out_rest:
                try:
                    data = self._out_rest or self._out.popleft()
                except IndexError:
                    return  # the training thread has just dropped the oldest
                self._out_rest = data
                sent = self._socket.send(data)
                self._out_rest = data[sent:]
        except BlockingIOError:
            return
        except OSError as error:
            self._disconnect(str(error))

    def _disconnect(self, reason: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._out.clear()
        self._out_rest = b""
        self.agreement.supervisor_lost()

    def _say_problem(self) -> None:
        problem = self._recorder.problem or self._events.failed or (self.layers and self.layers.problem)
        if problem is not None and problem != self._said_problem and self._socket is not None:
            self._said_problem = problem
            self._put({"fault": "records", "reason": f"records can't be written: {problem}"})

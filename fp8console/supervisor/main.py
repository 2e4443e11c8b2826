"""The supervisor of one run, as a process: ``python -c "...main()" RUN_DIR READY_FD``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from fp8console.hardware import joins
from fp8console.protocol import commands, events, identity, paths
from fp8console.protocol.settings import Settings, from_json
from fp8console.supervisor import policy, recovery, run_file, training
from fp8console.supervisor.coordinator import Coordinator, RankPeer, Request
from fp8console.supervisor.hardware import HardwareFile, HardwareWatch
from fp8console.supervisor.server import Server

#: Seconds between two looks at cadence, checkpoints and the processes' early events.
TICK = 0.5
#: Seconds after the start at which a run that has not imported torch is said so.
SILENT_SECONDS = 30.0
#: Seconds that the socket stays after the end, for answers still on their way.
LINGER = 0.3


class Supervisor:
    """Owns run.json, the supervisor's events, the training process and the queue of commands."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.info = run_file.read(run_dir)
        self.settings: Settings = from_json(self.info["settings"])
        self.events = events.EventWriter(paths.events_file(run_dir), again=True)
        self.coordinator = Coordinator(self._resolve)
        self.server = Server(self._rank_joined, self._rank_said, self._rank_left, self._asked)
        self.training: training.Training | None = None
        self._rank_devices: dict[int, joins.RankDevice] = {}  # for the sampler's samples
        self._points: dict[int, dict[tuple[int, str], dict[str, Any]]] = {}  # by rank: (step, kind) -> point
        self._early_offset = 0
        self._started = time.monotonic()
        self._next_checkpoint = time.monotonic() + self.settings.checkpoint_minutes * 60
        self._silence_said = False
        self._cadence_asked: int | None = None
        self._stop_asked = False
        self._ending: asyncio.Task[None] | None = None

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        self.events.write(events.make(kind, text, step, **fields))

    def save(self) -> None:
        try:
            run_file.write(self.run_dir, self.info)
        except OSError as error:
            self.event("fault", f"run.json can't be written: {error.strerror}", part="supervisor", reason=str(error))

    # -- life -----------------------------------------------------------------------------------------------------
    async def run(self, ready: int) -> int:
        """Start everything, tell the starter through ``ready``, stay until the training has ended."""
        try:
            socket_path = await self._open_socket()
            self.info["socket"] = str(socket_path)
            self.info["supervisor"] = identity.identify(os.getpid()).to_json()
            self.save()
            self.training = await training.start(self.info["command"], self.info["cwd"], self.run_dir, str(socket_path))
        except (training.StartError, OSError) as error:
            status = error.status if isinstance(error, training.StartError) else 126
            self._record_end(status, None, str(error))
            await self.server.close()
            os.write(ready, f"error {status} {error}\n".encode())
            return status
        self.info["training"] = self.training.who.to_json()
        self.save()
        self.event(
            "launched",
            "started " + " ".join(self.info["command"]),
            pid=self.training.who.pid,
            command=self.info["command"],
        )
        os.write(ready, b"ok\n")
        os.close(ready)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end, number)
        background = [
            loop.create_task(task) for task in (self.coordinator.run(), self._ticks(), self._sample(), self._git())
        ]
        status, signal_name = await self.training.wait()
        self.coordinator.end("the training has ended")
        (self.run_dir / paths.RESERVE).unlink(missing_ok=True)  # room for the last words on a full disk
        await asyncio.sleep(LINGER)
        self._take_early_events()
        self._say_if_unmeasured()
        saved = recovery.recover(self.run_dir)
        if saved:
            self.event("notice", f"{saved} records of a killed process were saved from its memory", part="records")
        self._record_end(status, signal_name, training.last_error(self.run_dir) if status else None)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.server.close()
        return 0

    async def _open_socket(self) -> Path:
        """The socket at its usual place, or in a new folder of its own when somebody is in the way there."""
        usual = paths.socket_path(self.run_dir)
        try:
            await self.server.open(usual)
        except OSError as error:
            short = len(os.fsencode(tempfile.gettempdir())) < paths.SOCKET_BYTES // 2
            other = (
                Path(tempfile.mkdtemp(prefix="fp8console-", dir=None if short else "/tmp")) / "run" / "supervisor.sock"
            )
            await self.server.open(other)
            self.event("notice", f"the socket is at {other}: {usual.parent}: {error.strerror}", part="supervisor")
            return other
        return usual

    def _record_end(self, status: int, signal_name: str | None, error: str | None) -> None:
        self.info.update(exit_status=status, signal=signal_name, ended=time.time(), error=error)
        about = training.describe_end(status, signal_name)
        self.event("ended", about["text"], exit_status=status, signal=signal_name, error=error)
        self.save()

    def _say_if_silent(self) -> None:
        """Long after the start nothing has imported torch: days may pass before the end could tell."""
        if self._silence_said or time.monotonic() - self._started < SILENT_SECONDS:
            return
        self._silence_said = True
        if not self.coordinator.ranks and not (self.run_dir / "torch").exists():
            text = (
                "no process has imported torch yet: nothing is measured (does something reset PYTHONPATH, or use -I?)"
            )
            self.event("notice", text, part="probe")

    def _say_if_unmeasured(self) -> None:
        if not (self.run_dir / "torch").exists():
            text = "no process of this run imported torch (or its Python ignores PYTHONPATH): nothing was measured"
            self.event("notice", text, part="probe")
        elif self.info["world_size"] is None:
            text = "no optimizer step was seen: nothing was measured"
            self.event("notice", text, part="probe")

    def _told_to_end(self, number: signal.Signals) -> None:
        """Somebody signals the supervisor itself: it hands the signal on and ends with the training."""
        if self.training is not None:
            self.event("stopping", f"the supervisor got {number.name} and handed it on", how="signal")
            self.training.signal(number)

    # -- ranks ----------------------------------------------------------------------------------------------------
    def _rank_joined(self, peer: RankPeer) -> None:
        hello = peer.hello
        self.info["world_size"] = max(self.info["world_size"] or 1, int(hello.get("world_size") or 1), peer.rank + 1)
        self.info["versions"]["torch"] = hello.get("torch")
        self.save()
        about = {key: hello.get(key) for key in ("rank", "world_size", "pid", "torch", "device", "gpu")}
        device = joins.rank_device(hello)
        if device is not None:
            self._rank_devices[peer.rank] = device
        self.event(
            "rank_joined", f"rank {peer.rank} joined: torch {hello.get('torch')} on {hello.get('device')}", **about
        )
        self._cadence_asked = None  # a new process begins with the first cadence
        self.coordinator.joined(peer)

    def _rank_said(self, peer: RankPeer, message: dict[str, Any]) -> None:
        if "progress" in message:
            peer.progress = message
        elif "fault" in message:
            self.event(
                "fault", str(message.get("reason")), part=message["fault"], reason=message.get("reason"), rank=peer.rank
            )
        elif "point" in message:
            point = message["point"]
            self._points.setdefault(peer.rank, {})[(int(point["step"]), str(point["kind"]))] = point
        elif "dropped" in message:
            kind = "snapshot" if message["dropped"]["where"] == "memory" else "checkpoint"
            self._points.get(peer.rank, {}).pop((int(message["dropped"]["step"]), kind), None)

    def _rank_left(self, peer: RankPeer) -> None:
        self.coordinator.left(peer)
        if peer.rank not in self.coordinator.ranks:
            # Its memory is gone with it; what is on disk stays for the process that takes its place.
            kept = self._points.get(peer.rank, {})
            self._points[peer.rank] = {key: point for key, point in kept.items() if key[1] != "snapshot"}
        self.event("rank_left", f"rank {peer.rank} left", rank=peer.rank)

    # -- commands -------------------------------------------------------------------------------------------------
    def _asked(self, message: dict[str, Any], reply: Any) -> None:
        id = str(message.get("id") or uuid.uuid4().hex[:8])
        try:
            command = commands.validate(message.get("command"))
        except commands.CommandError as error:
            reply({"id": id, "state": "refused", "reason": str(error)})
            return
        text = commands.describe(command)
        own_id = uuid.uuid4().hex[:8]  # clients choose their ids, and two may choose the same
        self.event("asked", f"asked: {text}", id=own_id, command=command, by=message.get("by"))
        reply({"id": id, "state": "asked", "text": text})

        def answer(state: dict[str, Any]) -> None:
            self._note_answer(own_id, command, text, state)
            reply({"id": id, **state})

        if command["name"] == "kill":
            self._kill(answer)
        else:
            self.coordinator.submit(Request(own_id, command, answer))

    def _note_answer(self, id: str, command: dict[str, Any], text: str, state: dict[str, Any]) -> None:
        if state["state"] == "refused":
            self.event(
                "refused", f"not applied: {text}: {state['reason']}", id=id, command=command, reason=state["reason"]
            )
            return
        step = state.get("step")
        at = f" at step {step:,}" if step is not None else ""
        self.event("applied", f"{text}: applied{at}", step, id=id, command=command, detail=state.get("detail"))
        if command["name"] == "stop":
            self.event("stopping", "stopping after a checkpoint", step, how="stop")
            self._ending = asyncio.ensure_future(self._end_in_time())

    async def _end_in_time(self) -> None:
        """A training that caught the stop's exit is told by signals."""
        await asyncio.sleep(self.settings.grace_seconds)
        if self.training is not None:
            await self.training.terminate(self.settings.grace_seconds)

    def _kill(self, answer: Any) -> None:
        grace = self.settings.grace_seconds
        self.event("stopping", f"ending the training: SIGTERM now, SIGKILL after {grace:g} s", how="kill")
        if self.training is not None:
            self._ending = asyncio.ensure_future(self.training.terminate(grace))
        answer({"state": "applied", "step": None, "detail": {}})

    def _resolve(self, command: dict[str, Any]) -> dict[str, Any] | str:
        if command["name"] != "rollback" or isinstance(command["to"], int):
            return command
        points = self._points.get(min(self.coordinator.ranks, default=0), {})
        step = policy.resolve_point(list(points.values()), command["to"])
        return step if isinstance(step, str) else {**command, "to": step}

    def _order(self, command: dict[str, Any]) -> None:
        """A command of the supervisor's own; only its failure is an event."""

        def answer(state: dict[str, Any]) -> None:
            if state["state"] == "refused" and command["name"] == "checkpoint" and self.coordinator.complete:
                self.event("notice", f"the unasked checkpoint was not written: {state['reason']}", part="checkpoints")

        self.coordinator.submit(Request(uuid.uuid4().hex[:8], command, answer, internal=True))

    # -- background -----------------------------------------------------------------------------------------------
    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._take_early_events()
            self._say_if_silent()
            if self.coordinator.complete and not self.coordinator.paused:
                self._tune_cadence()
                self._checkpoint_if_due()

    def _tune_cadence(self) -> None:
        reports = [peer.progress for peer in self.coordinator.ranks.values()]
        if not reports or not all(report.get("step_seconds") and report.get("snapshot_seconds") for report in reports):
            return
        wanted = policy.cadence(
            self.settings.snapshot_budget,
            max(report["snapshot_seconds"] for report in reports),
            max(report["step_seconds"] for report in reports),
            time.monotonic() - self._started,
        )
        now = self._cadence_asked or int(reports[0].get("cadence") or 0)
        if policy.worth_changing(now, wanted):
            self._cadence_asked = wanted
            self._order({"name": "snapshot_every", "steps": wanted})

    def _checkpoint_if_due(self) -> None:
        if self.settings.checkpoint_minutes > 0 and time.monotonic() >= self._next_checkpoint:
            self._next_checkpoint = time.monotonic() + self.settings.checkpoint_minutes * 60
            self._order({"name": "checkpoint", "tag": None})

    def _take_early_events(self) -> None:
        """Events of processes that have no rank go into the supervisor's own file."""
        try:
            with open(self.run_dir / "events.start.jsonl", "rb") as file:
                file.seek(self._early_offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._early_offset += len(whole)
        for line in whole.splitlines():
            event = events.parse_line(line)
            if event is not None:
                self.events.write(event)

    async def _git(self) -> None:
        self.info["git"] = await asyncio.get_running_loop().run_in_executor(None, run_file.git_state, self.info["cwd"])
        self.save()

    async def _sample(self) -> None:
        from fp8console.hardware.launcher import Sampler

        watch, file = HardwareWatch(self.event), HardwareFile(self.run_dir / paths.HARDWARE)

        def write(sample: dict[str, Any]) -> None:
            watch.take(sample, self._newest_step())
            file.write(sample)

        pid = self.training.who.pid if self.training is not None else None
        source = self.settings.gpu_source
        try:
            await Sampler(self.run_dir, write, pid=pid, source=source, ranks=self._rank_devices).run()
        except Exception as error:  # of a kind that nobody thought of; the training goes on, and somebody should know
            reason = f"hardware samples have ended: {type(error).__name__}: {error}"
            self.event("fault", reason, part="hardware", reason=reason)

    def _newest_step(self) -> int | None:
        steps = [peer.progress.get("progress") for peer in self.coordinator.ranks.values()]
        return max((step for step in steps if isinstance(step, int)), default=None)


def main() -> None:
    """Entry of the process; arguments: the run directory and the descriptor on which the starter waits."""
    run_dir, ready = Path(sys.argv[1]), int(sys.argv[2])
    try:
        supervisor = Supervisor(run_dir)
    except Exception as error:
        os.write(ready, f"error 126 the supervisor could not start: {error}\n".encode())
        raise
    sys.exit(asyncio.run(supervisor.run(ready)))

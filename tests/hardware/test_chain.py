"""The chain of sources: the best that answers for each GPU, with the reason for each step down."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_library import FakeAmdSmi, hooked, mi300x
from synthetic_sysfs import BUSY, MI210, MI300X, build, change, metrics, never_answer

from fp8console.hardware import chain as chain_module
from fp8console.hardware import detect
from fp8console.hardware.chain import Chain
from fp8console.hardware.gpu import MEASURED, Gpu, Reading, Unavailable

NOBODY: frozenset[int] = frozenset()


class Fake:
    """A source with answers put in by the test: a Reading, or what is raised."""

    def __init__(self, name: str, *gpus: Gpu) -> None:
        self.name = name
        self._gpus = list(gpus)
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, bool]] = []

    def gpus(self) -> list[Gpu]:
        return self._gpus

    def read(self, key: str, slow: bool, pids: frozenset[int]) -> Reading:
        self.asked.append((key, slow))
        answer = self.answers.get(key, Unavailable(f"{self.name}: nothing"))
        if isinstance(answer, Exception):
            raise answer
        return Reading(**answer)

    def close(self) -> None: ...


def refusing(reason: str) -> Callable[[], Any]:
    def opener() -> Any:
        raise Unavailable(reason)

    return opener


def make(*sources: tuple[str, Callable[[], Any]], skipped: set[str] | None = None) -> tuple[Chain, list[str]]:
    parts: list[str] = []
    return Chain(sources, parts.append, skipped or set(), None, "no GPU found"), parts


def gpu(number: int, key: str = "") -> Gpu:
    return Gpu(key or str(number), "MI300X", f"0000:{3 + number:02x}:00.0")


@pytest.fixture
def two() -> tuple[Fake, Fake]:
    best, next_best = Fake("amdsmi", gpu(0), gpu(1)), Fake("sysfs", gpu(0, "a"), gpu(1, "b"))
    best.answers = {"0": {"values": {"busy": 10}}, "1": {"values": {"busy": 11}}}
    next_best.answers = {"a": {"values": {"busy": 20}}, "b": {"values": {"busy": 21}}}
    return best, next_best


def test_the_best_source_that_answers(two: tuple[Fake, Fake]) -> None:
    best, next_best = two
    chain, parts = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    samples = chain.sweep(NOBODY)
    assert [(sample["busy"], sample["source"], sample["reason"]) for sample in samples] == [
        (10, "amdsmi", None),
        (11, "amdsmi", None),
    ]
    assert chain.reason(samples) is None
    assert next_best.asked == []
    assert parts == ["amdsmi", "sysfs", "amdsmi 0000:03:00.0", "amdsmi 0000:04:00.0"]
    assert set(MEASURED) < set(samples[0])


def test_one_gpu_steps_down_alone_and_says_why(two: tuple[Fake, Fake]) -> None:
    best, next_best = two
    best.answers["1"] = Unavailable("amdsmi: error 34")
    chain, _ = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    samples = chain.sweep(NOBODY)
    assert [(sample["busy"], sample["source"]) for sample in samples] == [(10, "amdsmi"), (21, "sysfs")]
    assert samples[1]["reason"] == "amdsmi: error 34"
    assert chain.reason(samples) == "GPU 1: amdsmi: error 34"


def test_the_better_source_is_asked_again_with_the_next_slow_reading(
    two: tuple[Fake, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, next_best = two
    good = best.answers["0"]
    best.answers["0"] = Unavailable("amdsmi: error 34")
    chain, _ = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    for _ in range(3):
        assert chain.sweep(NOBODY)[0]["source"] == "sysfs"
    assert [key for key, _ in best.asked].count("0") == 1
    best.answers["0"] = good
    monkeypatch.setattr(chain_module, "SLOW_SECONDS", 0.0)
    assert chain.sweep(NOBODY)[0]["source"] == "amdsmi"


def test_all_that_fails_is_told_and_nothing_is_invented(two: tuple[Fake, Fake]) -> None:
    best, next_best = two
    best.answers["0"] = ValueError("odd")
    next_best.answers["a"] = Unavailable("sysfs: gone")
    chain, _ = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    sample = chain.sweep(NOBODY)[0]
    assert {sample[name] for name in MEASURED} == {None}
    assert (sample["source"], sample["age"]) == ("none", None)
    assert sample["reason"] == "amdsmi: ValueError('odd'); sysfs: gone"


def test_a_source_that_can_not_be_opened(two: tuple[Fake, Fake]) -> None:
    _, next_best = two
    chain, _ = make(("amdsmi", refusing("amdsmi: not installed")), ("sysfs", lambda: next_best))
    samples = chain.sweep(NOBODY)
    assert {(sample["source"], sample["reason"]) for sample in samples} == {("sysfs", "amdsmi: not installed")}
    assert chain.reason(samples) == "amdsmi: not installed"


def test_a_gpu_that_the_better_source_does_not_list() -> None:
    best, next_best = Fake("amdsmi", gpu(0)), Fake("sysfs", gpu(0, "a"), gpu(1, "b"))
    best.answers, next_best.answers = {"0": {"values": {"busy": 1}}}, {"b": {"values": {"busy": 2}}}
    chain, _ = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    samples = chain.sweep(NOBODY)
    assert [(sample["busy"], sample["reason"]) for sample in samples] == [
        (1, None),
        (2, "amdsmi does not list this GPU"),
    ]


def test_gpus_without_an_address_are_not_listed_twice() -> None:
    """A container without /dev/dri: the library tells no address. The number of the card may still say who it is."""
    bare, named = Gpu("0", "MI300X"), Gpu("1", "MI300X", None, "GPU-abc0000000000001")
    best = Fake("amdsmi", bare, named)
    next_best = Fake("sysfs", gpu(0, "a"), Gpu("b", "MI300X", "0000:04:00.0", "GPU-abc0000000000001"))
    best.answers = {"0": {"values": {"busy": 1}}}
    next_best.answers = {"a": {"values": {"busy": 2}}, "b": {"values": {"busy": 3}}}
    chain, _ = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    assert [(sample["busy"], sample["source"]) for sample in chain.sweep(NOBODY)] == [(1, "amdsmi"), (3, "sysfs")]


def test_a_partial_answer_gives_way_to_a_whole_one_and_else_stays(two: tuple[Fake, Fake]) -> None:
    best, next_best = two
    best.answers["0"] = {"values": {"busy": 10, "power_w": 300.0}, "note": "amdsmi: error 43", "whole": False}
    chain, _ = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best))
    sample = chain.sweep(NOBODY)[0]
    assert (sample["busy"], sample["source"], sample["reason"]) == (20, "sysfs", "amdsmi: error 43")
    chain, _ = make(("amdsmi", lambda: best))
    for _ in range(3):  # and is asked again each time, there being nothing better
        sample = chain.sweep(NOBODY)[0]
        assert (sample["busy"], sample["source"], sample["reason"]) == (10, "amdsmi", "amdsmi: error 43")


def test_slow_values_stand_between_their_readings(two: tuple[Fake, Fake]) -> None:
    best, _ = two
    best.answers["0"] = {"values": {"busy": 10, "pcie_width": None}, "slow": {"ecc_correctable": 4, "pcie_width": 8}}
    chain, _ = make(("amdsmi", lambda: best))
    first, second = chain.sweep(NOBODY)[0], chain.sweep(NOBODY)[0]
    assert [slow for key, slow in best.asked if key == "0"] == [True, False]
    for sample in (first, second):
        assert (sample["ecc_correctable"], sample["pcie_width"]) == (4, 8)
    # A value read now goes before one of then.
    best.answers["0"] = {"values": {"busy": 10, "pcie_width": 16}}
    assert chain.sweep(NOBODY)[0]["pcie_width"] == 16


def test_parts_that_hung_are_left_out(two: tuple[Fake, Fake]) -> None:
    best, next_best = two
    skipped = {"amdsmi 0000:03:00.0"}
    chain, parts = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best), skipped=skipped)
    samples = chain.sweep(NOBODY)
    assert [sample["source"] for sample in samples] == ["sysfs", "amdsmi"]
    assert samples[0]["reason"] == "amdsmi did not answer and is left out for now"
    assert "amdsmi 0000:03:00.0" not in parts
    skipped.clear()
    assert chain.sweep(NOBODY)[0]["source"] == "amdsmi"
    chain, parts = make(("amdsmi", lambda: best), ("sysfs", lambda: next_best), skipped={"amdsmi"})
    assert {sample["source"] for sample in chain.sweep(NOBODY)} == {"sysfs"} and "amdsmi" not in parts


def test_commands_are_not_run_where_something_answers(two: tuple[Fake, Fake]) -> None:
    _, next_best = two
    chain, parts = make(("sysfs", lambda: next_best), ("rocm-smi", refusing("rocm-smi: asked")))
    assert chain.reasons == [] and parts == ["sysfs"]
    command = Fake("rocm-smi", gpu(0))
    command.answers = {"0": {"values": {"busy": 3}, "age": 4.2}}
    chain, _ = make(("sysfs", refusing("sysfs: no AMD GPU")), ("rocm-smi", lambda: command))
    (sample,) = chain.sweep(NOBODY)
    assert (sample["busy"], sample["source"], sample["age"]) == (3, "rocm-smi", 4.2)


def test_nothing_at_all() -> None:
    chain, _ = make(("amdsmi", refusing("amdsmi: not installed")), ("sysfs", refusing("sysfs: no AMD GPU")))
    assert chain.sweep(NOBODY) == []
    assert chain.reason([]) == "no GPU telemetry: amdsmi: not installed; sysfs: no AMD GPU"
    assert make()[0].reason([]) == "no GPU telemetry: no GPU found"


def open_chain(root: Path, forced: str | None = None, skipped: set[str] | None = None) -> Chain:
    return Chain(detect.openers(root, forced), lambda part: None, skipped or set(), forced, detect.nothing(root))


@pytest.fixture(autouse=True)
def no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)


@pytest.mark.parametrize("revision", [4, 5, 6, 7, 8])
def test_a_table_that_the_library_does_not_know_is_read_by_ours(tmp_path: Path, revision: int) -> None:
    """Debian's libamd-smi answers v1.6 with error 43: our reader of sysfs knows it."""
    build(tmp_path, {**MI300X, "revision": revision}, 2)
    with hooked(FakeAmdSmi([mi300x(0), mi300x(1)], errors={"amdsmi_get_gpu_metrics_info": {"1": 43}})):
        samples = open_chain(tmp_path).sweep(NOBODY)
    assert [sample["source"] for sample in samples] == ["amdsmi", "sysfs"]
    assert samples[0]["reason"] is None
    assert samples[1]["reason"].startswith("amdsmi: gpu_metrics_info: error 43")
    expected = [BUSY - xcd for xcd in range(8)]
    assert samples[0]["xcd_busy"] == expected
    assert samples[1]["xcd_busy"] == (expected if revision >= 6 else None)
    assert samples[1]["power_w"] == 311.0  # the file's, not the library's 613
    # HIP's number stays the library's, whatever source the values come from.
    assert [sample["join"]["hip_id"] for sample in samples] == [7, 6]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"missing": True}, "amdsmi: ROCm's library libamd_smi.so was not found"),
        ({"errors": {"amdsmi_init": 34}}, "amdsmi: error 34, the amdgpu driver is not loaded"),
    ],
)
def test_without_the_library_sysfs_serves(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    build(tmp_path, MI210, 2)
    with hooked(FakeAmdSmi([mi300x(0)], **settings)):
        chain = open_chain(tmp_path)
    samples = chain.sweep(NOBODY)
    assert [(sample["source"], sample["reason"]) for sample in samples] == [("sysfs", reason)] * 2
    assert [(sample["arch"], sample["busy"]) for sample in samples] == [("gfx90a", BUSY), ("gfx90a", BUSY + 1)]


def test_throttling_and_data_as_rates_through_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = build(tmp_path, MI300X, 1)
    clock = [100.0]
    monkeypatch.setattr(chain_module.time, "monotonic", lambda: clock[0])
    chain = open_chain(tmp_path, "sysfs")
    (sample,) = chain.sweep(NOBODY)
    assert sample["throttle"] is None and sample["xgmi_read_bytes_s"] is None
    clock[0] += 2.0
    after = metrics(MI300X, 0, accumulation_counter=2000, ppt_residency_acc=900, hbm_thm_residency_acc=10)
    change(device / "gpu_metrics", after)
    (sample,) = chain.sweep(NOBODY)
    assert sample["throttle"] == {"power": 0.9, "thermal": 0.0, "hbm": 0.01}
    assert sample["xgmi_read_bytes_s"] == 0.0


def test_a_user_forces_a_source(tmp_path: Path) -> None:
    build(tmp_path, MI300X, 1)
    with hooked(FakeAmdSmi([mi300x(0)])):
        assert [sample["source"] for sample in open_chain(tmp_path, "amdsmi").sweep(NOBODY)] == ["amdsmi"]
        assert [sample["source"] for sample in open_chain(tmp_path, "sysfs").sweep(NOBODY)] == ["sysfs"]
    with hooked(FakeAmdSmi([], missing=True)):
        chain = open_chain(tmp_path, "amdsmi")
    assert chain.reason(chain.sweep(NOBODY)) == ("no GPU telemetry: amdsmi: ROCm's library libamd_smi.so was not found")


def test_no_library_is_loaded_where_there_is_no_such_card(tmp_path: Path) -> None:
    if Path("/dev/kfd").exists() or Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    assert detect.openers(tmp_path, None) == []
    (tmp_path / "module" / "nvidia").mkdir(parents=True)
    assert [name for name, _ in detect.openers(tmp_path, None)] == ["nvml"]
    build(tmp_path, MI210, 1)
    assert [name for name, _ in detect.openers(tmp_path, None)][:2] == ["amdsmi", "sysfs"]


def test_what_gpu_metrics_can_not_tell_is_said(tmp_path: Path) -> None:
    first, second = build(tmp_path, MI300X, 2)
    change(first / "gpu_metrics", b"\x08\x00\x01\x09\x00\x00\x00\x00")
    (second / "gpu_metrics").unlink()
    samples = open_chain(tmp_path, "sysfs").sweep(NOBODY)
    assert [sample["reason"] for sample in samples] == [
        "gpu_metrics v1.9 is not known here",
        "gpu_metrics: No such file or directory",
    ]
    for sample in samples:
        assert sample["busy"] is not None and sample["xcd_busy"] is None and sample["clock_mhz"] == 1650.0


def test_processes_of_this_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8console.hardware.sources import kfd

    build(tmp_path, MI300X, 2)
    folder = tmp_path / "class" / "kfd" / "kfd" / "proc"
    for pid, gpu_id, vram in ((11, 51000, 5 << 30), (11, 51001, 0), (99, 51001, 7)):
        (folder / str(pid)).mkdir(exist_ok=True)
        (folder / str(pid) / f"vram_{gpu_id}").write_text(f"{vram}\n")
    monkeypatch.setattr(kfd, "MACHINE_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    chain = open_chain(tmp_path, "sysfs")
    assert [sample["processes"] for sample in chain.sweep(frozenset({11, 12}))] == [[{"pid": 11, "vram": 5 << 30}], []]
    # Of nobody nothing is known, which is not the same as none.
    assert [sample["processes"] for sample in open_chain(tmp_path, "sysfs").sweep(NOBODY)] == [None, None]
    # In a container with processes of its own KFD's numbers are other ones.
    monkeypatch.setattr(kfd, "MACHINE_NAMESPACE", "pid:[1]")
    assert [sample["processes"] for sample in open_chain(tmp_path, "sysfs").sweep(frozenset({11}))] == [None, None]


def test_a_library_that_hangs_is_left_out_and_its_card_is_read_from_sysfs(tmp_path: Path) -> None:
    first, _ = build(tmp_path, MI300X, 2)
    never_answer(first / "gpu_busy_percent")
    library = FakeAmdSmi([mi300x(0), mi300x(1)], delays={"amdsmi_get_gpu_metrics_info": 60})
    parts = {"amdsmi 0000:03:00.0", "amdsmi 0000:23:00.0", "sysfs 0000:03:00.0"}
    with hooked(library):
        samples = open_chain(tmp_path, skipped=parts).sweep(NOBODY)
    assert [sample["source"] for sample in samples] == ["none", "sysfs"]
    assert samples[0]["reason"] == (
        "amdsmi did not answer and is left out for now; sysfs did not answer and is left out for now"
    )

"""torch's devices and the library's GPUs: by what the process says, by HIP's numbers, under the variables that hide."""

from __future__ import annotations

from typing import Any

import pytest

from fp8console.hardware.joins import RankDevice, join, order, plain_uuid, rank_device

GPU_UUIDS = [f"GPU-{0xABC0000000000000 + row:016x}" for row in range(8)]


def rows(hip_ids: list[int | None], **changes: Any) -> list[dict[str, Any]]:
    """A GPU each, at 0000:03, 0000:23 and so on."""
    return [
        {
            "index": row,
            "name": "MI300X",
            "bdf": f"0000:{3 + 0x20 * row:02x}:00.0",
            "uuid": GPU_UUIDS[row],
            "processes": None,
            "join": {"hip_id": hip_id, "orders": [], "nvidia": False},
            **changes,
        }
        for row, hip_id in enumerate(hip_ids)
    ]


def by_orders(orders: list[list[int]]) -> list[dict[str, Any]]:
    found = rows([None] * len(orders))
    for gpu, mine in zip(found, orders):
        gpu["join"]["orders"] = mine
    return found


def joined(
    gpus: list[dict[str, Any]], ranks: list[RankDevice] | None = None, **environment: str
) -> list[tuple[int | None, bool | None]]:
    join(gpus, ranks or [], environment)
    assert all("join" not in gpu for gpu in gpus)
    return [(gpu["torch_index"], gpu["used"]) for gpu in gpus]


def indices(gpus: list[dict[str, Any]], **environment: str) -> list[int | None]:
    return [index for index, _ in joined(gpus, **environment)]


FOUR = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2"}, [None, None, 0, None]),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, [None, 1, None, 0]),
        ({"HIP_VISIBLE_DEVICES": " 3 , 0 "}, [1, None, None, 0]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, [None, None, 0, 1]),
        ({"ROCR_VISIBLE_DEVICES": "3,2,1", "HIP_VISIBLE_DEVICES": "2,0"}, [None, 0, None, 1]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1"}, [None, None, 0, None]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [None, 0, None, None]),
        # HIP's own goes before CUDA's; an empty one is as good as none.
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, [None, None, 0, None]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": ""}, [None, 0, None, None]),
        ({"ROCR_VISIBLE_DEVICES": ""}, [None] * 4),
        # What follows a wrong word is hidden; a device named twice is made of differently by different versions.
        ({"HIP_VISIBLE_DEVICES": "1,-1,2"}, [None, 0, None, None]),
        ({"HIP_VISIBLE_DEVICES": "1,7,2"}, [None, 0, None, None]),
        ({"HIP_VISIBLE_DEVICES": "x"}, [None] * 4),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, [None] * 4),
        ({"ROCR_VISIBLE_DEVICES": f"{GPU_UUIDS[3]},{GPU_UUIDS[1].upper()}"}, [None, 1, None, 0]),
        ({"ROCR_VISIBLE_DEVICES": f"{GPU_UUIDS[3]},0", "HIP_VISIBLE_DEVICES": "1"}, [0, None, None, None]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ffff000000000000,1"}, [None] * 4),
    ],
)
def test_variables_that_hide_and_order(environment: dict[str, str], expected: list[int | None]) -> None:
    assert indices(rows(FOUR), **environment) == expected
    assert indices(by_orders([[0], [1], [2], [3]]), **environment) == expected


def test_a_number_without_end_hides_what_follows() -> None:
    """Python refuses to read it; the runtimes take it for a device that is not there."""
    two, numbers = rows([0, 1]), [{"hip_id": 0}, {"hip_id": 1}]
    assert order(two, numbers, {"HIP_VISIBLE_DEVICES": f"1,{'9' * 5000},0"}) == [1]


def test_reversed_numbers_of_the_library() -> None:
    assert indices(rows([3, 2, 1, 0])) == [3, 2, 1, 0]
    # HIP's device 1 is row 2, its device 3 is row 0.
    assert indices(rows([3, 2, 1, 0]), HIP_VISIBLE_DEVICES="1,3") == [1, None, 0, None]


def test_kfds_order_serves_where_the_library_has_no_numbers() -> None:
    gpus = by_orders([[1], [0]])
    gpus[0]["join"]["hip_id"] = 0  # one alone says nothing
    assert indices(gpus) == [1, 0]


@pytest.mark.parametrize("gpus", [rows([0, 0]), rows([0, None]), by_orders([[0], []]), by_orders([[0], [0]])])
def test_numbers_that_can_not_be_are_unknown(gpus: list[dict[str, Any]]) -> None:
    assert joined(gpus) == [(None, None), (None, None)]


def test_a_number_that_is_in_no_row_keeps_its_place() -> None:
    assert indices(rows([0, 2]), HIP_VISIBLE_DEVICES="1,2") == [None, 1]


def test_a_partitioned_card_is_several_devices() -> None:
    gpus = by_orders([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]])
    join(gpus, [], {"HIP_VISIBLE_DEVICES": "7,8,9"})
    assert [gpu["torch_indices"] for gpu in gpus] == [[0], [1, 2]]
    assert [gpu["torch_index"] for gpu in gpus] == [0, None]


def test_partitions_that_the_library_lists_one_by_one_go_by_hips_numbers() -> None:
    gpus = rows([0, 1, 2, 3])
    for row, gpu in enumerate(gpus):
        gpu["bdf"], gpu["uuid"] = f"0000:03:00.{row}", GPU_UUIDS[0]
        gpu["join"]["orders"] = [0, 1, 2, 3]
    rank = RankDevice(2, plain_uuid(GPU_UUIDS[0]), "0000:03:00")
    assert joined(gpus, [rank]) == [(0, False), (1, False), (2, True), (3, False)]


def test_what_the_process_says_decides() -> None:
    # By its UUID, on a node whose order was taken for another one: the rest is then unknown, not guessed.
    rank = RankDevice(0, plain_uuid(GPU_UUIDS[3]), None)
    assert joined(rows(FOUR), [rank]) == [(None, False), (None, False), (None, False), (0, True)]
    # By its address, and the order agrees.
    rank = RankDevice(1, None, "0000:23:00")
    assert joined(rows(FOUR), [rank]) == [(0, False), (1, True), (2, False), (3, False)]


def test_ranks_that_see_one_gpu_each() -> None:
    ranks = [RankDevice(0, visible={"HIP_VISIBLE_DEVICES": str(place)}) for place in (2, 0)]
    assert joined(rows(FOUR), ranks) == [(0, True), (None, False), (0, True), (None, False)]


def test_a_ranks_own_variables_go_before_the_launchs() -> None:
    """Launchers set them for each rank, and may take away what was set for the launch."""
    launch = {"HIP_VISIBLE_DEVICES": "3"}
    assert joined(rows(FOUR), [RankDevice(0)], **launch)[3] == (0, True)
    assert joined(rows(FOUR), [RankDevice(1, visible={})], **launch)[1] == (1, True)


def test_ranks_on_one_gpu_each_of_all() -> None:
    ranks = [RankDevice(place) for place in range(3)]
    assert joined(rows([3, 2, 1, 0]), ranks) == [(3, False), (2, True), (1, True), (0, True)]


def test_a_rank_that_can_not_be_found_leaves_use_unknown() -> None:
    assert joined(rows([None, None]), [RankDevice(0)]) == [(None, None), (None, None)]
    gpus = rows([None, None])
    gpus[0]["processes"], gpus[1]["processes"] = [{"pid": 1, "vram": 2}], []
    assert joined(gpus, [RankDevice(0)]) == [(None, True), (None, False)]


def test_a_training_on_the_cpu_uses_no_gpu() -> None:
    rank = rank_device({"device": "cpu", "gpu": None})
    assert rank == RankDevice(None)
    assert joined(rows([0, 1]), [rank]) == [(None, False), (None, False)]


def test_before_anyone_joined_use_is_unknown() -> None:
    assert joined(rows([0, 1])) == [(0, None), (1, None)]


def nvidia(names: list[str]) -> list[dict[str, Any]]:
    gpus = rows([None] * len(names))
    for row, (gpu, name) in enumerate(zip(gpus, names)):
        gpu["name"], gpu["uuid"] = name, f"GPU-0000000{row}-1111-2222-3333-444444444444"
        gpu["join"] = {"hip_id": None, "orders": [row], "nvidia": True}
    return gpus


@pytest.mark.parametrize(
    ("names", "environment", "expected"),
    [
        (["H100", "H100"], {}, [0, 1]),
        (["H100", "H100"], {"CUDA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        (["H100", "H100"], {"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        (["H100", "H100"], {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, [None, 0]),
        (["H100", "H100"], {"CUDA_VISIBLE_DEVICES": "GPU-0000000"}, [None, None]),  # which one?
        (["H100", "H100"], {"CUDA_VISIBLE_DEVICES": "MIG-GPU-1/0/0"}, [None, None]),
        (["T4", "H100"], {}, [None, None]),  # the fastest first
        (["T4", "H100"], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1]),
        (["H100", "H100"], {"HIP_VISIBLE_DEVICES": "1"}, [0, 1]),
    ],
)
def test_nvidias(names: list[str], environment: dict[str, str], expected: list[int | None]) -> None:
    assert indices(nvidia(names), **environment) == expected


def test_no_gpu_and_two_makers() -> None:
    assert order([], [], {}) is None
    assert joined([]) == []
    assert joined(rows([0]) + nvidia(["H100"])) == [(None, None), (None, None)]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("GPU-abc0000000000000", "abc0000000000000"),
        ("GPU-00000000-1111-2222-3333-444444444444", "00000000111122223333444444444444"),
        # torch on ROCm makes a UUID of the 16 characters of the number.
        ("61626330-3030-3030-3030-303030303030", "abc0000000000000"),
        ("GPU-0000000000000000", None),
        ("N/A", None),
        (None, None),
        ("", None),
    ],
)
def test_uuids_in_all_ways_to_write_them(text: str | None, plain: str | None) -> None:
    assert plain_uuid(text) == plain


@pytest.mark.parametrize(
    ("hello", "device"),
    [
        ({"device": "cuda:1"}, RankDevice(1)),
        ({"device": "cuda"}, RankDevice(0)),
        ({"device": "mps"}, RankDevice(None)),
        ({"device": "unknown"}, None),
        ({}, None),
        (
            {"device": "cuda:0", "gpu": {"uuid": None, "slot": "0000:03:00", "visible": {"HIP_VISIBLE_DEVICES": "3"}}},
            RankDevice(0, None, "0000:03:00", {"HIP_VISIBLE_DEVICES": "3"}),
        ),
        ({"device": "cuda:0", "gpu": {"uuid": 7, "slot": 3, "visible": "x"}}, RankDevice(0, "7")),
    ],
)
def test_what_a_rank_says(hello: dict[str, Any], device: RankDevice | None) -> None:
    assert rank_device(hello) == device

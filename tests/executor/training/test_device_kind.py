"""A rank trains on a device of the kind that the plan names, or says that it does not."""

from pathlib import Path

import pytest

from executor.training.device import cpu_name, is_kind
from planner.scenario.datasheet import DATASHEET

# Names as `torch.cuda.get_device_name` returns them; those of boards without a GPU are in their device tree.
NAMES = {
    "p100": ["Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB"],
    "v100-16": ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla V100-FHHL-16GB", "Tesla V100-DGXS-16GB"],
    "v100-32": ["Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-PCIE-32GB", "Tesla V100-DGXS-32GB"],
    "t4": ["Tesla T4", "NVIDIA T4"],
    "a100-40": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-SXM4-40GB"],
    "a100-80": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100-SXM-80GB"],
    "a10g": ["NVIDIA A10G"],
    "l4": ["NVIDIA L4"],
    "l40s": ["NVIDIA L40S"],
    "h100-80": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"],
    "h200": ["NVIDIA H200"],
    "gh200-96": ["NVIDIA GH200 480GB", "NVIDIA GH200 120GB"],
    "p4000": ["Quadro P4000"],
    "titan-rtx": ["TITAN RTX", "NVIDIA TITAN RTX"],
    "rtx-6000": ["Quadro RTX 6000"],
    "a4000": ["NVIDIA RTX A4000", "RTX A4000"],
    "a5000": ["NVIDIA RTX A5000", "RTX A5000"],
    "a6000": ["NVIDIA RTX A6000", "RTX A6000"],
    "rtx-2080": ["NVIDIA GeForce RTX 2080", "GeForce RTX 2080"],
    "rtx-2080-ti": ["NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti"],
    "rtx-3090": ["NVIDIA GeForce RTX 3090", "GeForce RTX 3090"],
    "rtx-4090": ["NVIDIA GeForce RTX 4090"],
    "jetson-nano": ["NVIDIA Tegra X1"],
    "jetson-tx2": ["NVIDIA Tegra X2"],
    "jetson-xavier-nx": ["Xavier"],
    "jetson-agx-xavier": ["Xavier"],
    "jetson-orin-nano": ["Orin", "Orin (nvgpu)"],
    "jetson-agx-orin": ["Orin", "Orin (nvgpu)"],
    "raspberry-pi-4": [f"Raspberry Pi 4 Model B Rev {revision}" for revision in ("1.1", "1.2", "1.4", "1.5")],
}

# Devices that are of none of these kinds.
OTHERS = [
    "CPU",
    "Tesla P40",
    "Tesla V100S-PCIE-32GB",
    "NVIDIA T400 4GB",
    "NVIDIA T4G",
    "GRID T4-16Q",
    "NVIDIA A100X",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA A10",
    "NVIDIA L40",
    "NVIDIA L40G",
    "NVIDIA H100 NVL",
    "NVIDIA H20",
    "NVIDIA H200 NVL",
    "Quadro P4000 with Max-Q Design",
    "Quadro RTX 4000",
    "Quadro RTX 6000 with Max-Q Design",
    "NVIDIA TITAN V",
    "NVIDIA TITAN Xp",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX 4000 SFF Ada Generation",
    "NVIDIA RTX A4000 Laptop GPU",
    "NVIDIA RTX A5000 Laptop GPU",
    "NVIDIA RTX A5500",
    "NVIDIA GeForce RTX 2080 SUPER",
    "NVIDIA GeForce RTX 2080 with Max-Q Design",
    "NVIDIA GeForce RTX 2080 Super with Max-Q Design",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA Thor",
    "Raspberry Pi 3 Model B Rev 1.4",
    "Raspberry Pi 5 Model B Rev 1.0",
    "Raspberry Pi 400 Rev 1.0",
    "Raspberry Pi Compute Module 4 Rev 1.0",
]


def test_the_table_has_all_kinds() -> None:
    assert set(NAMES) == set(DATASHEET)


@pytest.mark.parametrize("kind", NAMES)
def test_a_device_is_told_by_its_model(kind: str) -> None:
    """Two kinds of one model may share their names: they differ in memory only, or are modules of one chip."""
    assert [name for name in NAMES[kind] if not is_kind(kind, name)] == []
    alike = {"v100-16", "v100-32"}, {"a100-40", "a100-80"}
    same = next((kinds for kinds in alike if kind in kinds), {kind})
    own = {name for each in same for name in NAMES[each]} | set(NAMES[kind])
    known = {name for names in NAMES.values() for name in names}
    assert [name for name in (*known, *OTHERS) if name not in own and is_kind(kind, name)] == []


def test_a_board_without_a_gpu_is_named_by_its_device_tree(tmp_path: Path) -> None:
    board = tmp_path / "model"
    assert cpu_name(board) == "CPU"
    board.write_text("linux,dummy-virt\0")
    assert cpu_name(board) == "CPU"
    board.write_text("Raspberry Pi 4 Model B Rev 1.4\0")
    assert is_kind("raspberry-pi-4", cpu_name(board))


def test_a_cpu_is_a_cpu_and_kinds_of_the_user_are_what_the_user_says() -> None:
    assert is_kind("cpu", "CPU")
    assert is_kind("cpu-slow", "CPU")
    assert is_kind("cpu", "NVIDIA L40S"), "its CPU computes"
    assert is_kind("my-board", "CPU")
    assert is_kind("my-board", "NVIDIA L40S")

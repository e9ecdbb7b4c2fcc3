"""A rank trains on a device of the kind that the plan names, or says that it does not."""

import pytest

from executor.training.device import is_kind, refuse_other_kind
from planner.scenario.datasheet import DATASHEET
from traces.common.errors import InputError

# Names as NVIDIA's driver gives them.
NAMES = {
    "a100-40": "NVIDIA A100-SXM4-40GB",
    "a100-80": "NVIDIA A100 80GB PCIe",
    "v100-16": "Tesla V100-SXM2-16GB",
    "t4": "Tesla T4",
    "h100-80": "NVIDIA H100 80GB HBM3",
    "gh200-96": "NVIDIA GH200 480GB",
    "rtx-3090": "NVIDIA GeForce RTX 3090",
    "rtx-2080-ti": "NVIDIA GeForce RTX 2080 Ti",
    "titan-rtx": "NVIDIA TITAN RTX",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "jetson-agx-orin": "Orin",
    "jetson-nano": "NVIDIA Tegra X1",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_device_is_told_by_its_model(kind: str) -> None:
    assert kind in DATASHEET
    assert is_kind(kind, NAMES[kind])
    assert not is_kind(kind, "CPU")
    others = [name for other, name in NAMES.items() if other.rpartition("-")[0] != kind.rpartition("-")[0]]
    assert not any(is_kind(kind, name) for name in others)


def test_a_cpu_is_a_cpu_and_kinds_of_the_user_are_what_the_user_says() -> None:
    assert is_kind("cpu", "CPU")
    assert is_kind("cpu-slow", "CPU")
    assert is_kind("cpu", "NVIDIA L40S"), "its CPU computes"
    assert is_kind("my-board", "CPU")
    assert is_kind("my-board", "NVIDIA L40S")


def test_another_kind_is_refused_with_one_line() -> None:
    with pytest.raises(InputError) as refused:
        refuse_other_kind("cloud-gpu", "a100-40")
    text = str(refused.value)
    assert text.startswith("--compute real: device 'cloud-gpu' is of the kind 'a100-40', but torch finds")
    assert "give '--on-this-device'" in text
    assert "\n" not in text

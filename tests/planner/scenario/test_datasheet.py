import pickle

import pytest

from planner.scenario.datasheet import DATASHEET, DeviceKind, find_kind
from planner.scenario.training import PRECISIONS
from traces.common.errors import InputError

KINDS = list(DATASHEET.values())


def test_there_are_enough_kinds_under_their_own_lower_case_names() -> None:
    assert len(DATASHEET) >= 24
    assert all(name == kind.name == name.lower() for name, kind in DATASHEET.items())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_figures_are_plausible(kind: DeviceKind) -> None:
    assert "fp32" in kind.peak_flops
    assert set(kind.peak_flops) <= set(PRECISIONS)
    assert all(1e10 < peak < 2e15 for peak in kind.peak_flops.values())
    assert 4 * 2**30 <= kind.memory_bytes <= 256 * 2**30
    assert 1e10 < kind.memory_bandwidth_bytes_per_s < 1e13


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_fewer_bits_are_never_slower(kind: DeviceKind) -> None:
    by_bits = ("fp32", "tf32", "fp16", "bf16", "fp8")
    peaks = [kind.peak_flops[precision] for precision in by_bits if precision in kind.peak_flops]
    assert peaks == sorted(peaks)
    assert kind.peak_flops.get("bf16") in (None, kind.peak_flops.get("fp16"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_names_a_vendor_document_and_its_year(kind: DeviceKind) -> None:
    assert kind.source.startswith(("NVIDIA ", "Raspberry Pi "))
    assert any(f"{year}" in kind.source for year in range(2016, 2026))


def test_find_kind() -> None:
    assert find_kind("v100-16").memory_bytes == 16 * 2**30


def test_a_kind_can_go_to_a_worker_process() -> None:
    assert pickle.loads(pickle.dumps(find_kind("t4"))) == find_kind("t4")


def test_an_unknown_kind_is_answered_with_the_closest_and_the_valid_ones() -> None:
    with pytest.raises(InputError) as caught:
        find_kind("a100-4O")
    assert "unknown device kind 'a100-4O'" in str(caught.value)
    assert "did you mean 'a100-40'?" in str(caught.value)
    assert "raspberry-pi-4" in str(caught.value)

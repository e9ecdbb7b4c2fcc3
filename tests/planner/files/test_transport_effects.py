"""The key ``transport`` of a scenario's effects: NCCL, and copies between GPU and host."""

from pathlib import Path

import pytest

from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.files.scenario import read_scenario
from planner.scenario.effects import TransportEffects
from traces.common.errors import InputError

SCENARIO = """\
name: gpus
cluster:
  kinds: {mine: {peak: 5 TFLOP/s, memory: 16 GiB, memory_bandwidth: 300 GB/s}}
  devices:
    - {name: a0, kind: a100-40, region: west}
    - {name: b0, kind: KIND, region: west}
  links: [{inside: west, bandwidth: 1 Gbit/s, latency: 1 ms}]
model:
  name: tiny
  layers:
    - {name: layer, repeat: 3, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP}
training: {global_batch: 8}
"""


def read(folder: Path, effects: str, kind: str = "l4") -> TransportEffects:
    (folder / "gpus.yaml").write_text(f"{SCENARIO.replace('KIND', kind)}effects: {effects}\n")
    scenario = read_scenario(folder / "gpus.yaml")
    write_resolved_scenario(scenario, folder / "resolved.json")
    assert read_resolved_scenario(folder / "resolved.json").effects == scenario.effects
    return scenario.effects.transport


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("{}", TransportEffects()),
        ("{nccl: false}", TransportEffects(nccl=False)),
        ("{copies: true}", TransportEffects(copies=True)),
        ("{copy_rate: 9 GB/s, nccl: false}", TransportEffects(nccl=False, copies=True, copy_bps=72e9)),
    ],
)
def test_the_way_out_of_gpus(transport: str, expected: TransportEffects, tmp_path: Path) -> None:
    assert read(tmp_path, f"{{transport: {transport}}}") == expected


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ("{transport: {copy_rate: 12}}", ("effects.transport.copy_rate", "12 has no unit")),
        ("{transport: {copy_rate: 0 bit/s}}", ("effects.transport.copy_rate", "copies at 0 bit/s", "above zero")),
        ("{transport: {ncl: false}}", ("effects.transport.ncl", "did you mean 'nccl'?")),
        (
            "{compute: {transfers_block: true}, transport: {copy_rate: 9 GB/s}}",
            ("effects", "one stream for compute and transfers", "leave one of the two out"),
        ),
        (
            "{transport: {copies: true}}",
            ("effects.transport.copies", "no rate of copies for the kind 'mine' of device 'b0'", "copy_rate"),
        ),
    ],
)
def test_a_mistake_is_answered_in_one_line(effects: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read(tmp_path, effects, "mine")
    assert "\n" not in str(refused.value)
    assert all(part in str(refused.value) for part in expected), str(refused.value)

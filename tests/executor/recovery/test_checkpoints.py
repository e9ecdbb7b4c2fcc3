"""Checkpoints as files: what is damaged, half-written, or of somebody else is never taken for the state of a model."""

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from executor.core.job import CHECKPOINTS_KEPT
from executor.recovery.checkpoint_file import DamagedError, Part, Share, read_header, read_layer, with_outer
from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.claim import check_held, held
from planner.files.plan import plan_json
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import WEIGHT_INDEX
from traces.common.errors import InputError, RopebridgeError, RunError

MODEL = ("weight [3] by sgd", "weight [2] by sgd", "no parameters by sgd")
ROWS = {
    0: torch.arange(12, dtype=torch.uint8),
    1: torch.arange(40, 48, dtype=torch.uint8),
    2: torch.zeros(0, dtype=torch.uint8),
}


def _halves(row: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer's state in tensors of which the names are not in alphabetical order."""
    return {"weight": row[:4].clone().view(torch.float32), "bias:step": row[4:].clone()}


def row_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a layer's tensors one after the other."""
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *(each.view(torch.uint8) for each in tensors.values())])


def write_whole(folder: CheckpointFolder, step: int) -> None:
    """As two devices do."""
    folder.write("edge", Part(step, f"plan of {step}", 8 * step, MODEL, {0: {"weight": ROWS[0] + step}}))
    folder.write("a/b", Part(step, f"plan of {step}", 8 * step, MODEL, {1: _halves(ROWS[1] + step), 2: {}}))


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (5, 10):
        write_whole(folder, step)
    folder.write("edge", Part(15, "plan of 15", 120, MODEL, {0: {"weight": ROWS[0]}}))
    told: list[str] = []
    found = folder.newest(MODEL, told.append)
    assert (found.step, found.plan) == (10, "plan of 10")
    assert told == ["the checkpoint of step 15 is not used: incomplete: layers 1, 2 are missing"]
    for layer, row in ROWS.items():
        assert torch.equal(row_of(found.tensors(layer)), row + 10)


def test_a_checkpoint_of_separate_pipelines_has_the_state_of_each(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (5, 10, 15):
        for pipeline in range(2) if step < 15 else range(1):
            state = {layer: {"weight": row + step + pipeline} for layer, row in ROWS.items()}
            state[1] = with_outer(state[1], {"common": torch.tensor([0.5, step, pipeline])})
            part = Part(step, "the plan", 8 * step, MODEL, state, pipelines=2)
            folder.of_pipeline(pipeline).write("edge", part)
    told: list[str] = []
    found = folder.newest(MODEL, told.append)
    assert found.step == 10
    assert told == ["the checkpoint of step 15 is not used: incomplete: layers 0, 1, 2 are missing"]
    for pipeline in range(2):
        own = found.of_pipeline(pipeline)
        for layer, row in ROWS.items():
            assert torch.equal(row_of(own.tensors(layer)), row + 10 + pipeline)
        assert own.outer(1)["common"].tolist() == [0.5, 10, pipeline]
        assert not own.outer(0)
    # A pipeline that has no state of its own begins with that of the first one.
    assert torch.equal(row_of(found.of_pipeline(2).tensors(0)), ROWS[0] + 10)


@given(data=st.data())
def test_whatever_happens_to_a_file_it_is_read_as_it_was_written_or_not_at_all(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = CheckpointFolder(tmp_path_factory.mktemp("checkpoints"))
    write_whole(folder, 5)
    (path,) = folder.path.glob("*/a*")
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="cut off"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        header = read_header(path)
        rows = {layer: row_of(read_layer([path], layer)) for layer in (1, 2)}
    except DamagedError:
        return
    assert (header.step, header.plan, header.model) == (5, "plan of 5", MODEL)
    for layer, row in rows.items():
        assert row.numpy().tobytes() == (ROWS[layer] + 5).numpy().tobytes()


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (5, 10):
        write_whole(folder, step)
    path = tmp_path / "step-00000010" / "edge.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    told: list[str] = []
    assert folder.newest(MODEL, told.append).step == 5
    assert told == [
        f"the checkpoint of step 10 is not used: {path}: the bytes of layer 0 are not those that were written"
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ((*MODEL, "weight [2] by sgd"), "3 layers instead of 4"),
        (
            (MODEL[0], "weight [2] by adamw", MODEL[2]),
            r"layer 1 has weight \[2\] by sgd, and here weight \[2\] by adamw",
        ),
    ],
)
def test_another_models_is_refused(model: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write_whole(folder, 5)
    with pytest.raises(InputError, match=f"this checkpoint is of another model: {expected}"):
        folder.newest(model, lambda _: None)


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no complete checkpoint; .* leave out '--resume'"):
        CheckpointFolder(tmp_path / "absent").newest(MODEL, lambda _: None)


def test_old_ones_go(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in range(5, 40, 5):
        write_whole(folder, step)
        folder.drop_old(first=5, written=step, kept=CHECKPOINTS_KEPT)
    assert folder.steps == [5, 20, 25, 30, 35]


def test_what_a_run_that_went_back_writes_again_stays(tmp_path: Path) -> None:
    """Other devices still write there."""
    folder = CheckpointFolder(tmp_path)
    for step in (*range(5, 40, 5), 10, 15):
        write_whole(folder, step)
        folder.drop_old(first=5, written=step, kept=CHECKPOINTS_KEPT)
        assert step in folder.steps
    assert folder.steps == [5, 10, 15, 20, 25, 30, 35]


HOLDS = """
import sys
from pathlib import Path
from executor.recovery.claim import held
with held(Path(sys.argv[1])) as mark:
    print(mark, flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock goes with its process, however that ends."""
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"shared_folder_s": 1}')
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            mark = other.stdout.readline().strip()
            with pytest.raises(InputError, match="another run writes its checkpoints here"), held(tmp_path):
                pass
            check_held(tmp_path, mark)
        finally:
            other.kill()
    with held(tmp_path), pytest.raises(InputError, match="not the same folder as on the head"):
        check_held(tmp_path, mark)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("error", [None, InputError("wrong"), RunError("lost")])
def test_a_run_that_writes_nothing_leaves_no_trace(is_there: bool, error: Exception | None, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    if is_there:
        folder.mkdir(parents=True)
    with suppress(RopebridgeError), held(folder):
        if error is not None:
            raise error
    assert list(tmp_path.rglob("*")) == ([folder.parent, folder] if is_there else [])


@pytest.mark.parametrize("is_used", [False, True])
def test_what_was_there_or_is_written_stays(is_used: bool, tmp_path: Path) -> None:
    if is_used:
        (tmp_path / "step-00000001").mkdir()
    with suppress(InputError), held(tmp_path):
        (tmp_path / "step-00000002").mkdir()
        raise InputError("wrong")
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"lock", "mark", "step-00000002", *(["step-00000001"] if is_used else [])}


def test_of_many_runs_that_leave_no_trace_one_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    holders: list[str] = []
    times = 0

    def hold_often(_: int) -> None:
        nonlocal times
        for _ in range(30):
            with suppress(InputError), held(folder) as mark:
                holders.append(mark)
                assert (folder / "mark").read_text() == mark
                assert holders == [mark]
                holders.remove(mark)
                times += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold_often, range(4)))
    assert times > 4
    # The folder stays if the last run found that of another.
    assert not list(tmp_path.rglob("checkpoints/*"))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").write_text("a file where a folder should be")
    with pytest.raises(RunError, match=r"checkpoint .*/edge.safetensors: .*earlier checkpoints are complete"):
        CheckpointFolder(tmp_path).write("edge", Part(5, "plan", 40, MODEL, {0: {"weight": ROWS[0]}}))


# --- parts of tensor-parallel groups, and the index -------------------------------------------------------------

LAYERS = {
    0: {"table": torch.arange(48.0).view(12, 4), "table:step": torch.tensor(3.0)},
    1: {"a.weight": torch.arange(48.0, 96.0).view(4, 12), "a.bias": torch.ones(12), "norm": torch.zeros(4)},
}
DIMENSIONS = {0: {"table": 0}, 1: {"a.weight": 1, "a.bias": 0}}
SHAPES = tuple(f"{list(tensors)} by sgd" for tensors in LAYERS.values())


def write_group(folder: CheckpointFolder, step: int, layers: Mapping[int, Mapping], devices: list[str]) -> None:
    """As the devices of a group do: each its parts, and the first one what is not sharded."""
    for index, device in enumerate(devices):
        share = Share(index, len(devices), {layer: DIMENSIONS[layer] for layer in layers} if len(devices) > 1 else {})
        own = {}
        for layer, tensors in layers.items():
            cut = share.dimensions.get(layer, {})
            own[layer] = {
                name: each.chunk(len(devices), cut[name])[index].clone() if name in cut else each
                for name, each in tensors.items()
                if not index or name in cut
            }
        folder.write(device, Part(step, "plan", 8, SHAPES, own, share))


def read_by_index(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by another program that knows only safetensors and the index."""
    index = json.loads((step / WEIGHT_INDEX).read_text())

    def tensor(file: str, name: str) -> torch.Tensor:
        with safe_open(step / file, framework="pt") as opened:
            return opened.get_tensor(name)

    found = {name: tensor(file, name) for name, file in index["weight_map"].items()}
    for name, parts in index.get("sharded", {}).items():
        found[name] = torch.cat([tensor(file, name) for file in parts["files"]], parts["dimension"])
    return found


@given(degrees=st.tuples(*[st.sampled_from([1, 2, 4])] * 2), one_group=st.booleans())
def test_parts_of_groups_are_read_as_whole_tensors(
    degrees: tuple[int, int], one_group: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = CheckpointFolder(tmp_path_factory.mktemp("checkpoints"))
    names = [[f"{layer}-{index}" for index in range(degree)] for layer, degree in enumerate(degrees)]
    if one_group:
        write_group(folder, 5, LAYERS, names[0])
    else:
        for layer, devices in enumerate(names):
            assert not (folder.path / "step-00000005" / WEIGHT_INDEX).exists()
            write_group(folder, 5, {layer: LAYERS[layer]}, devices)
    assert folder.newest_step() == 5
    found = folder.newest(SHAPES, pytest.fail)
    by_index = read_by_index(folder.path / "step-00000005")
    assert len(by_index) == sum(map(len, LAYERS.values()))
    for layer, tensors in LAYERS.items():
        read = found.tensors(layer)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(read[name], tensor)
            assert torch.equal(by_index[f"{layer}.{name}"], tensor)
    # Each number is written once.
    parts = {path: read_header(path) for path in folder.parts(5)}
    written = 0
    for path in parts:
        with safe_open(path, framework="pt") as file:
            written += sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert written == sum(each.numel() for tensors in LAYERS.values() for each in tensors.values())


def test_a_group_without_one_of_its_devices_is_incomplete(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write_group(folder, 5, LAYERS, ["a", "b"])
    write_group(folder, 10, LAYERS, ["a", "b"])
    (tmp_path / "step-00000010" / "b.safetensors").unlink()
    told: list[str] = []
    assert folder.newest(SHAPES, told.append).step == 5
    assert told == ["the checkpoint of step 10 is not used: incomplete: layers 0, 1 are missing"]
    assert folder.newest_step() == 5


def test_parts_of_another_plan_do_not_mix(tmp_path: Path) -> None:
    """A run that went back to an earlier step may write the same step with other groups."""
    folder = CheckpointFolder(tmp_path)
    write_group(folder, 5, LAYERS, ["a", "b", "c", "d"])
    (tmp_path / "step-00000005" / "c.safetensors").unlink()
    write_group(folder, 5, LAYERS, ["a", "b"])
    found = folder.newest(SHAPES, pytest.fail)
    assert torch.equal(found.tensors(0)["table"], LAYERS[0]["table"])


def plan_on(device: str) -> str:
    return plan_json(
        Plan("made up", "made up", "hand", "1f1b", (Pipeline((Stage(0, 3, (Replica(device),), 1),), (4,)),))
    )


WHOLE_STATE = {layer: {"weight": row} for layer, row in ROWS.items()}


@pytest.mark.parametrize("late", [False, True])
def test_parts_of_two_plans_do_not_mix(late: bool, tmp_path: Path) -> None:
    """A run that went back after a loss writes a step again, by another plan; an old part may still be on its way."""
    folder = CheckpointFolder(tmp_path)
    old, new = plan_on("z"), plan_on("x")
    folder.write("z", Part(8, old, 64, MODEL, WHOLE_STATE))
    folder.write("y", Part(8, new, 64, MODEL, {1: {"weight": ROWS[1] + 1}, 2: {}}))
    found = folder.newest(MODEL, pytest.fail)
    assert (found.plan, row_of(found.tensors(1)).tolist()) == (old, ROWS[1].tolist())
    if late:
        folder.write("x", Part(8, old, 64, MODEL, WHOLE_STATE))
    folder.write("x", Part(8, new, 64, MODEL, {0: {"weight": ROWS[0] + 1}}))
    found = folder.newest(MODEL, pytest.fail)
    assert found.plan == new
    for layer, row in ROWS.items():
        assert torch.equal(row_of(found.tensors(layer)), row + 1)
    index = json.loads((tmp_path / "step-00000008" / WEIGHT_INDEX).read_text())
    assert set(index["weight_map"].values()) == {"x.safetensors", "y.safetensors"}


def test_pipelines_of_different_plans_are_no_checkpoint(tmp_path: Path) -> None:
    """The second one has not been written again yet."""
    folder = CheckpointFolder(tmp_path)
    state = {layer: {"weight": row} for layer, row in ROWS.items()}
    for pipeline, plan in enumerate((plan_on("x"), plan_on("z"))):
        folder.of_pipeline(pipeline).write("x", Part(8, plan, 64, MODEL, state, pipelines=2))
    assert folder.newest_step() is None
    folder.of_pipeline(1).write("y", Part(8, plan_on("x"), 64, MODEL, state, pipelines=2))
    assert folder.newest_step() == 8


@pytest.mark.parametrize("kept", [1, 4])
@pytest.mark.parametrize("ratio", [1, 3, 12])
def test_the_newest_checkpoint_of_all_workers_stays(ratio: int, kept: int, tmp_path: Path) -> None:
    """One worker writes its part so many checkpoints later than the other, and leaves those between out."""
    folder = CheckpointFolder(tmp_path)

    def write(pipeline: int, step: int) -> None:
        own = folder.of_pipeline(pipeline)
        own.write("x", Part(step, "the plan", step, MODEL, WHOLE_STATE, pipelines=2))
        folder.clear(own, 2, 0, step, kept, own_speed=True)

    for step in range(1, 60):
        write(0, step)
        if step % ratio == 0 and step > ratio:
            write(1, step - ratio)
            assert folder.newest(MODEL, lambda _: None).step == step - ratio
    most = 2 * (kept + ratio + 1)
    assert all(len(each.steps) <= most for each in (folder, *folder.others))


def test_absences_in_turn_leave_a_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for pipeline, step in ((0, 10), (1, 10), (0, 20), (1, 30), (0, 40)):
        own = folder.of_pipeline(pipeline)
        own.write("x", Part(step, "the plan", step, MODEL, WHOLE_STATE, pipelines=2))
        folder.clear(own, 2, 0, step, 1, own_speed=False)
    assert folder.newest(MODEL, lambda _: None).step == 10


def test_incomplete_ones_do_not_drive_out_the_newest_complete_one(tmp_path: Path) -> None:
    """Every pipeline has a folder of each step, but one of two devices has given nothing to the newer ones."""
    folder = CheckpointFolder(tmp_path)
    for step in range(1, 8):
        for pipeline in range(2):
            own = folder.of_pipeline(pipeline)
            states = [{0: WHOLE_STATE[0]}, {layer: WHOLE_STATE[layer] for layer in (1, 2)}]
            for device, state in zip("xy", states[: 2 if step <= 2 else 1], strict=False):
                own.write(device, Part(step, "the plan", step, MODEL, state, pipelines=2))
            folder.clear(own, 2, 0, step, 2, own_speed=True)
    assert folder.newest(MODEL, lambda _: None).step == 2

"""Checkpoints as files: what is damaged, half-written, or of somebody else is never taken for the state of a model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.recovery.checkpoint_file import DamagedError, read_header, read_row
from executor.recovery.checkpoints import CheckpointFolder
from traces.common.errors import InputError, RunError

MODEL = ("weight [3] by sgd", "weight [2] by sgd", "no parameters by sgd")
ROWS = {
    0: torch.arange(12, dtype=torch.uint8),
    1: torch.arange(40, 48, dtype=torch.uint8),
    2: torch.zeros(0, dtype=torch.uint8),
}


def _halves(row: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer's state in tensors of which the names are not in alphabetical order."""
    return {"weight": row[:4].clone().view(torch.float32), "bias:step": row[4:].clone()}


def write_whole(folder: CheckpointFolder, step: int) -> None:
    """As two devices do."""
    folder.write("edge", step, f"plan of {step}", 8 * step, MODEL, {0: {"weight": ROWS[0] + step}})
    folder.write("a/b", step, f"plan of {step}", 8 * step, MODEL, {1: _halves(ROWS[1] + step), 2: {}})


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (5, 10):
        write_whole(folder, step)
    folder.write("edge", 15, "plan of 15", 120, MODEL, {0: {"weight": ROWS[0]}})
    told: list[str] = []
    found = folder.newest(MODEL, told.append)
    assert (found.step, found.plan) == (10, "plan of 10")
    assert told == ["the checkpoint of step 15 is not used: incomplete: layers 1, 2 are missing"]
    for layer, row in ROWS.items():
        assert torch.equal(found.row(layer), row + 10)


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
        rows = {layer: read_row(path, layer) for layer in (1, 2)}
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
        folder.drop_old(first=5, written=step)
    assert folder.steps == [5, 20, 25, 30, 35]


def test_what_a_run_that_went_back_writes_again_stays(tmp_path: Path) -> None:
    """Other devices still write there."""
    folder = CheckpointFolder(tmp_path)
    for step in (*range(5, 40, 5), 10, 15):
        write_whole(folder, step)
        folder.drop_old(first=5, written=step)
        assert step in folder.steps
    assert folder.steps == [5, 10, 15, 20, 25, 30, 35]


HOLDS = """
import sys
from pathlib import Path
from executor.recovery.checkpoints import CheckpointFolder
with CheckpointFolder(Path(sys.argv[1])).held() as mark:
    print(mark, flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock goes with its process, however that ends."""
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"shared_folder_s": 1}')
    own = CheckpointFolder(tmp_path)
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            mark = other.stdout.readline().strip()
            with pytest.raises(InputError, match="another run writes its checkpoints here"), own.held():
                pass
            own.check_held(mark)
        finally:
            other.kill()
    with own.held(), pytest.raises(InputError, match="not the same folder as on the head"):
        own.check_held(mark)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "step-00000005").write_text("a file where a folder should be")
    with pytest.raises(RunError, match=r"checkpoint .*/edge.safetensors: .*earlier checkpoints are complete"):
        CheckpointFolder(tmp_path).write("edge", 5, "plan", 40, MODEL, {0: {"weight": ROWS[0]}})

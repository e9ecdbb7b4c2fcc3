"""What is wrong with the data of a scenario is said in one line, before anything is started."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.token_files import write_scenario, write_tokens

KEYS = [
    ("{length: 16}", "training.data: the data needs one source; give one of 'tokens', 'dataset', 'huggingface'"),
    ("{tokens: t, length: 8, dataset: d.py}", "training.data: the data needs one source"),
    ("{tokens: t}", "training.data: the key 'length' is missing; add 'length:' to 'tokens'"),
    ("{huggingface: h, inputs: a}", "training.data: the key 'targets' is missing; add 'targets:' to 'huggingface'"),
    ("{dataset: d.py, length: 8}", "training.data.length: 'length' belongs to 'tokens'; leave it out with 'dataset'"),
    (
        "{tokens: t, length: 8, dtype: int8}",
        "training.data.dtype: unknown type of token numbers 'int8'; did you mean 'uint32'? valid: uint16",
    ),
    ("{tokens: t, length: 0}", "training.data.length: 0 is not valid"),
    ("{tokens: t, length: 8, workers: -1}", "training.data.workers: -1 is not valid"),
    ("{token: t, length: 8}", "training.data.token: unknown key 'token'; did you mean 'tokens'"),
    ("nowhere.yaml", "training.data: there is no such file: 'nowhere.yaml'"),
]


@pytest.mark.parametrize(("data", "message"), KEYS)
def test_keys_that_do_not_go_together(data: str, message: str, tmp_path: Path) -> None:
    done = ropebridge("simulate", write_scenario(tmp_path, data))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


def no_folder(folder: Path) -> str:
    return "{tokens: nowhere, length: 16}"


def no_files(folder: Path) -> str:
    (folder / "tokens").mkdir()
    (folder / "tokens" / "text.txt").write_text("no tokens")
    return "{tokens: tokens, length: 16}"


def odd_bytes(folder: Path) -> str:
    path = write_tokens(folder / "tokens", [range(40), range(40)]) / "part-01.bin"
    path.write_bytes(path.read_bytes() + b"x")
    return "{tokens: tokens, length: 16}"


def too_few(folder: Path) -> str:
    write_tokens(folder / "tokens", [range(16), range(5), []])
    return "{tokens: tokens, length: 16}"


def no_code(folder: Path) -> str:
    return "{dataset: nowhere.py}"


def code(text: str, more: str = "") -> Callable[[Path], str]:
    def written(folder: Path) -> str:
        (folder / "dataset.py").write_text(
            f"import torch\nfrom torch.utils.data import Dataset, IterableDataset\n{text}\n"
        )
        return f"{{dataset: dataset.py{more}}}"

    return written


def no_saved(folder: Path) -> str:
    pytest.importorskip("datasets")
    return "{huggingface: nowhere, inputs: a, targets: a}"


def not_saved(folder: Path) -> str:
    pytest.importorskip("datasets")
    (folder / "saved").mkdir()
    return "{huggingface: saved, inputs: a, targets: a}"


def no_column(folder: Path) -> str:
    pytest.importorskip("datasets").Dataset.from_dict({"a": [[1, 2]]}).save_to_disk(folder / "saved")
    return "{huggingface: saved, inputs: a, targets: b}"


def several(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_dict({"a": [[1, 2]]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(folder / "saved")
    return "{huggingface: saved, inputs: a, targets: a}"


UNSIZED = "class D(Dataset):\n    def __getitem__(self, i):\n        return 1, 2\ndef build(): return D()"
STREAM = "class D(IterableDataset):\n    def __iter__(self):\n        return iter(ITEMS)\ndef build(): return D()"

DATA = {
    "no-folder": (no_folder, "nowhere: there is no such folder of tokens; correct 'tokens'"),
    "no-files": (no_files, "tokens: the folder has no file of tokens; its files must have names that end in .bin"),
    "odd-bytes": (odd_bytes, "part-01.bin: its 81 bytes are no whole number of uint16 numbers; write 2 bytes"),
    "too-few": (too_few, "tokens: no file has the 17 tokens of a sample: the longest has 16; add longer files"),
    "no-code": (no_code, "nowhere.py: there is no such file; check the path"),
    "no-build": (code("x = 1"), "dataset.py: the dataset file has no function 'build'; define build(**arguments)"),
    "arguments": (code("def build(): pass", ", arguments: {n: 1}"), "correct '--set', or 'arguments' of the scenario"),
    "build-fails": (code("def build(): return 1 / 0"), "'build' fails with the arguments {}: ZeroDivisionError"),
    "no-data-set": (code("def build(): return 5"), "'build' returns a int; return a torch Dataset or IterableDataset"),
    "no-len": (code(UNSIZED), "dataset.py: the data set has no '__len__'; add it, or make the data set an Iterable"),
    "empty": (code("def build(): return []"), "dataset.py: the data set has no samples; give it at least one"),
    "empty-stream": (code(STREAM.replace("ITEMS", "[]")), "the data set has no samples"),
    "no-pair": (
        code("def build(): return [{'a': 1}]"),
        "the sample at position 0 is a dict; give each sample as a pair (input, target) of tensors, arrays or numbers",
    ),
    "no-tensors": (code("def build(): return [(1, 'cat')]"), "the sample at position 0 is a tuple of int, str"),
    "item-fails": (code(STREAM.replace("iter(ITEMS)", "(1 / n for n in [0])")), "item 0 of the data set cannot be"),
    "workers": (
        code(STREAM.replace("ITEMS", "[(1, 2)]"), ", workers: 2"),
        "an IterableDataset cannot be read by 2 processes, each of which would read all of it; give 'workers: 1'",
    ),
    "no-saved": (no_saved, "nowhere: there is no such data set; correct 'huggingface'"),
    "not-saved": (not_saved, "saved: the data set cannot be opened: FileNotFoundError"),
    "no-column": (no_column, "saved: the data set has no column 'b'; name one of ['a']"),
    "several": (several, "saved: the folder has several data sets; name one of"),
}


@pytest.mark.parametrize(("write", "message"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_read(write: Callable[[Path], str], message: str, tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, write(tmp_path))
    # Neither planning nor a simulation needs the data.
    assert ropebridge("simulate", scenario, "--strategy=megatron", "--steps", 1).returncode == 0
    done = ropebridge("run", scenario, "--strategy=megatron", "--on-this-device", "--steps", 1)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("ropebridge: ")]
    assert message in line


def test_samples_of_unequal_shapes_end_the_run(tmp_path: Path) -> None:
    text = STREAM.replace("ITEMS", "[(torch.zeros(n, dtype=int), torch.zeros(16, dtype=int)) for n in (16, 16, 17)]")
    done = ropebridge("run", write_scenario(tmp_path, code(text)(tmp_path)), "--on-this-device", "--steps", 3)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "input and target of the sample at position 2 have shapes [17] and [16]; others have [16] and [16]"
        in done.stderr
    )

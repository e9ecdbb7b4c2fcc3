"""Files that would take gigabytes of memory, or never end, are refused with one line before they do."""

import os
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.files.documents import Document, parse_yaml
from tests.helpers.processes.command import ropebridge
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, RunError
from traces.common.text import read_text


def multiplied(base: str, entry: Callable[[str], str], lines: int = 30) -> str:
    """A text whose every line has the line before nine times."""
    names = [f"level{number}" for number in range(lines)]
    text = [f"{names[0]}: &{names[0]} {base}"]
    text += [f"{name}: &{name} {entry(', '.join([f'*{before}'] * 9))}" for before, name in pairwise(names)]
    return "\n".join(text)


TEXTS = {
    "lists.yaml": (multiplied("[1]", "[{}]".format), "more than 300,000 values"),
    "merges.yaml": (multiplied("{key: 1}", "{{<<: [{}]}}".format), "more than 300,000 values"),
    "deep-aliases.yaml": (
        "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 90))]),
        "nested too deeply",
    ),
    "deep.yaml": ("[" * 200 + "]" * 200, "nested too deeply"),
    "deep.json": ("[" * 200 + "]" * 200, "nested too deeply"),
    "deepest.json": ("[" * 100_000, "nested too deeply"),
    "itself.yaml": ("name: &all\n  - *all\n", ":1: the file is not YAML: a value contains itself"),
    "twice.json": ('{"name": {"a": 1, "b": 2, "a": 3}}', "the key 'a' is given twice"),
    "perhaps.yaml": ("name: !!bool perhaps", ":1: the file is not YAML: 'perhaps' is neither true nor false"),
    "no-number.yaml": ("name: !!int many", "invalid literal"),
    "set.yaml": ("name: !!set {a, b}", "the tag 'tag:yaml.org,2002:set' is not used here"),
    "code.yaml": ("name: !!python/object/apply:os.getcwd []", "is not used here"),
    "sixties.yaml": ("name: 1" + ":59" * 5000, "a number has 15001 digits"),
    "many-digits.yaml": ("name: " + "9" * 101, "a number has 101 digits"),
    "many-digits.json": ('{"name": ' + "9" * 101 + "}", "a number has 101 digits"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_multiply_are_refused(name: str, tmp_path: Path) -> None:
    text, problem = TEXTS[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Document(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{path}")
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc: -*&[]{}#!'\"\n"),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4),
        max_leaves=20,
    )
)
def test_other_values_are_read_as_they_were_written(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value)) == value


def test_aliases_that_do_not_multiply_are_read() -> None:
    text = "kinds: &kinds {a: 1}\nagain: *kinds\nmore: {<<: *kinds, b: 2}\n"
    assert parse_yaml(text) == {"kinds": {"a": 1}, "again": {"a": 1}, "more": {"a": 1, "b": 2}}


def special(folder: Path, kind: str) -> Path:
    """A path from which reading would never end, or take the memory of the machine."""
    path = folder / f"{kind}.yaml"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            os.chdir(folder)
            listening.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("w") as file:
            file.truncate(2**40)
    return path


@pytest.mark.parametrize("kind", ["socket", "device", "sparse"])
def test_special_and_huge_files_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = special(tmp_path, kind)
    problem = "more than 4.00 MiB" if kind == "sparse" else "is a device or socket; name a regular file"
    for arguments in (
        ["simulate", path, "--strategy", "megatron"],
        ["simulate", "two-regions", "--plan", path],
        ["traces", "show", path],
    ):
        done = ropebridge(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        (line,) = done.stderr.splitlines()
        assert str(path) in line
        assert problem in line or (kind == "sparse" and "has more than" in line), line


def test_special_files_of_traces_are_refused() -> None:
    with pytest.raises(InputError, match="is a device or socket"):
        read_text(Path("/dev/zero"), "")


def test_a_failed_removal_hides_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that turns read-only neither writing nor removing is possible."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fail)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunError, match="cannot be written: Read-only file system"):
        write_text_atomically(tmp_path / "out.txt", "text")

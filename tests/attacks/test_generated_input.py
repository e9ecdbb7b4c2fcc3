"""Wrong input that a generator makes, over all kinds of files and verbs: refused in a line, with nothing left behind.

Each test prints its seed; ``ROPEBRIDGE_TEST_SEED`` repeats it. One command of a seed is repeated by the number in the
failure's message: ``ROPEBRIDGE_TEST_CASE``.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
import yaml

from tests.attacks.documents import Drawing, grafted
from tests.attacks.extremes import spoiled_extremely, spoiled_table, with_extreme_option
from tests.attacks.forking import MOST_BYTES, MOST_CPU_S, Done, Forker
from tests.attacks.mutations import TEXTS, replace_file, spoiled_text, spoiled_values
from tests.attacks.seeds import COMMANDS, Command, seeds_are_valid, write_seeds

# The process that forks, and the files, are made once.
pytestmark = pytest.mark.xdist_group("attacks")

MOST_LINES = 3

# Files for which there is a schema.
SCHEMA_OF = {
    "small.yaml": "scenario",
    "plain.yaml": "scenario",
    "imported.yaml": "scenario",
    "plan.json": "plan",
    "run/plan.json": "plan",
}


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker() as made:
        yield made


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    write_seeds(folder)
    return folder


def state(folder: Path) -> Mapping[str, tuple[int, int, int]]:
    """Kind, size and time of the last change of everything in a folder."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            about = os.lstat(path)
            changed = 0 if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
            found[os.path.relpath(path, folder)] = (about.st_mode, about.st_size if changed else 0, changed)
    return found


def problems(done: Done, before: Mapping[str, object], after: Mapping[str, object], left: Sequence[str]) -> list[str]:
    """What is wrong with the way in which a command has ended."""
    lines = done.err.strip().splitlines()
    found = {
        "a traceback": "Traceback" in done.err,
        f"status {done.status}": done.status not in (0, 1, 2),
        "it waits for ever": done.timed_out,
        f"{done.cpu_s:.1f} s of processor time": done.cpu_s > MOST_CPU_S,
        f"{done.peak_bytes / 2**20:.0f} MiB": done.peak_bytes > MOST_BYTES,
        "processes are left": done.left,
        f"temporary files are left: {left}": bool(left),
        "no word of what is wrong": done.status != 0 and not lines,
        f"{len(lines)} lines": done.status != 0 and len(lines) > MOST_LINES,
        f"a changed folder: {sorted(before.items() ^ after.items())}": done.status != 0 and before != after,
        "characters that a terminal obeys": any(character in done.err for character in "\x1b\x07\x08"),
    }
    return [text for text, is_wrong in found.items() if is_wrong]


def attack(command: Command, folder: Path, random: Random) -> tuple[Sequence[str], str]:
    """Spoil one of a command's files, or one of its arguments; return the arguments, and what was spoiled."""
    (folder / "loop").symlink_to("loop")
    name = random.choice(command.spoiled)
    path, way = (
        folder / name,
        random.choice(
            ("values", "drawn", "drawn", "text", "text", "file", "arguments", "option", "extreme", "extreme", "extreme")
        ),
    )
    if way == "file":
        here = Path.cwd()
        os.chdir(folder)
        try:
            return command.arguments, f"{name} is {replace_file(path, random)}"
        finally:
            os.chdir(here)
    if way == "arguments":
        words = [*command.arguments]
        place, other = random.randrange(len(words)), random.randrange(len(words))
        if random.random() < 0.3:
            words[place:place] = words[other : other + 2]
            return words, f"argument {other} is given again as {place}"
        # A null byte cannot be in an argument; and no command may write outside of the folder.
        texts = [text.replace("\0", "") for text in TEXTS if not text.startswith(("/", "~", ".."))]
        words[place] = random.choice(("-o", "--steps", ".", "small.yaml", "run", "999999999", *texts))
        return words, f"argument {place} is {words[place][:80]!r}"
    if way == "option":
        words = with_extreme_option(command.arguments, random)
        return words, f"option {words[-2:]!r}"
    kind = SCHEMA_OF.get(name)
    if way == "drawn" and kind is not None:
        text = path.read_text()
        document = grafted(yaml.safe_load(text), Drawing(kind, random).document(), random)
        path.write_text(json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document, sort_keys=False))
    elif way == "extreme":
        content = path.read_bytes()
        is_tree = path.suffix in (".yaml", ".json")
        path.write_bytes(spoiled_extremely(content, name, random) if is_tree else spoiled_table(content, random))
    elif way in ("values", "drawn") and path.suffix in (".yaml", ".json"):
        path.write_bytes(spoiled_values(path.read_bytes(), name, random))
    else:
        way = "text"
        path.write_bytes(spoiled_text(path.read_bytes(), random))
    return command.arguments, f"{way} of {name}"


def attack_all(count: int, forker: Forker, seeds: Path, folder: Path) -> None:
    """Run commands with spoiled input, and fail with all that was wrong."""
    # As of other properties, `make test` draws the same examples each time.
    any_seed = str(int.from_bytes(os.urandom(4))) if os.environ.get("ROPEBRIDGE_TEST_EXAMPLES") == "all" else "0"
    seed = os.environ.get("ROPEBRIDGE_TEST_SEED") or any_seed
    only = os.environ.get("ROPEBRIDGE_TEST_CASE")
    print(f"ROPEBRIDGE_TEST_SEED={seed}")
    wrong, statuses = [], []
    for number in [int(only)] if only else range(count):
        random = Random(f"{seed}-{number}")
        command = COMMANDS[random.randrange(len(COMMANDS))]
        case = folder / str(number)
        shutil.copytree(seeds, case)
        arguments, what = attack(command, case, random)
        before = state(case)
        done = forker.run(arguments, case)
        left = os.listdir(forker.temporary)
        statuses.append(done.status)
        found = problems(done, before, state(case), left)
        if found:
            shown = done.err if only else done.err[-600:]
            wrong.append(
                f"case {number}: {' '.join(arguments)[:300]}\n  ({what})\n  {'; '.join(found)[:1000]}\n{shown}"
            )
        elif not only:
            shutil.rmtree(case)
        for each in left:
            shutil.rmtree(forker.temporary / each, ignore_errors=True)
    print({status: statuses.count(status) for status in sorted(set(statuses))})
    assert not wrong, f"ROPEBRIDGE_TEST_SEED={seed}\n" + "\n".join(wrong)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_commands_succeed_with_files_that_are_not_spoiled(
    every: int, forker: Forker, seeds: Path, tmp_path: Path
) -> None:
    failed = []
    for number, command in enumerate(seeds_are_valid(COMMANDS)[::every]):
        case = tmp_path / str(number)
        shutil.copytree(seeds, case)
        done = forker.run(command.arguments, case)
        if (done.status, done.timed_out, done.left, os.listdir(forker.temporary)) != (0, False, False, []):
            failed.append((" ".join(command.arguments), done))
    assert not failed


@pytest.mark.parametrize(
    ("most_file_bytes", "every"),
    [(600, 3), pytest.param(600, 1, marks=pytest.mark.slow), pytest.param(5000, 1, marks=pytest.mark.slow)],
)
def test_a_full_disk_is_told_and_nothing_is_left(
    most_file_bytes: int, every: int, forker: Forker, seeds: Path, tmp_path: Path
) -> None:
    failed = 0
    # The folder of a sweep that fails stays, so that the sweep can go on in it.
    commands = [each for each in COMMANDS if each.arguments[0] not in ("sweep", "backtest")]
    for number, command in enumerate(commands[::every]):
        case = tmp_path / str(number)
        shutil.copytree(seeds, case)
        before = state(case)
        done = forker.run(command.arguments, case, most_file_bytes)
        assert not problems(done, before, state(case), os.listdir(forker.temporary)), (command, done)
        failed += done.status in (1, 2)
    assert failed * every > 3


def test_wrong_input_is_refused(forker: Forker, seeds: Path, tmp_path: Path) -> None:
    attack_all(12, forker, seeds, tmp_path)


@pytest.mark.slow
def test_much_wrong_input_is_refused(forker: Forker, seeds: Path, tmp_path: Path) -> None:
    attack_all(2000, forker, seeds, tmp_path)

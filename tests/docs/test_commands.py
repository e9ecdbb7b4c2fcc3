"""What the documentation tells people to type: it runs where it can, and means something to the command everywhere."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import typer

from experiments.cli.app import app
from experiments.tools.documentation import main, reference_texts, verbs
from tests.helpers.processes.command import ropebridge

ROOT = Path(__file__).parents[2]
# Words that follow the name where it is no command.
PROSE = ("on", "plans,")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The tutorial's needs hosts: tests/real/test_first_hour.py.
RUNNABLE = [page for page in sorted((ROOT / "docs" / "howto").glob("*.md")) if "```bash" in page.read_text()]


def lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        for line in text.splitlines():
            for found in re.finditer(r"(?:^|[\s`\"'(])(ropebridge [a-z][^`]*)", line):
                is_code = line.startswith(("    ropebridge", "ropebridge", "ssh ")) or f"`{found.group(1)}`" in line
                is_prose = found.group(1).split()[1] in PROSE
                if is_code and not is_prose and "..." not in found.group(1):
                    yield f"{page.relative_to(ROOT)}", found.group(1)


LINES = sorted(set(lines()))


def test_there_is_something_to_check() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize(("page", "line"), LINES)
def test_every_command_in_the_documentation_is_one(page: str, line: str) -> None:
    # Without what a shell takes, explanations after a gap, and what may be left away.
    bare = re.split(r"\s{2,}|\s#|\s[|>&;]|\s2>", line)[0]
    for quote in "\"'":
        # The rest of a command for another machine.
        if bare.count(quote) % 2:
            bare = bare.rpartition(quote)[0]
    words = shlex.split(re.sub(r"\[.*?\]", "", bare))[1:]
    group = typer.main.get_command(app)
    name = "ropebridge"
    while words and hasattr(group, "commands") and not words[0].startswith("-"):
        assert words[0] in group.commands, f"{page}: {line}"
        name, group, words = words[0], group.commands[words[0]], words[1:]
    if words:
        group.make_context(name, words)


def shell(commands: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """What a shell does that ends with the first command that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


# Guides whose commands train or compute for long; tests of the same commands are quicker.
LONG = ("backtest", "deploy", "model", "sweep")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in LONG else []) for page in RUNNABLE],
)
def test_guides_do_what_they_say(page: Path, tmp_path: Path) -> None:
    """Lines that are no call of the command are a shell's; the calls run in this process, which is quicker."""
    typed = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)).replace("\\\n", " ")
    for is_call, lines in groupby(typed.splitlines(), lambda line: line.startswith("ropebridge ")):
        for part in lines if is_call else ["\n".join(lines)]:
            words = shlex.split(part, comments=True)
            done = ropebridge(*words[1:], cwd=tmp_path) if is_call else shell([part], tmp_path)
            assert done.returncode == 0, f"{part}\n{done.stdout}\n{done.stderr}"


@pytest.mark.timed
@pytest.mark.slow
def test_the_readme_s_ten_lines(tmp_path: Path) -> None:
    """With its scenario and a trace; only the editor is not opened."""
    readme = (ROOT / "README.md").read_text()
    (scenario,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "my-cluster.yaml").write_text(scenario)
    (tmp_path / "my-link.csv").write_text("time_s,bandwidth_mbps\n0,2000\n10,600\n20,\n")
    ten = readme.partition("## Ten lines")[2].partition("\n[![")[0]
    commands = [line.strip() for line in ten.splitlines() if line.startswith("    ropebridge ")]
    assert len(commands) == 9
    done = shell(commands, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 1e6


def test_the_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == f"## {version}"


def test_the_reference_is_current() -> None:
    for name, text in reference_texts().items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, "make reference"
    assert main is not None


@pytest.mark.parametrize("name", [name for name, _ in verbs()])
def test_every_verb_shows_an_example(name: str) -> None:
    command = dict(verbs())[name]
    assert command.help is not None
    assert f"Example: ropebridge {name}" in " ".join(command.help.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target

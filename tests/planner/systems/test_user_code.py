"""Whatever strategies and policies of users return or raise, the command ends with one line that names theirs."""

from pathlib import Path

import pytest

from planner.adapt.policy import measures_unused_links
from planner.systems.registry import make_policy
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, started
from tests.helpers.scenarios.builders import chain_scenario

HEAD = """import os
from dataclasses import replace
from planner.systems.registry import STRATEGIES
limit_s = 0.3

def changed(plan, **fields):
    (pipeline, *others) = plan.pipelines
    return replace(plan, pipelines=(replace(pipeline, **fields), *others))

def shared(plan, share):
    stage = plan.pipelines[0].stages[0]
    replicas = tuple(replace(replica, share=share) for replica in stage.replicas)
    return changed(plan, stages=(replace(stage, replicas=replicas), *plan.pipelines[0].stages[1:]))

class Evil(BaseException):
    def __str__(self):
        raise ValueError

"""

POLICY = """class policy:
    def __init__(self, scenario): pass
    def decide(self, observation, plan):
        {body}
"""

# A body of a function with a plan at hand, and what the message says.
NONSENSE = {
    "text": ("return 'plan'", "'plan' is not allowed"),
    "a dictionary": ("return {'pipelines': ()}", "a value of type dict is not allowed"),
    "a class": ("return type(plan)", "a value of type type is not allowed"),
    "a list for a tuple": ("return replace(plan, pipelines=[*plan.pipelines])", "pipelines: a value of type list"),
    "nothing for a tuple": ("return replace(plan, pipelines=None)", "pipelines: None is not allowed"),
    "text for a number": ("return changed(plan, microbatches=('8',))", "pipelines[0].microbatches[0]: '8' is not"),
    "a truth value for a number": ("return changed(plan, microbatches=(True,))", "microbatches[0]: True is not"),
    "a fraction for a number": ("return changed(plan, microbatches=(8.0,))", "microbatches[0]: 8.0 is not"),
    "a number beyond all floats": (
        "return replace(plan, connections=10**5000)",
        "connections: a number with thousands",
    ),
    "no number": ("return shared(plan, float('nan'))", "stages[0].replicas[0].share: nan is not allowed"),
    "no end": ("return shared(plan, float('inf'))", "stages[0].replicas[0].share: inf is not allowed"),
    "half a character": ("return replace(plan, strategy='\\ud800')", "strategy: '\\ud800' is not allowed"),
    "another version": ("return replace(plan, version=7)", "version: 7 is not allowed"),
}
RAISED = {
    "a division": ("return 1 / 0", "fails: ZeroDivisionError: division by zero"),
    "the base of all": ("raise BaseException('bare')", "fails: BaseException: bare"),
    "the end of a generator": ("raise GeneratorExit", "fails: GeneratorExit: no message"),
    "the end of the process": ("os._exit(0)", "os._exit(0) was called, which would end ropebridge"),
    "an exit": ("raise SystemExit(0)", "fails: SystemExit: 0"),
    "an error that cannot be shown": ("raise Evil", "fails: Evil: its text cannot be shown"),
    "a loop": ("while True: pass", "has not returned after 0.3 s"),
}
# What both kinds of file share is tested with every value, in tests/planner/check/test_types.py too.
QUICK = {"text", "a list for a tuple", "no number", "the base of all", "the end of the process", "a loop"}
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in (*NONSENSE, *RAISED)]


def refused(*arguments: object) -> str:
    done = ropebridge(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("name", CASES)
def test_a_strategy(name: str, tmp_path: Path) -> None:
    body, says = (NONSENSE | RAISED)[name]
    file = tmp_path / "mine.py"
    file.write_text(f"{HEAD}def plan(scenario):\n    plan = STRATEGIES['ddp'](scenario)\n    {body}\n")
    line = refused("plan", "digits", "--strategy", file)
    place = f"{file}:{len(HEAD.splitlines()) + 3}: 'plan'" if name in RAISED else f"{file}: 'plan' returns a plan that"
    assert line.startswith(f"ropebridge: {place}"), line
    assert says in line


@pytest.mark.parametrize("name", CASES)
def test_a_policy_in_a_simulation(name: str, tmp_path: Path) -> None:
    body, says = (NONSENSE | RAISED)[name]
    file, target = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(f"{HEAD}{POLICY.format(body=body)}")
    line = refused("simulate", "digits", "--strategy", "ddp", "--policy", file, "--steps", 3, "-o", target)
    place = (
        f"{file}:{len(HEAD.splitlines()) + 4}: 'decide'" if name in RAISED else f"{file}: 'decide' at step 0 returns"
    )
    assert line.startswith(f"ropebridge: {place}"), line
    assert says in line
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a list for a tuple", *RAISED])
def test_a_policy_in_a_real_run(name: str, tmp_path: Path) -> None:
    body, says = (NONSENSE | RAISED)[name]
    file, target = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(f"{HEAD}{POLICY.format(body=body)}")
    options = ["--strategy=megatron", f"--policy={file}", "--compute=paced", "--steps=4", f"--output={target}"]
    with started(["run", "two-regions", *options], tmp_path) as (process, _):
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith(f"ropebridge: {file}:")
    assert says in line
    assert left_behind(tmp_path) == []
    assert not target.exists()


@pytest.mark.parametrize("wrong", ["float('nan')", "10**400"])
def test_a_policy_that_takes_no_time_at_all(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"class policy:\n    def __init__(self, scenario): self.thinking_s = {wrong}\n    def decide(self, *_): pass\n"
    )
    line = refused("simulate", "digits", "--strategy", "ddp", "--policy", file, "--steps", 3)
    assert line.startswith(f"ropebridge: {file}: thinking_s = ")


@pytest.mark.parametrize("wrong", ["'x'", "1e300"])
def test_a_limit_that_is_none(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"limit_s = {wrong}\ndef plan(scenario): pass\n")
    assert refused("plan", "digits", "--strategy", file).startswith(f"ropebridge: {file}: limit_s = ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nraise BaseException('bare')", "2: the strategy file fails on import: BaseException: bare"),
        ("\n\ndef plan(:", "3: the strategy file fails on import: SyntaxError"),
        ("import os\nos._exit(0)", "2: the strategy file fails on import: ExitCalledError: os._exit(0) was called"),
    ],
)
def test_a_file_that_fails_on_import(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert refused("plan", "digits", "--strategy", file).startswith(f"ropebridge: {file}:{says}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file, says = tmp_path / "mine.py", "there is no such file; check the path"
    assert refused("plan", "digits", "--strategy", file) == f"ropebridge: {file}: {says}"
    assert refused("simulate", "digits", "--policy", file, "--strategy", "ddp") == f"ropebridge: {file}: {says}"


def test_an_interrupt_of_the_users_code_is_an_interrupt(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def plan(scenario):\n    raise KeyboardInterrupt\n")
    done = ropebridge("plan", "digits", "--strategy", file)
    assert done.returncode not in (0, 2)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("lines", "is_measured"), [("", False), ("    measures_unused_links = True\n", True)])
def test_a_policy_of_somebody_else_asks_for_unused_links(tmp_path: Path, lines: str, is_measured: bool) -> None:
    file = tmp_path / "policy.py"
    file.write_text(f"class policy:\n{lines}    def __init__(self, scenario): pass\n    def decide(self, *_): pass\n")
    assert measures_unused_links(make_policy(str(file), chain_scenario([0.1], [0.1]))) is is_measured

"""Every schedule with every kind of stage, replica, microbatch, update rule and model trains as one process does."""

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.actions import parse_action
from planner.plan.plan import EXPLICIT, Plan, Synchronisation
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from tests.helpers.processes.many_jobs import Outcome, train_one_by_one
from tests.helpers.processes.training import (
    CONVOLUTIONAL,
    GPT,
    Trained,
    placed_plan,
    train_in_one_process,
    training_scenario,
)
from traces.common.errors import RunError

# Its costly fixtures are made once.
pytestmark = pytest.mark.xdist_group("matrix")

STEPS = 3
TOLERANCE = 1e-6
LAYERS = 6
IN_FLIGHT = 3
# One or two layers of the small models.
BUCKET_BYTES = 8_000

CODES = {"gpt": GPT, "convolutional": CONVOLUTIONAL}
# So many cases share their processes: enough to forget what starting those costs, few enough to see how it goes on.
CASES_PER_START = 96
# AdamW divides by the gradient's own size: rounding in a gradient near zero moves a parameter by a share of the
# learning rate, so its difference is about the learning rate times 1e-4, whatever the gradient.
RULES = {"sgd": Optimizer("sgd", 0.05), "adamw": Optimizer("adamw", 0.001, weight_decay=0.01)}
MICROBATCHES = {"even": (3, 3, 3, 3), "uneven": (1, 5, 4, 2)}
DYNAMIC = {"dynamic-whole": "1f1b", "dynamic-split": "zb-h1"}
STRAIGHT = ("gpipe", "1f1b", "zb-h1", "zb-h2", "portfolio", EXPLICIT, *DYNAMIC)
SOLVED = ("optimal",) if importlib.util.find_spec("ortools") else ()
ROUND = ("interleaved-1f1b",)
V_SHAPED = ("zb-v", "compact-zb")


@dataclass(frozen=True, slots=True)
class Case:
    """One combination.

    Attributes:
        schedule: Or the kind of backward under dynamic order.
        workers: Groups of devices that hold the same stages.
        replicas: ``equal`` on all workers, or two unequal ones on the first worker and one on the others.
        microbatches: ``even`` or ``uneven``.
        rule: Of the update.
        model: Which.
        sums: Of gradients: ``after`` the last action, or such as ``overlap`` with backward.
    """

    schedule: str
    workers: int
    replicas: str
    microbatches: str
    rule: str
    model: str
    sums: str

    @property
    def shares(self) -> list[list[float]]:
        if self.replicas == "asymmetric":
            return [[1.0, 3.0], *([1.0] for _ in range(self.workers - 1))]
        return [[1.0, 1.0]] if self.workers == 1 else [[1.0]] * self.workers

    @property
    def ranks(self) -> int:
        return sum(map(len, self.shares))

    @property
    def possible(self) -> bool:
        """Sums overlap where there are any, and where it is known which action is the last."""
        has_sums = self.workers == 1 or self.replicas == "asymmetric"
        return self.sums == "after" or (has_sums and self.schedule not in DYNAMIC)

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


FACTORS = {
    "schedule": (*STRAIGHT, *SOLVED, *ROUND, *V_SHAPED),
    "workers": (1, 2, 3),
    "replicas": ("equal", "asymmetric"),
    "microbatches": tuple(MICROBATCHES),
    "rule": tuple(RULES),
    "model": tuple(CODES),
    "sums": ("after", "overlap"),
}
ALL = [case for values in product(*FACTORS.values()) if (case := Case(*values)).possible]

Facts = frozenset[tuple[str, object]]


def covering(cases: Iterable[Case], shows: Callable[[Case], Set[Facts]]) -> list[Case]:
    """Return cases that together show whatever any of them shows: greedily, the one that shows most first."""
    rest = {case: set(shows(case)) for case in cases}
    missing = set().union(*rest.values())
    chosen = []
    while missing:
        # Of those that show as much, one of few processes.
        best = max(rest, key=lambda case: (len(rest[case] & missing), -case.ranks))
        chosen.append(best)
        missing -= rest.pop(best)
    return chosen


def pairs(case: Case) -> set[Facts]:
    """Every two values of a case."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return {frozenset(both) for both in combinations(values, 2)}


FEW = covering(ALL, pairs)


def stages_of(schedule: str, workers: int) -> list[tuple[int, int]]:
    """(Layers, worker) of each stage."""
    places = list(range(workers))
    if schedule in ROUND:
        places *= 2
    elif schedule in V_SHAPED:
        places += reversed(range(workers))
    layers = [1] * len(places)
    # Unequal: the last stage has what is left.
    layers[-1] = LAYERS - len(places) + 1
    return list(zip(layers, places, strict=True))


def explicit_orders(stages: int, microbatches: int) -> list[list[str]]:
    """Microbatches from the last to the first, and backwards of both kinds."""
    orders = []
    for stage in range(stages):
        numbers = range(microbatches)[::-1]
        forwards = [f"{stage}F{m}" for m in numbers]
        backwards = [f"{stage}{'B' if (stage + m) % 2 else 'I'}{m}" for m in numbers]
        orders.append([*forwards, *backwards, *(f"{stage}W{m}" for m in numbers if not (stage + m) % 2)])
    return orders


@cache
def scenario_of(model: str, rule: str, devices: int) -> Scenario:
    return training_scenario(CODES[model], devices, optimizer=RULES[rule])


def built(case: Case) -> tuple[Scenario, Plan]:
    scenario = scenario_of(case.model, case.rule, case.ranks)
    stages, microbatches = stages_of(case.schedule, case.workers), MICROBATCHES[case.microbatches]
    schedule = DYNAMIC.get(case.schedule, case.schedule)
    plan = placed_plan(scenario, schedule, stages, case.shares, microbatches, in_flight=IN_FLIGHT)
    if case.schedule in DYNAMIC:
        plan = replace(plan, order="dynamic")
    if case.schedule == EXPLICIT:
        texts = explicit_orders(len(stages), len(microbatches))
        orders = tuple(tuple(parse_action(text) for text in order) for order in texts)
        plan = replace(plan, pipelines=(replace(plan.pipelines[0], orders=orders),))
    if case.sums == "overlap":
        plan = replace(plan, synchronisation=Synchronisation(bucket_bytes=BUCKET_BYTES))
    return scenario, plan


@cache
def in_one_process(model: str, rule: str) -> Trained:
    return train_in_one_process(scenario_of(model, rule, 1), STEPS)


def of_queries_and_values(count: int) -> torch.Tensor:
    """Which numbers of a joint bias are not of keys: heads by three by the width of a head."""
    heads = GPT.arguments["heads"]
    assert isinstance(heads, int)
    kinds = torch.arange(3).repeat_interleave(count // 3 // heads).repeat(heads)
    return kinds != 1


def assert_equal(trained: Trained, case: Case) -> None:
    expected = in_one_process(case.model, case.rule)
    assert trained.parameters.keys() == expected.parameters.keys()
    near = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses), **near)
    for name, value in expected.parameters.items():
        compared = slice(None)
        if case.rule == "adamw" and name.endswith("query_key_value.bias"):
            # What a key's bias adds to the scores of a query is the same for all of them, and gone after the softmax:
            # its gradient is rounding alone, of which AdamW makes whole steps.
            compared = of_queries_and_values(len(value))
        torch.testing.assert_close(trained.parameters[name][compared], value[compared], **near)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Matrix:
    """Trains by the cases that are selected, many in the same processes, when the first of them is asked for."""

    def __init__(self, selected: Sequence[Case]) -> None:
        self._selected = selected
        self._outcomes: dict[Case, Outcome] = {}

    def trained(self, case: Case) -> Trained:
        if case not in self._outcomes:
            rest = [other for other in self._selected if other not in self._outcomes]
            # The one asked for is among them, in whatever order they come.
            rest.sort(key=lambda other: other != case)
            cases = {str(each): each for each in rest[:CASES_PER_START]}
            outcomes = train_one_by_one({name: built(each) for name, each in cases.items()}, STEPS)
            self._outcomes |= {cases[name]: outcome for name, outcome in outcomes.items()}
        outcome = self._outcomes[case]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Matrix:
    here = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    return Matrix([item.callspec.params["case"] for item in here if "matrix" in item.fixturenames])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_processes_train_as_one_does(case: Case, matrix: Matrix) -> None:
    """Every two values meet."""
    assert_equal(matrix.trained(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in FEW], ids=str)
def test_processes_train_as_one_does_in_all_combinations(case: Case, matrix: Matrix) -> None:
    assert_equal(matrix.trained(case), case)


# --- the choice of cases ----------------------------------------------------------------------------------------


def test_every_two_values_meet() -> None:
    names = list(FACTORS)
    expected = {
        frozenset({(one, a), (other, b)})
        for one, other in combinations(names, 2)
        for a, b in product(FACTORS[one], FACTORS[other])
    }
    impossible = {frozenset({("schedule", name), ("sums", "overlap")}) for name in DYNAMIC}
    assert set().union(*map(pairs, FEW)) == expected - impossible


@given(cases=st.sets(st.sampled_from(ALL), min_size=1, max_size=40))
def test_a_covering_shows_what_all_cases_show(cases: set[Case]) -> None:
    found = covering(cases, pairs)
    assert set(found) <= cases
    assert len(set(found)) == len(found)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, cases))
    # None of them is there for nothing.
    for index, case in enumerate(found):
        assert pairs(case) - set().union(*map(pairs, found[:index]), set())


# --- a case that fails ------------------------------------------------------------------------------------------

DIES = """
import os, signal

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_rank_that_dies_takes_no_other_case_along(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly.py"
    deadly.write_text(GPT.path.read_text() + DIES)
    good = next(case for case in FEW if case.ranks == 2 and case.model == "gpt")
    scenario, plan = built(good)
    dies = replace(scenario, code=ModelCode(deadly, GPT.arguments))
    outcomes = train_one_by_one({"before": (scenario, plan), "dies": (dies, plan), "after": (scenario, plan)}, STEPS)
    for name in ("before", "after"):
        trained = outcomes[name]
        assert isinstance(trained, Trained)
        assert_equal(trained, good)
    assert isinstance(outcomes["dies"], RunError)
    assert re.fullmatch(r"rank 1 \(device 'device-1', host .*\) was ended by SIGKILL", str(outcomes["dies"]))

"""No value in any place of a plan is a traceback: it is a valid plan, or wrong input that is named."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.check.types import check_types
from planner.step.evaluate import step_time_s
from planner.step.orders import plan_orders, with_orders
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError

SCENARIO = chain_scenario([1e-3] * 3, [1e-3] * 3, global_batch=6)
CHAIN = chain_plan(SCENARIO)
(ORDERS,) = plan_orders(CHAIN, SCENARIO)
LISTED = with_orders(CHAIN, [ORDERS.actions(worker) for worker in range(ORDERS.worker_count)])
PLANS = [CHAIN, LISTED]

Path = tuple[str | int, ...]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every field and entry of a plan, and the plan."""
    yield path
    if isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from places(each, (*path, index))
    elif is_dataclass(value):
        for field in fields(value):
            yield from places(getattr(value, field.name), (*path, field.name))


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return new
    (step, *rest) = path
    if isinstance(step, int):
        return (*value[:step], put(value[step], tuple(rest), new), *value[step + 1 :])
    return replace(value, **{step: put(getattr(value, step), tuple(rest), new)})


# Hypothesis cannot repeat drawn text that equals a member of an enumeration of text, as ``F`` does.
TEXTS = st.binary(max_size=8).map(lambda data: data.decode("latin-1"))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**53), 2**53),
    st.floats(),
    TEXTS,
    st.just("\ud800"),
    st.sampled_from(["none", "1f1b", "gpipe", "zb-v", "dynamic", "explicit", "asgd", "ma", "tree", "int8", "device-1"]),
    st.binary(),
    st.complex_numbers(),
    st.builds(object),
    # Without a text, which would be needed to show the strategy.
    st.builds(pow, st.just(10), st.just(5000)),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(SCALARS, max_size=3).map(tuple),
    st.dictionaries(TEXTS, SCALARS, max_size=2),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from(list(places(LISTED))).map(lambda path: at(LISTED, path)),
)


@given(data=st.data())
@settings(max_examples=500)
def test_a_plan_with_a_strange_value_in_one_place(data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(PLANS))
    path = data.draw(st.sampled_from(list(places(plan))))
    strange = data.draw(VALUES)
    old, made = at(plan, path), put(plan, path, strange)
    has_type = type(strange) is type(old) or (type(old) is float and type(strange) is int)
    # A kind of action is text too.
    has_type = has_type or (type(old) is str and isinstance(strange, str))
    wrong = None
    try:
        checked = check_types(made)
    except InputError as error:
        wrong = error
    if wrong is not None:
        assert not path or str(path[0]) in wrong.where
        assert len(str(wrong).splitlines()) == 1
        assert type(strange) is not type(old) or strange != old
        return
    # Of these, None may be given, or a value.
    assert has_type or path[-1] in ("staleness_bound", "quorum", "noise_scale", "exchange", "grace_s")
    try:
        check_plan(checked, SCENARIO)
    except InputError:
        return
    assert step_time_s(checked, SCENARIO) > 0

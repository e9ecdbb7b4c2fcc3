"""Ranks tell the head what they are about to do, before any of them posts a message.

gloo ends the process, without a Python exception, where a send and its receive differ in size: two ranks with unlike
plans must not come that far. The head compares what all say, and each rank hears the outcome.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch

from executor.core.control_channel import Message
from executor.core.job import JobFolder, RunConfig
from executor.training.models.loading import LayerSize, compare_sizes
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario

# Of a SHA-256: enough to tell two files apart.
_DIGITS = 12

# Ranks that one message names.
_MAX_NAMED = 4

Job = tuple[Scenario, Plan, RunConfig]
Facts = Mapping[str, str]


def job_facts(folder: JobFolder, job: Job) -> dict[str, str]:
    """Return what must be the same on all ranks before any of them loads a model."""
    scenario, plan, config = job
    facts = {
        "ropebridge": _ropebridge_version(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "scenario": _digest(_resolved(folder)),
        "plan": _digest(plan_json(plan)),
        # Each host has its own path to the folder for checkpoints.
        **{name: str(value) for name, value in asdict(config).items() if name != "checkpoints"},
    }
    if scenario.code is not None and config.compute == "real":
        facts["model file"] = _digest(scenario.code.path.read_text())
    return facts


def model_facts(sizes: Sequence[LayerSize], profile: ModelProfile) -> dict[str, str]:
    """Return what must be the same of the model on all ranks: each layer's parameters and output.

    Raises:
        InputError: A layer is not what the profile says, by which the plan was made.
    """
    compare_sizes(profile, sizes)
    return {f"layer {index}": _layer_facts(size) for index, size in enumerate(sizes)}


def _layer_facts(size: LayerSize) -> str:
    shape, dtype = list(size.output.sizes), str(size.output.dtype).removeprefix("torch.")
    return f"{shape} {dtype} per sample, {size.parameter_bytes} bytes of parameters"


def _ropebridge_version() -> str:
    try:
        return version("ropebridge")
    except PackageNotFoundError:
        return "not installed"


def _resolved(folder: JobFolder) -> str:
    """Return the scenario without where the model's file is, which may be elsewhere on each host."""
    data = folder.documents()["scenario"]
    if data["code"] is not None:
        del data["code"]["path"]
    return json.dumps(data, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank says of itself.

    Attributes:
        name: What messages call the rank.
        facts: What must be the same on all ranks.
        failure: Why it cannot go on; empty if it can.
        wrong_input: Whether the user can correct that, or a difference in the facts.
    """

    name: str
    facts: Facts = field(default_factory=dict)
    failure: str = ""
    wrong_input: bool = False


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why ranks do not go on together."""

    message: str
    wrong_input: bool


def compare(statements: Sequence[Statement]) -> Disagreement | None:
    """Return why ranks cannot go on together, None if they can; the others are compared with the first."""
    failed = [each for each in statements if each.failure]
    if failed:
        message = _listed([f"{each.name}: {each.failure}" for each in failed])
        return Disagreement(message, all(each.wrong_input for each in failed))
    first = statements[0]
    unlike = [f"{each.name} {_difference(each.facts, first.facts)}" for each in statements if each.facts != first.facts]
    return Disagreement(_listed(unlike), first.wrong_input) if unlike else None


def _difference(facts: Facts, first: Facts) -> str:
    unlike = [what for what in {**first, **facts} if facts.get(what) != first.get(what)]
    details = [f"{what} {facts.get(what, 'none')} instead of {first.get(what, 'none')}" for what in unlike]
    return f"has another {' and '.join(unlike[:_MAX_NAMED])} than rank 0: {', '.join(details[:_MAX_NAMED])}"


def _listed(parts: Sequence[str], separator: str = "; ") -> str:
    more = len(parts) - _MAX_NAMED
    return separator.join([*parts[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


class _Topic:
    """What ranks have said of one topic; ``agreed`` is what a rank said with which all agreed."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count = count
        self.wait_s = wait_s
        self.due_s = 0.0
        self.statements: dict[int, Statement] = {}
        self.agreed: Statement | None = None


class Agreements:
    """The head's part: compares what ranks say once all have said something.

    Args:
        answer: Called with a rank, a topic and why the ranks disagree, None if they do not.
    """

    def __init__(self, answer: Callable[[int, str, Disagreement | None], None]) -> None:
        self._answer = answer
        self._topics: dict[str, _Topic] = {}

    def state(self, rank: int, message: Message) -> None:
        """Take what a rank says; a process that comes later is compared with those who have agreed.

        Raises:
            TypeError, KeyError, ValueError: The message is malformed.
        """
        name, count, wait_s = str(message["topic"]), int(message["count"]), float(message["wait_s"])
        topic = self._topics.setdefault(name, _Topic(count, wait_s))
        statement = Statement(**message["statement"])
        if topic.agreed is not None:
            self._answer(rank, name, compare([topic.agreed, statement]))
            return
        if not topic.statements:
            topic.due_s = time.monotonic() + wait_s
        topic.statements[rank] = statement
        if all(each in topic.statements for each in range(topic.count)):
            ordered = [topic.statements[each] for each in sorted(topic.statements)]
            outcome = compare(ordered)
            topic.agreed = ordered[0] if outcome is None else None
            self._conclude(name, outcome)

    def forget(self, rank: int) -> None:
        """Forget what a rank has said that is lost; its next process will say it again."""
        for topic in self._topics.values():
            topic.statements.pop(rank, None)

    @property
    def due_s(self) -> float:
        """When the next topic is to be given up, by the monotonic clock; infinity if none is open."""
        return min((topic.due_s for topic in self._topics.values() if topic.statements), default=float("inf"))

    def give_up_late(self) -> None:
        """End the topics for which some ranks have not come in time."""
        now_s = time.monotonic()
        for name, topic in self._topics.items():
            if topic.statements and now_s >= topic.due_s:
                absent = [f"rank {rank}" for rank in range(topic.count) if rank not in topic.statements]
                reason = f"{_listed(absent, ', ')} did not come to the rendezvous within {topic.wait_s:.0f} s"
                self._conclude(name, Disagreement(reason, wrong_input=False))

    def _conclude(self, name: str, outcome: Disagreement | None) -> None:
        ranks = sorted(self._topics[name].statements)
        self._topics[name].statements.clear()
        for rank in ranks:
            self._answer(rank, name, outcome)

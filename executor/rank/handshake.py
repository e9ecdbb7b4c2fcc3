"""Compares the facts of a run (such as versions and plan) of all ranks, before any of them sends a message to another.

If the sizes of a send and its receive differ, gloo aborts the process without a Python exception, so ranks with
different plans must be found before. The head compares the facts, and sends each rank the outcome.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from executor.core.control_channel import Message

# The largest number of ranks, or of differences, in one error message.
_MAX_NAMED = 4

Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Statement:
    """The statement of one rank on a topic.

    Attributes:
        name: Name of the rank in messages.
        facts: Values that must be equal on all ranks, by name.
        failure: Why the rank cannot continue; empty if it can.
        wrong_input: Whether the failure, or a difference in the facts, is an error in the user's input.
    """

    name: str
    facts: Facts = field(default_factory=dict)
    failure: str = ""
    wrong_input: bool = False


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The reason for which the ranks cannot run the job together, and whether the user's input is the cause."""

    message: str
    wrong_input: bool


def compare(statements: Sequence[Statement]) -> Disagreement | None:
    """Return the failures of ranks, or their differences from the first rank's facts; None if all agree."""
    failed = [each for each in statements if each.failure]
    if failed:
        alike = {each.failure: [other.name for other in failed if other.failure == each.failure] for each in failed}
        are_wrong = all(each.wrong_input for each in failed)
        if are_wrong and len(alike) == 1 and len(failed) == len(statements):
            # The input is to blame, wherever it is read.
            return Disagreement(failed[0].failure, wrong_input=True)
        message = _listed([f"{_listed(names, ', ')}: {failure}" for failure, names in alike.items()])
        return Disagreement(message, are_wrong)
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
    """The statements on one topic by rank; after an agreement ``agreed`` is the statement of the first rank."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count = count
        self.wait_s = wait_s
        self.due_s = 0.0
        self.statements: dict[int, Statement] = {}
        self.agreed: Statement | None = None


class Agreements:
    """Compares, on the head, the statements of ranks once all have arrived.

    Args:
        answer: Called with a rank, a topic and the disagreement of the ranks; None if they agree.
    """

    def __init__(self, answer: Callable[[int, str, Disagreement | None], None]) -> None:
        self._answer = answer
        self._topics: dict[str, _Topic] = {}

    def state(self, rank: int, message: Message) -> None:
        """Handle a rank's message ``agree``: answer all ranks after the last one, and later messages at once.

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
        """Forget the statements of a lost rank; its next process will send them again."""
        for topic in self._topics.values():
            topic.statements.pop(rank, None)

    @property
    def due_s(self) -> float:
        """Monotonic time at which the next topic times out; infinity if no topic is open."""
        return min((topic.due_s for topic in self._topics.values() if topic.statements), default=float("inf"))

    def give_up_late(self) -> None:
        """End the topics that have timed out, with a disagreement that names the missing ranks."""
        now_s = time.monotonic()
        for name, topic in self._topics.items():
            if topic.statements and now_s >= topic.due_s:
                absent = [f"rank {rank}" for rank in range(topic.count) if rank not in topic.statements]
                reason = f"{_listed(absent, ', ')} did not join the other ranks within {topic.wait_s:.0f} s"
                self._conclude(name, Disagreement(reason, wrong_input=False))

    def _conclude(self, name: str, outcome: Disagreement | None) -> None:
        ranks = sorted(self._topics[name].statements)
        self._topics[name].statements.clear()
        for rank in ranks:
            self._answer(rank, name, outcome)

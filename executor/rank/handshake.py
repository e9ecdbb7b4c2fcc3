"""Ranks tell each other what they are about to do, before any of them posts a message.

gloo ends the process, without a Python exception, where a send and its receive differ in size: two ranks with unlike
plans must not come that far. They meet in the store, where a statement has any length, and where somebody can say why
he will not come.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.core.peers import PeerLostError, SharedInputError, SharedRunError, first_line
from traces.common.errors import InputError, RopebridgeError

Facts = Mapping[str, str]
T = TypeVar("T")

_PAUSE_S = 0.05

# Whoever holds the store stays until the others have read what went wrong.
_FAREWELL_S = 5.0

# Key of the number of ranks that know what went wrong.
_TOLD = "told"

# So many ranks are named in one message.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank says of itself.

    Attributes:
        name: What messages call it.
        facts: What must be the same on all ranks.
        failure: Why it cannot go on; empty if it can.
        wrong_input: Whether that is for the user to correct.
    """

    name: str
    facts: Facts = field(default_factory=dict)
    failure: str = ""
    wrong_input: bool = False


class Handshake:
    """One rank's place among the others.

    Args:
        store: Of the run.
        rank: This one.
        ranks: Their number.
        name: What messages call this rank.
        holds_store: Whether the store ends with this process.
    """

    def __init__(self, store: Store, rank: int, ranks: int, name: str, *, holds_store: bool) -> None:
        self.store = store
        self._rank = rank
        self._ranks = ranks
        self._name = name
        self._holds_store = holds_store

    def agree(
        self,
        topic: str,
        prepare: Callable[[], tuple[T, Facts]],
        patience_s: float,
        error: Callable[[str], RopebridgeError] = SharedRunError,
    ) -> T:
        """Prepare something on every rank, and return it if all could and their facts are the same.

        Args:
            topic: Different in each call of a run.
            prepare: Returns what this rank has prepared, and what must be the same on all.
            patience_s: How long to wait for the others, seconds.
            error: Made of a message when facts differ.

        Raises:
            RopebridgeError: On every rank the same: who could not prepare, or differs from rank 0, or did not come.
        """
        try:
            prepared, facts = prepare()
        except RopebridgeError as failure:
            own = Statement(self._name, {}, str(failure), isinstance(failure, InputError))
            self._compare(self._gather(topic, own, patience_s), error)
            raise
        except Exception as failure:
            self._tell(topic, Statement(self._name, {}, first_line(failure)), patience_s, error)
            raise
        self._compare(self._gather(topic, Statement(self._name, facts), patience_s), error)
        return prepared

    def _tell(self, topic: str, own: Statement, patience_s: float, error: Callable[[str], RopebridgeError]) -> None:
        """Let the others know why this rank ends, which it does at once unless the store would end with it."""
        if self._holds_store:
            with suppress(RopebridgeError):
                self._compare(self._gather(topic, own, patience_s), error)
        else:
            self._say(topic, own)
            self.store.add(_TOLD, 1)

    def _say(self, topic: str, own: Statement) -> None:
        self.store.set(f"{topic}/{self._rank}", json.dumps(asdict(own)))

    def _gather(self, topic: str, own: Statement, patience_s: float) -> list[Statement]:
        """The statements of all ranks, in their order."""
        try:
            return self._wait_for_all(topic, own, patience_s)
        except RuntimeError as error:
            raise PeerLostError(f"lost the rendezvous: {first_line(error)}") from error

    def _wait_for_all(self, topic: str, own: Statement, patience_s: float) -> list[Statement]:
        self._say(topic, own)
        keys, absent = [f"{topic}/{rank}" for rank in range(self._ranks)], f"{topic}/absent"
        deadline_s = time.monotonic() + patience_s
        while not self.store.check(keys):
            if self.store.check([absent]):
                raise self._parting(SharedRunError(self.store.get(absent).decode()))
            if time.monotonic() > deadline_s:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                # The last of them may have come since.
                if missing:
                    self.store.set(absent, _absence(missing, patience_s))
            time.sleep(_PAUSE_S)
        return [Statement(**json.loads(self.store.get(key))) for key in keys]

    def _compare(self, statements: Sequence[Statement], error: Callable[[str], RopebridgeError]) -> None:
        failed = [each for each in statements if each.failure]
        if failed:
            wrong_input = all(each.wrong_input for each in failed)
            message = _listed([f"{each.name}: {each.failure}" for each in failed])
            raise self._parting(SharedInputError(message) if wrong_input else SharedRunError(message))
        first = statements[0].facts
        unlike = [f"{each.name} {_difference(each.facts, first)}" for each in statements if each.facts != first]
        if unlike:
            raise self._parting(error(_listed(unlike)))

    def _parting(self, error: RopebridgeError) -> RopebridgeError:
        """The error, once those who wait for the same news have it too."""
        told = self.store.add(_TOLD, 1)
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._holds_store and told < self._ranks and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
            told = self.store.add(_TOLD, 0)
        return error


def _absence(missing: Sequence[int], patience_s: float) -> str:
    names = _listed([f"rank {rank}" for rank in missing], ", ")
    return f"{names} did not come to the rendezvous within {patience_s:.0f} s"


def _difference(facts: Facts, first: Facts) -> str:
    unlike = [what for what in {**first, **facts} if facts.get(what) != first.get(what)]
    details = [f"{what} {facts.get(what, 'none')} instead of {first.get(what, 'none')}" for what in unlike]
    return f"has another {' and '.join(unlike[:_MOST_NAMED])} than rank 0: {', '.join(details[:_MOST_NAMED])}"


def _listed(parts: Sequence[str], separator: str = "; ") -> str:
    more = len(parts) - _MOST_NAMED
    return separator.join([*parts[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])

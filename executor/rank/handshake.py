"""Ranks tell each other what they are about to do, before any of them posts a message.

gloo ends the process, without a Python exception, where a send and its receive differ in size: two ranks with unlike
plans must not come that far. They meet in the store, where a statement has any length, and where somebody can say why
he will not come.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from executor.core.failures import PeerLostError, SharedInputError, SharedRunError, first_line
from executor.core.job import JobFolder, RunConfig, rank_devices
from executor.training.models.loading import LayerSize, compare_sizes
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, RopebridgeError, RunError

# Of a SHA-256: enough to tell two files apart.
_DIGITS = 12

Job = tuple[Scenario, Plan, RunConfig]


def job_facts(folder: JobFolder, job: Job) -> dict[str, str]:
    """Return what must be the same on all ranks before any of them loads a model."""
    scenario, plan, orders = job
    facts = {
        "ropebridge": _ropebridge_version(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "scenario": _digest(_resolved(folder)),
        "plan": _digest(plan_json(plan)),
        **{name: str(value) for name, value in asdict(orders).items()},
    }
    if scenario.code is not None and orders.compute == "real":
        facts["model file"] = _digest(scenario.code.path.read_text())
    return facts


def check_ranks(job: Job, ranks: int) -> None:
    """Refuse a job for another number of devices than there are ranks.

    Raises:
        RunError: Says both.
    """
    devices = len(rank_devices(*job))
    if devices != ranks:
        raise RunError(f"the plan is for {devices} devices, and {ranks} ranks were started")


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
    """The scenario without where the model's file is, which may be elsewhere on each host."""
    data = json.loads((folder.path / "scenario.json").read_text())
    if data["code"] is not None:
        del data["code"]["path"]
    return json.dumps(data, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


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

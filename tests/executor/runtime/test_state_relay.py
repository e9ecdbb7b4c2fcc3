"""How a syncer passes the optimizer's state to workers that join: whoever gives, and whatever is lost meanwhile."""

from collections.abc import Callable
from typing import Any, cast

import torch

from executor.core.clock import RunClock
from executor.runtime.decoupled.common_layers import CommonLayers, Sent
from executor.runtime.decoupled.links import STATE, WANTED, LayerLink
from executor.runtime.decoupled.state_relay import StateRelay
from executor.runtime.outer.state import OuterState
from executor.training.flat_state import FlatParameters
from planner.events.event import Event, EventKind
from planner.plan.outer_rounds import Contribution
from planner.plan.outer_step import OuterStep
from tests.helpers.strategies.manual_transport import SetClock

# Workers 0 to 2; the last one has two devices.
WORKER_OF = {"a": 0, "b": 1, "c": 2, "d": 2}
LAYERS = {"a": frozenset({0, 1}), "b": frozenset({0, 1}), "c": frozenset({0}), "d": frozenset({1})}
STATE_BYTES = torch.arange(8, dtype=torch.uint8)


class Wires:
    """A relay whose links keep what is sent: the kind, the fields and the size."""

    def __init__(self, *, has_state: bool = True) -> None:
        self.sent: list[tuple[str, str, dict[str, Any], int]] = []
        self.rows: list[Event] = []
        clock = cast(RunClock, SetClock())
        self.relay = StateRelay("hub", WORKER_OF, LAYERS, has_state, clock, self.rows.append)

    def connect(self, *devices: str, joins: bool = False) -> None:
        for device in devices:
            self.relay.connect(device, cast(LayerLink, _Wire(device, self.sent)), joins=joins)

    def give(self, giver: str, device: str, layers: list[int]) -> None:
        self.relay.pass_on(giver, {"device": device, "layers": layers}, STATE_BYTES, 1.0)

    def take(self) -> list[tuple[str, str, dict[str, Any], int]]:
        sent = self.sent[:]
        self.sent.clear()
        return sent


class _Wire:
    def __init__(self, device: str, sent: list[tuple[str, str, dict[str, Any], int]]) -> None:
        self._device, self._sent = device, sent

    def send(
        self,
        kind: str,
        payload: torch.Tensor,
        ready_s: float,
        departed: Callable[[float], None] | None = None,
        **words: Any,
    ) -> None:
        self._sent.append((self._device, kind, words, payload.numel()))
        if departed is not None:
            departed(ready_s)


def test_each_device_of_the_next_worker_gives_its_layers() -> None:
    wires = Wires()
    wires.connect("a", "b", "c", "d")
    assert not wires.take()
    wires.relay.lose("b")
    wires.connect("b", joins=True)
    wanted = [("c", WANTED, {"device": "b", "layers": [0]}, 0), ("d", WANTED, {"device": "b", "layers": [1]}, 0)]
    assert wires.take() == wanted
    wires.give("d", "b", [1])
    wires.give("c", "b", [0])
    assert wires.take() == [("b", STATE, {"device": "b", "layers": [each]}, 8) for each in (1, 0)]
    assert [(row.kind, row.device, row.peer) for row in wires.rows[:2]] == [
        (EventKind.RECEIVE, "hub", "d"),
        (EventKind.MIGRATE, "hub", "b"),
    ]


def test_what_a_lost_or_ended_giver_owes_another_one_gives() -> None:
    wires = Wires()
    wires.connect("a", "b", "c", "d")
    wires.relay.lose("b")
    wires.connect("b", joins=True)
    wires.take()
    wires.give("c", "b", [0])
    wires.take()
    wires.relay.lose("d")
    assert wires.take() == [("a", WANTED, {"device": "b", "layers": [1]}, 0)]
    wires.relay.end("a")
    assert wires.take() == [("b", STATE, {"device": "b", "layers": [1]}, 0)]
    # It comes too late.
    wires.give("a", "b", [1])
    assert not wires.take()


def test_the_late_end_of_an_old_connection_forgets_its_own_layers_only() -> None:
    wires = Wires()
    wires.connect("a", "c", "d")
    wires.relay.lose("c")
    wires.connect("c", joins=True)
    assert wires.take() == [("a", WANTED, {"device": "c", "layers": [0]}, 0)]
    wires.relay.lose("d")
    wires.connect("d", joins=True)
    assert wires.take() == [("a", WANTED, {"device": "d", "layers": [1]}, 0)]
    for device, layer in (("c", 0), ("d", 1)):
        wires.give("a", device, [layer])
    assert [device for device, *_ in wires.take()] == ["c", "d"]


def test_nobody_waits_for_a_worker_that_has_just_joined_or_for_a_state_that_there_is_not() -> None:
    wires = Wires()
    wires.connect("a", joins=True)
    assert wires.take() == [("a", STATE, {"device": "a", "layers": [0, 1]}, 0)]
    wires.connect("b", joins=True)
    assert wires.take() == [("b", STATE, {"device": "b", "layers": [0, 1]}, 0)]
    wires.relay.note_sent("a")
    wires.connect("c", joins=True)
    assert wires.take() == [("a", WANTED, {"device": "c", "layers": [0]}, 0)]
    stateless = Wires(has_state=False)
    stateless.connect("a", "b")
    stateless.connect("c", joins=True)
    assert stateless.take() == [("c", STATE, {"device": "c", "layers": [0]}, 0)]


def test_the_share_of_an_outer_step_is_the_same_after_a_checkpoint() -> None:
    outer = OuterStep(0.5, 0.9, quorum=1)

    def common(restored: dict[int, dict[str, torch.Tensor]]) -> CommonLayers:
        layer = torch.nn.Linear(1, 1)
        with torch.no_grad():
            layer.weight.fill_(1.0), layer.bias.fill_(2.0)
        state = OuterState(outer, lambda index: FlatParameters([layer]), [0], restored)
        return CommonLayers(outer, [2, 2], {0: 2}, state, restored, ["a", "b"])

    def merge(layers: CommonLayers, worker: int, step: int) -> None:
        payload = torch.tensor([0.5, -1.0]).view(torch.uint8)
        layers.arrive("ab"[worker], Sent({0: Contribution(worker, step, 4, 0)}, payload), 0.0)
        layers.take_outer_steps(0.0)

    first = common({})
    for worker, step in ((0, 3), (1, 3), (0, 7)):
        merge(first, worker, step)
    other = common({0: dict(first.tensors(0))})
    for layers in (first, other):
        merge(layers, 1, 7)
    assert torch.equal(first.parameters(0), other.parameters(0))
    whole = common({0: {name: each for name, each in first.tensors(0).items() if name != "latest"}})
    merge(whole, 0, 11)
    merge(first, 0, 11)
    assert not torch.equal(first.parameters(0), whole.parameters(0))

"""Layers on their way from device to device, between two steps, over the same network as everything else.

The world stands still meanwhile: a safe bound on what a migration costs, since training could go on beside it.
"""

import simpy

from planner.events import MIGRATE_ACTION, Event, EventKind
from planner.policy import Decision
from planner.scenario import Scenario
from sim.connection import Parcel
from sim.network import Network
from traces.errors import RunError


class MigrationUnderWay:
    """What a decision moves; all of it sets off at once, and what goes the same way leaves in order.

    Devices that leave meanwhile are not looked at: what they send still arrives.

    Args:
        decision: Says what.
        scenario: Gives links, traces and outages.
        start_s: When, from the start of the run.
    """

    def __init__(self, decision: Decision, scenario: Scenario, start_s: float) -> None:
        self._environment = simpy.Environment(start_s)
        self._moves, self._step, self._start_s = decision.migration.moves, decision.first_step, start_s
        pairs = {(move.source, move.target): True for move in self._moves}
        connections = decision.plan.connections
        self.network = Network(self._environment, scenario, pairs, connections, self._deliver, lambda: None)
        self.events: list[Event] = []
        self.end_s = start_s

    def run(self) -> None:
        """Carry everything over: `events` has a row for each move, and `end_s` is when the last one has arrived.

        Raises:
            RunError: A link stays at rate zero for ever.
        """
        for number, move in enumerate(self._moves):
            line = self.network.number[move.source, move.target]
            self.network.send(line, Parcel(self._step, number, move.size_bytes, self._start_s))
        self._environment.run()
        if len(self.events) < len(self._moves):
            arrived = {(event.device, event.peer) for event in self.events}
            late = sorted({(move.source, move.target) for move in self._moves} - arrived)
            names = ", ".join(f"{source}->{target}" for source, target in late)
            raise RunError(
                f"the run stalls at {self.end_s:.3f} s: layers that change devices never arrive ({names}); does a link "
                "stay at rate zero?"
            )

    def _deliver(self, parcel: Parcel, departed_s: float, arrived_s: float) -> None:
        move = self._moves[parcel.message]
        place = (move.source, move.target, -1, -1, -1, self._step, MIGRATE_ACTION)
        self.events.append(Event(EventKind.MIGRATE, *place, self._start_s, departed_s, move.size_bytes))
        self.end_s = max(self.end_s, arrived_s)

"""Copies of layers that devices send to their backup ranks while training goes on, as `run --backup-every` does."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from planner.adapt.copies import layers_of, newest_complete, restoring_moves, resumable_step
from planner.adapt.migration import MOST_INCOMPLETE_BACKUPS, LayerTransfer, backup_moves
from planner.events.event import BACKUP_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from sim.network.connection import Message
from sim.network.network import Network


@dataclass(eq=False, slots=True, kw_only=True)
class BackupMessage(Message):
    """A message with the copy of layers before step ``step``."""

    transfer: LayerTransfer


class BackupFlows:
    """The copies of one epoch.

    A device copies the layers that no other device trains when it begins a step, and sends them to their backup rank,
    which posts the receive when it begins the step itself. Copies are made before the first step of the epoch, and
    before every step whose number is a multiple of ``interval_steps``, but not while those of two earlier steps are
    incomplete.

    Args:
        interval_steps: Number of steps between two copies; 0 for none.
    """

    def __init__(self, plan: Plan, scenario: Scenario, interval_steps: int, first_step: int) -> None:
        self._interval_steps = interval_steps
        self._first_step = first_step
        self.moves = backup_moves(plan, scenario) if interval_steps else ()
        self._waits_for_notice = scenario.effects.network.ready_notice
        # By step: when devices have begun it, whether copies are made, and how many of them have not arrived.
        self._begun_s: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._is_due: dict[int, bool] = {}
        self._missing: dict[int, int] = {}
        self._plan, self._scenario = plan, scenario
        # By device: the layers of which it has copies, by the step before which they were made.
        self._copies: defaultdict[str, dict[int, frozenset[int]]] = defaultdict(dict)
        self._layers = len(scenario.model.layers)

    def begin(self, network: Network, step: int, devices: Sequence[str], now_s: float) -> None:
        """Send the copies of devices that begin a step at ``now_s``; their backup ranks post the receives likewise."""
        if not self.is_due_at(step):
            return
        begun_s = self._begun_s[step]
        # A device that sums gradients during its actions begins a step twice.
        new = [device for device in devices if device not in begun_s]
        begun_s |= dict.fromkeys(new, now_s)
        for device in new:
            self._keep(device, step, layers_of(self._plan, device))
        for move in self.moves:
            ends = {move.source, move.target}
            if not ends.isdisjoint(new) and ends <= begun_s.keys():
                message = BackupMessage(step, -1, move.size_bytes, begun_s[move.source], transfer=move)
                if self._waits_for_notice:
                    message.posted_s = begun_s[move.target]
                network.connection(move.source, move.target).send(message)

    def newest_complete(self, last: int, away: Collection[str]) -> int:
        """Return the newest step, at most ``last``, before which devices outside of ``away`` have a copy of each layer.

        It is the epoch's first step if there is none, and ``last`` itself if no copies are made: copies of all layers
        are then assumed to be there.
        """
        if not self._interval_steps:
            return last
        for device in away:
            # A process that comes back has no copies.
            self._copies.pop(device, None)
        found = resumable_step(self._copies, lambda step: self._plan, self._layers, last)
        return self._first_step if found is None else found

    def restoring_transfers(self, step: int) -> tuple[LayerTransfer, ...]:
        """Return the transfers of copies before ``step`` to devices that have none; none if no device has one."""
        if newest_complete(self._copies.values(), self._layers, step) != step:
            return ()
        return restoring_moves(self._plan, self._scenario, step, self._copies).moves

    def forget(self, unfinished: int) -> None:
        """Drop what is not needed any more once all devices have finished the steps before ``unfinished``.

        If all copies before a step have arrived, each device has at least as many layers in them as in earlier ones,
        since those between two devices arrive in order.
        """
        for step in [step for step in self._is_due if step < unfinished]:
            del self._is_due[step]
            self._begun_s.pop(step, None)
        complete = [step for step, count in self._missing.items() if step < unfinished and not count]
        for step in complete:
            for copies in self._copies.values():
                for older in [each for each in copies if each < step]:
                    del copies[older]
            if step < max(complete):
                del self._missing[step]

    def _keep(self, device: str, step: int, layers: Iterable[int]) -> None:
        copies = self._copies[device]
        copies[step] = copies.get(step, frozenset()).union(layers)

    def is_due_at(self, step: int) -> bool:
        """Return whether copies are made before a step; the first device that begins the step decides this."""
        if self._interval_steps and step not in self._is_due:
            # Devices are ahead of SimPy's clock, and count a copy on its way as incomplete. In the executor too, ranks
            # hear of complete copies up to two steps later.
            incomplete = sum(count > 0 for count in self._missing.values())
            wanted = step == self._first_step or step % self._interval_steps == 0
            self._is_due[step] = wanted and incomplete < MOST_INCOMPLETE_BACKUPS
            if self._is_due[step]:
                self._missing[step] = len(self.moves)
        return self._is_due.get(step, False)

    def arrive(self, message: BackupMessage) -> Event:
        """Record an arrived copy; return the event of sending it."""
        self._missing[message.step] -= 1
        move = message.transfer
        self._keep(move.target, message.step, move.layers)
        place = (move.source, move.target, -1, -1, -1, message.step, BACKUP_ACTION)
        times_s = (message.ready_s, message.departed_s)
        return Event(EventKind.BACKUP, *place, *times_s, message.size_bytes, arrived_s=message.arrived_s)

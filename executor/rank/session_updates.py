"""Makes the updates between pipelines for one rank in a session, by the plan's method of synchronisation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from executor.core.control_channel import reach_head, read_key
from executor.core.events import EventRecorder
from executor.core.messages import SessionSpec
from executor.core.timeouts import timeouts
from executor.rank.context import RankConfig, RankContext
from executor.recovery.checkpoint_file import LayerTensors
from executor.runtime.async_updates import PipelineUpdates
from executor.runtime.decoupled.links import SyncerLink
from executor.runtime.decoupled.updates import DecoupledUpdates
from executor.runtime.outer.updates import OuterUpdates
from executor.transport.transport import Transport
from planner.cost.synchronisation import update_edges
from planner.plan.exchange_steps import Exchanges
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class SessionUpdates:
    """Makes the updates between the pipelines of a session.

    Args:
        transport: Sends and receives the updates.
        rows: Records their messages.
        fail: Called with an error of a thread that sends or receives.
    """

    _config: RankConfig
    _context: RankContext
    _spec: SessionSpec
    _transport: Transport
    _rows: EventRecorder
    _fail: Callable[[Exception], None]

    def of_plan(self, plan: Plan, outer: Mapping[int, LayerTensors]) -> OuterUpdates | PipelineUpdates | None:
        """Return the updates of pipelines that finish steps together; None if all-reduce synchronises their gradients.

        ``outer`` has the outer states before the session's first step, by layer.
        """
        config, run, how = self._config, self._config.run, plan.synchronisation
        edges_of = partial(update_edges, scenario=config.scenario)
        common = (self._transport, self._context.compute, config.scenario.model, self._context.clock, self._rows)
        if how.has_outer_step:
            first, stop = self._spec.first_step, run.steps
            return OuterUpdates(plan, edges_of, config.device, first, stop, *common, outer, run.adapts)
        if not (edges := edges_of(plan)):
            return None
        exchanges = Exchanges(how.interval_steps, run.first_step, run.steps, run.checkpoint_every)
        return PipelineUpdates(plan, edges, config.device, exchanges, *common, run.adapts)

    def of_worker(self, plan: Plan) -> DecoupledUpdates:
        """Return the updates of a worker at its own speed, connected to all syncers if this rank exchanges layers."""
        config, context, spec = self._config, self._context, self._spec
        links: dict[str, SyncerLink] = {}
        device = config.device
        is_leader = any(device in leaders for leaders in plan.leaders)
        for syncer, address in spec.syncers.items() if is_leader else ():
            name, key = f"device '{syncer}', which takes the outer steps,", read_key(config.folder.key)
            channel = reach_head(address, key, 0.0, timeouts().reach_s, name)
            emulation = None if context.shaper is None else context.shaper.between(device, syncer)
            links[syncer] = SyncerLink(channel, syncer, context.clock, emulation, self._fail)
        common = (self._transport, context.compute, context.clock, self._rows, context.outer)
        updates = DecoupledUpdates(plan, config.scenario, device, spec.first_step, spec.number > 0, links, *common)
        for link in links.values():
            link.introduce(device, spec.number, updates.versions)
        return updates

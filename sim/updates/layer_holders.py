"""The devices that exchange layers with syncers (diloco-decoupled), and the messages with layers."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.cost.synchronisation import layer_elements
from planner.plan.decoupled import WorkerLayers
from planner.plan.outer_rounds import Contribution
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from sim.network.connection import Message


@dataclass(eq=False, slots=True, kw_only=True)
class LayersMessage(Message):
    """Pseudo-gradients on the way to a syncer, or common parameters on the way back, of some layers.

    Attributes:
        sent: The pseudo-gradients by layer; empty on the way back.
        versions: By layer the version of the common parameters, and the receiving worker's last step in it.
    """

    sender: str
    receiver: str
    pipeline: int
    sent: dict[int, Contribution] = field(default_factory=dict)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Holder:
    """The first device of a stage, or of several ones of its pipeline.

    Attributes:
        stage: Index of its first stage.
        layers: What it has sent and received.
        elements: Number of parameters of each of its layers.
        news: The last message that has brought each layer, until the layer is taken over.
        pending: Layers whose new version waits for the end of the message before, by syncer.
        busy: The syncers that are sending it a message.
    """

    name: str
    worker: int
    stage: int
    layers: WorkerLayers
    elements: dict[int, int]
    news: dict[int, LayersMessage] = field(default_factory=dict)
    pending: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    busy: set[str] = field(default_factory=set)


def holders_of(plan: Plan, scenario: Scenario, fragments: Sequence[Sequence[int]]) -> dict[str, Holder]:
    """Return the devices that exchange layers with syncers, by name."""
    how = plan.synchronisation
    fragment_of = {layer: index for index, own in enumerate(fragments) for layer in own}
    found = {}
    for worker, devices in enumerate(layer_elements(plan, scenario)):
        for name, (stage, elements) in devices.items():
            own = {layer: fragment_of[layer] for layer in elements}
            layers = WorkerLayers(worker, how.interval_steps, how.outer, own)
            found[name] = Holder(name, worker, stage, layers, elements)
    return found

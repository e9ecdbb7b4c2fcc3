"""Random factors on compute times, the same for the same seed on every machine."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import CompiledStep, compile_step
from planner.step.evaluate import blocking_messages, jitter_delays_s, message_times, nominal_paths
from planner.step.graph import Floats
from sim.kernel.advance import StepState, StepTimes, new_state
from sim.network.connection import Message
from sim.network.network import Network


# A run asks for the same step time after time.
@lru_cache(maxsize=32)
def first_pieces(compiled: CompiledStep) -> NDArray[np.int64]:
    """Return, for each piece, the first one of its action, [actions]."""
    actions = compiled.actions
    identity = np.stack([actions.actor, actions.kind, actions.pipeline, actions.stage, actions.microbatch])
    begins = np.append(True, (identity[:, 1:] != identity[:, :-1]).any(axis=0))
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


def jitter_factors(seed: int, step: int, count: int, deviation: float) -> NDArray[np.float64]:
    """Return log-normal factors of mean 1 for the actions of a step, [count].

    They come from raw Philox words through the inverse of the normal distribution, which unlike NumPy's own normal
    numbers is promised never to change.

    Args:
        seed: Of the scenario.
        step: Of training.
        count: Number of actions.
        deviation: Standard deviation of the factors.
    """
    key = np.array([seed % 2**64, step], np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    uniform = (np.right_shift(words, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    spread = np.sqrt(np.log1p(deviation**2))
    return np.asarray(np.exp(spread * ndtri(uniform) - spread**2 / 2), np.float64)


@dataclass(eq=False, slots=True)
class StepUnderWay:
    """One step of the run.

    Attributes:
        compiled: What is done.
        times: How long it takes.
        state: What has happened.
        unfinished: Actors that have not finished it, and messages on shared lines that have not departed.
        begun_s: When each actor began it, nan where it has not, [actors].
        posted_s: When each actor posted its receives of the step, nan where it has not, [actors].
        unposted: Parcels, with their lines, that wait for an actor to post its receives, by actor.
    """

    compiled: CompiledStep
    times: StepTimes
    state: StepState
    unfinished: int
    begun_s: Floats
    posted_s: Floats
    unposted: dict[int, list[tuple[int, Message]]] = field(default_factory=dict)

    @property
    def over_s(self) -> float:
        """When the last action ended and the last message departed, of a finished step."""
        return float(np.nanmax(np.concatenate((self.state.end_s, self.state.departed_s))))

    @property
    def working(self) -> list[int]:
        """Actors that have begun and not finished."""
        graph = self.compiled.graph
        begun = ~np.isnan(self.begun_s)
        working = (self.state.position < graph.first_action[1:]) | (self.state.sending > 0)
        return np.flatnonzero(begun & working).tolist()


def begin_step(step: int, plan: Plan, scenario: Scenario, network: Network) -> StepUnderWay:
    """Return a step of which nothing has happened."""
    compiled = compile_step(plan, scenario)
    times = _times(plan, scenario, network)
    jitter = scenario.effects.compute.jitter
    if jitter > 0:
        factors = jitter_factors(scenario.effects.compute.seed, step, compiled.graph.actions, jitter)
        # An action has one factor, in however many pieces it is: where sums begin says nothing of how long it takes.
        times = times._replace(duration_s=times.duration_s * factors[first_pieces(compiled)])
    actors = compiled.graph.actors
    return StepUnderWay(
        compiled, times, new_state(compiled.graph), actors, np.full(actors, np.nan), np.full(actors, np.nan)
    )


@lru_cache(maxsize=32)
def _times(plan: Plan, scenario: Scenario, network: Network) -> StepTimes:
    """What the actions and messages of every step of a plan take, jitter aside."""
    compiled = compile_step(plan, scenario)
    paths = nominal_paths(plan, scenario)
    transmission_s, latency_s = message_times(compiled, paths)
    jitter_s = jitter_delays_s(compiled, paths)
    graph, actors = compiled.graph, compiled.actors
    pairs = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    line = np.array([network.number[actors[sender], actors[receiver]] for sender, receiver in pairs], np.int64)
    wire_bits = 8 * compiled.messages.size_bytes / scenario.effects.network.payload_efficiency
    blocking = blocking_messages(compiled, scenario)
    return StepTimes(compiled.actions.duration_s, transmission_s, wire_bits, latency_s, jitter_s, line, blocking)

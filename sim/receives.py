"""Receives that devices post ahead of their messages.

Where senders wait for a ready notice, a message leaves after its receive is posted. A device posts the receives of a
step when it starts the step before, if the step's plan is known then.
"""

import numpy as np

from sim.network.connection import Message
from sim.network.network import Network
from sim.step import StepRuns
from sim.step_gate import StepGate


class PostedReceives:
    """When devices post their receives, and the messages that wait for that.

    Args:
        steps: Steps under way.
        gate: Knows which steps have a plan.
        network: Network that carries messages whose receives are posted.
    """

    def __init__(self, steps: StepRuns, gate: StepGate, network: Network) -> None:
        self._steps = steps
        self._gate = gate
        self._network = network
        # (step, actor): receives to be posted when the step's plan is known.
        self._unplanned: list[tuple[int, int]] = []

    def start_step(self, step: int, actor: int, now_s: float) -> None:
        """Post the receives of the next step for an actor that starts a step, or note that they are to be posted."""
        if step == self._gate.first_step:
            self._post(step, actor, now_s)
        if step + 1 < min(self._gate.known_steps, self._gate.end_step):
            self._post(step + 1, actor, now_s)
        elif step + 1 < self._gate.end_step:
            self._unplanned.append((step + 1, actor))

    def post_planned(self, now_s: float) -> None:
        """Post the receives of steps whose plan has become known, for actors that have started the step before."""
        planned = [(step, actor) for step, actor in self._unplanned if step < self._gate.known_steps]
        self._unplanned = [each for each in self._unplanned if each[0] >= self._gate.known_steps]
        for step, actor in planned:
            if step < self._gate.end_step:
                self._post(step, actor, now_s)

    def is_posted(self, message: Message, receiver: int, line: int) -> bool:
        """Return whether a message's receive is posted; if not, the message is sent as soon as it is."""
        step = self._steps[message.step]
        message.posted_s = float(step.posted_s[receiver])
        if not np.isnan(message.posted_s):
            return True
        step.unposted.setdefault(receiver, []).append((line, message))
        return False

    def _post(self, step: int, actor: int, now_s: float) -> None:
        step_run = self._steps[step]
        step_run.posted_s[actor] = now_s
        for line, message in step_run.unposted.pop(actor, ()):
            message.posted_s = now_s
            self._network.connections[line].send(message)

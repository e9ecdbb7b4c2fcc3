"""When receivers post their receives, where senders wait for that: a step ahead, if the plan of the step is known."""

from collections.abc import Callable

import numpy as np

from sim.network.connection import Message
from sim.step import StepUnderWay


class PostedReceives:
    """The receives that devices have posted, and the parcels that wait for them.

    Args:
        first_step: Whose receives are posted when it begins.
        step: Gives a step.
        send: Lets a parcel go, with its line.
    """

    def __init__(
        self, first_step: int, step: Callable[[int], StepUnderWay], send: Callable[[int, Message], None]
    ) -> None:
        self._first_step = first_step
        self._step = step
        self._send = send
        self._unannounced: list[tuple[int, int]] = []

    def begin(self, step: int, actor: int, now_s: float, known_steps: int, steps: int) -> None:
        """Let an actor that begins a step post the receives of the next one, or as soon as its plan is known."""
        if step == self._first_step:
            self._post(step, actor, now_s)
        if step + 1 < min(known_steps, steps):
            self._post(step + 1, actor, now_s)
        elif step + 1 < steps:
            self._unannounced.append((step + 1, actor))

    def learn(self, known_steps: int, steps: int, now_s: float) -> None:
        """Post the receives of a step whose plan has just become known, of those that have begun the one before."""
        known = [(step, actor) for step, actor in self._unannounced if step < known_steps]
        self._unannounced = [(step, actor) for step, actor in self._unannounced if step >= known_steps]
        for step, actor in known:
            if step < steps:
                self._post(step, actor, now_s)

    def send(self, under_way: StepUnderWay, receiver: int, line: int, parcel: Message) -> None:
        """Let a parcel go, now or when its receiver posts the receive."""
        if np.isnan(under_way.posted_s[receiver]):
            under_way.unposted.setdefault(receiver, []).append((line, parcel))
            return
        parcel.posted_s = float(under_way.posted_s[receiver])
        self._send(line, parcel)

    def _post(self, step: int, actor: int, now_s: float) -> None:
        """Take note that an actor posts its receives of a step, and let those parcels go that waited for it."""
        under_way = self._step(step)
        under_way.posted_s[actor] = now_s
        for line, parcel in under_way.unposted.pop(actor, ()):
            parcel.posted_s = now_s
            self._send(line, parcel)

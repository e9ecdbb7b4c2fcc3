"""Between the ranks of a job and the launcher's policy: the agent's part.

The ranks publish the events of a finished step in a store that the agent holds, where they can reach it in whichever
network they are. A thread of the agent passes them to the launcher as a line of JSON, and the line that comes back,
what step k + `DECISION_LAG_STEPS` runs, to the ranks.
"""

import json
import threading
from typing import TextIO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.control import PATIENCE, plan_key, telemetry_key
from planner.policy import DECISION_LAG_STEPS


class Bridge:
    """Passes on what the ranks and the launcher have for each other, in a thread of its own.

    Args:
        host: Where the ranks reach this process.
        ranks: Their number.
        steps: Training steps.
        telemetry: To the launcher, a line for each step: the events of all ranks.
        plans: From the launcher, a line for each of these: the plan as text.
    """

    def __init__(self, host: str, ranks: int, steps: int, telemetry: TextIO, plans: TextIO) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        self._ranks = ranks
        self._steps = steps
        self._telemetry = telemetry
        self._plans = plans
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Of the store."""
        return int(self._store.port)

    def finish(self) -> None:
        """Wait until the launcher has seen all steps."""
        self._thread.join()

    def _pass_on(self) -> None:
        for step in range(self._steps):
            keys = [telemetry_key(step, rank) for rank in range(self._ranks)]
            self._store.wait(keys, PATIENCE)
            published = ",".join(self._store.get(key).decode() for key in keys)
            self._telemetry.write(f"[{published}]\n")
            self._telemetry.flush()
            answer = self._plans.readline()
            if not answer:
                # The launcher is gone, and this process follows it.
                return
            if step + DECISION_LAG_STEPS < self._steps:
                self._store.set(plan_key(step + DECISION_LAG_STEPS), json.loads(answer))
            # Who has published a step has fetched its plan. The first steps' plan is in nobody's key.
            for key in keys if step < DECISION_LAG_STEPS else [*keys, plan_key(step)]:
                self._store.delete_key(key)

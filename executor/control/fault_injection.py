"""Does to the processes of ranks what a scenario foresees for their devices: ends, stops, lets go on."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from executor.core.clock import OriginWatch
from executor.core.job import JobFolder
from executor.core.liveness import beat_path
from planner.scenario.faults import Absence, Hang
from planner.scenario.scenario import Scenario

_PAUSE_S = 0.02


class FaultInjector:
    """Works in a thread of its own, from the start of the run on.

    Args:
        job: Of the run.
        scenario: Has the faults.
        devices: In rank order.
    """

    def __init__(self, job: JobFolder, scenario: Scenario, devices: Sequence[str]) -> None:
        self._job = job
        self._origin = OriginWatch(job.origin)
        self._absences: list[tuple[int, Absence]] = []
        blows: list[tuple[float, int, signal.Signals]] = []
        for fault in scenario.faults:
            if not isinstance(fault, Absence | Hang) or fault.device not in devices:
                continue
            rank = devices.index(fault.device)
            if isinstance(fault, Absence):
                self._absences.append((rank, fault))
                blows.append((fault.start_s, rank, signal.SIGKILL))
            else:
                blows += [(fault.start_s, rank, signal.SIGSTOP), (fault.end_s, rank, signal.SIGCONT)]
        self._blows = sorted(blows)
        if blows:
            threading.Thread(target=self._work, name="faults", daemon=True).start()

    def away_until_s(self, rank: int) -> float | None:
        """Return the run second until which a rank's device is gone, so that no process may take its place until then.

        Returns:
            None if it is there.
        """
        origin_s = self._origin.origin_s()
        now_s = -1.0 if origin_s is None else time.monotonic() - origin_s
        own = (absence for each, absence in self._absences if each == rank)
        return next((each.end_s for each in own if each.start_s <= now_s < each.end_s), None)

    def _work(self) -> None:
        while (origin_s := self._origin.origin_s()) is None:
            time.sleep(_PAUSE_S)
        for start_s, rank, number in self._blows:
            if start_s == float("inf"):
                return
            time.sleep(max(0.0, origin_s + start_s - time.monotonic()))
            # Who has ended already is not hit.
            with suppress(ProcessLookupError, FileNotFoundError, ValueError):
                os.kill(int(beat_path(self._job.path, rank).read_text()), number)

"""The speed of devices over time by a scenario's stragglers and slow-downs, and the jitter of their actions."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.scenario.effects import ComputeEffects


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """A speed relative to the profile over time, constant in each of several intervals.

    Attributes:
        times_s: Start of each interval, seconds from the start of the run, rising from 0; the last one never ends.
        speeds: Speed in each interval; the last one is above 0.
    """

    times_s: tuple[float, ...] = (0.0,)
    speeds: tuple[float, ...] = (1.0,)

    def at(self, time_s: float) -> float:
        """Return the speed at a time of the run."""
        return self.speeds[bisect_right(self.times_s, time_s) - 1]

    def end_s(self, start_s: float, work_s: float) -> float:
        """Return when an action that starts at ``start_s`` ends if it takes ``work_s`` seconds at speed 1.

        >>> DeviceSpeed((0.0, 10.0), (1.0, 0.5)).end_s(8.0, 3.0)
        12.0
        """
        now_s, interval = start_s, bisect_right(self.times_s, start_s) - 1
        while True:
            until_s = self.times_s[interval + 1] if interval + 1 < len(self.times_s) else math.inf
            if self.speeds[interval] * (until_s - now_s) >= work_s:
                return now_s + (work_s / self.speeds[interval] if work_s else 0.0)
            work_s -= self.speeds[interval] * (until_s - now_s)
            now_s, interval = until_s, interval + 1


def device_speed(effects: ComputeEffects, devices: Sequence[str]) -> DeviceSpeed:
    """Return the speed of devices that compute every action together: at each time that of the slowest."""
    own = [_speed(effects, device) for device in devices]
    times_s = tuple(sorted({time_s for speed in own for time_s in speed.times_s}))
    return DeviceSpeed(times_s, tuple(min(speed.at(time_s) for speed in own) for time_s in times_s))


def _speed(effects: ComputeEffects, device: str) -> DeviceSpeed:
    slowdown = next((each for each in effects.slowdowns if each.device == device), None)
    factor = next((each.factor for each in effects.stragglers if each.device == device), 1.0)
    times_s, speeds = ((0.0,), (1.0,)) if slowdown is None else (slowdown.times_s, slowdown.speed)
    return DeviceSpeed(times_s, tuple(speed * (1 / factor) for speed in speeds))


def jitter_factors(seed: int, step: int, count: int, deviation: float) -> NDArray[np.float64]:
    """Return log-normal factors of mean 1 and standard deviation ``deviation`` for the actions of a step, [count].

    Raw words of the generator Philox, seeded with ``seed`` and the step's index, are transformed by the inverse of the
    normal distribution. NumPy guarantees that raw words never change, but not that its normal numbers do not.
    """
    # Imported here because the import takes a fifth of a second, and every command and rank imports this module.
    from scipy.special import ndtri

    key = np.array([seed % 2**64, step], np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    uniform = (np.right_shift(words, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    spread = np.sqrt(np.log1p(deviation**2))
    return np.asarray(np.exp(spread * ndtri(uniform) - spread**2 / 2), np.float64)

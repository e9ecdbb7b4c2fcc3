"""How many samples of each microbatch every device of a group takes (Asteroid, Algorithm 1) [second-hand].

First in proportion to the speeds v_d = 1 / (t_f(B) + t_b(B)) with which devices do a whole microbatch of B, no device
more than its memory holds, again for what is left until all samples are placed. Then, times not being linear in
samples, samples go from the slowest device to the fastest with room while the slowest one's time drops.

Assumed: shares are rounded down, and where nothing is placed that way, one sample goes to the device that would be done
with it first.
"""

from collections.abc import Sequence


def allocate(samples: int, times_s: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[int, ...] | None:
    """Return the samples of each device, or None if they do not fit.

    Args:
        samples: Of a microbatch.
        times_s: For each device the seconds of forward and backward with 0, 1, ... ``samples`` samples.
        most: What each device's memory holds.
    """
    if sum(most) < samples:
        return None
    return _balanced(_in_proportion(samples, times_s, most), times_s, most)


def _in_proportion(samples: int, times_s: Sequence[Sequence[float]], most: Sequence[int]) -> list[int]:
    # A device that takes no time at all is as fast as can be told.
    speeds = [1 / max(column[samples], 1e-12) for column in times_s]
    placed = [0] * len(most)
    while left := samples - sum(placed):
        open_devices = [device for device, limit in enumerate(most) if placed[device] < limit]
        total = sum(speeds[device] for device in open_devices)
        given = {d: min(int(left * speeds[d] / total), most[d] - placed[d]) for d in open_devices}
        if not any(given.values()):
            given = {min(open_devices, key=lambda device: times_s[device][placed[device] + 1]): 1}
        for device, count in given.items():
            placed[device] += count
    return placed


def _balanced(placed: list[int], times_s: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[int, ...]:
    devices = range(len(placed))
    while True:
        slowest = max(devices, key=lambda device: times_s[device][placed[device]])
        takers = [device for device in devices if device != slowest and placed[device] < most[device]]
        taker = min(takers, key=lambda device: times_s[device][placed[device] + 1], default=None)
        if taker is None or times_s[taker][placed[taker] + 1] >= times_s[slowest][placed[slowest]]:
            return tuple(placed)
        placed[slowest] -= 1
        placed[taker] += 1

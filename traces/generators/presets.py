"""Generators calibrated to published measurements of real paths, by name."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from traces.common.names import find_by_name
from traces.generators import ornstein_uhlenbeck, with_outage_bursts
from traces.trace import LinkTrace


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is known of a kind of path.

    The rate wanders as an Ornstein-Uhlenbeck process does (`ornstein_uhlenbeck`), and goes to zero in bursts
    where ``zero_share`` says so (`with_outage_bursts`). The sources give means and spreads of one-second
    samples, but not how long a rate stays: ``correlation_s`` and ``mean_outage_s`` are our assumptions.

    Attributes:
        mean_bps: Mean rate, bits per second, outages included.
        coefficient_of_variation: Standard deviation as a share of the mean, outages included.
        correlation_s: How long the rate stays about the same, seconds.
        maximum_bps: Highest rate, bits per second; infinity where none was published.
        zero_share: Share of the time at rate zero.
        mean_outage_s: Mean length of such a time, seconds.
        source: Where the statistics come from.
    """

    mean_bps: float
    coefficient_of_variation: float
    correlation_s: float
    maximum_bps: float = math.inf
    zero_share: float = 0.0
    mean_outage_s: float = 3.0
    source: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "cloud-wan": Preset(
            mean_bps=630e6,
            coefficient_of_variation=0.03,
            correlation_s=60.0,
            source="cloud path California - Stanford: steady, 590-670 Mbit/s, taken as 4 standard deviations",
        ),
        "cloud-wan-mexico": Preset(
            mean_bps=92e6,
            coefficient_of_variation=0.03,
            correlation_s=60.0,
            source="cloud path California - Mexico: mean 92 Mbit/s; assumed as steady as cloud-wan",
        ),
        "cloud-wan-colombia": Preset(
            mean_bps=68e6,
            coefficient_of_variation=0.13,
            correlation_s=60.0,
            source="cloud path Brazil - Colombia: 50-86 Mbit/s, taken as 4 standard deviations",
        ),
        "lte": Preset(
            mean_bps=32e6,
            coefficient_of_variation=0.44,
            correlation_s=10.0,
            source="Ghent LTE: mean 32 Mbit/s, CV 0.44",
        ),
        "5g": Preset(
            mean_bps=30e6,
            coefficient_of_variation=1.43,
            correlation_s=10.0,
            maximum_bps=533e6,
            source="Irish 5G, download: mean 30 Mbit/s, CV 1.43, maximum 533 Mbit/s",
        ),
        "5g-mmwave": Preset(
            mean_bps=501e6,
            coefficient_of_variation=0.87,
            correlation_s=5.0,
            maximum_bps=1_920e6,
            source="Lumos 5G mmWave: mean 501 Mbit/s, CV 0.87, maximum 1,920 Mbit/s",
        ),
        "hsdpa": Preset(
            mean_bps=1.35e6,
            coefficient_of_variation=0.35,
            correlation_s=10.0,
            source="Norway HSDPA: mean 1.35 Mbit/s, CV 0.35",
        ),
        "rail-lte": Preset(
            mean_bps=6.7e6,
            coefficient_of_variation=0.79,
            correlation_s=10.0,
            source="LTE on high-speed rail: mean 6.7 Mbit/s, CV 0.79",
        ),
        "satellite": Preset(
            mean_bps=128e6,
            coefficient_of_variation=0.71,
            correlation_s=15.0,
            zero_share=0.16,
            source="Starlink in motion, UDP download: mean 128 Mbit/s, CV 0.71, 16 % of the seconds at zero",
        ),
    }
)
"""Preset name to preset."""


def preset(name: str, *, duration_s: float, seed: int, step_s: float = 1.0) -> LinkTrace:
    """Return a trace of a named kind of path.

    Args:
        name: A key of ``PRESETS``.
        duration_s: Seconds.
        seed: The same seed makes the same trace.
        step_s: Length of a piece, seconds.

    Raises:
        InputError: There is no such preset, or a time is not positive.
    """
    chosen = find_by_name(name, PRESETS, "preset")
    between = _between_outages(chosen)
    rate_seed, outage_seed = np.random.SeedSequence(seed).spawn(2)
    trace = ornstein_uhlenbeck(
        between.mean_bps,
        coefficient_of_variation=between.coefficient_of_variation,
        correlation_s=between.correlation_s,
        maximum_bps=between.maximum_bps,
        duration_s=duration_s,
        seed=rate_seed,
        step_s=step_s,
    )
    return with_outage_bursts(
        trace,
        zero_share=chosen.zero_share,
        mean_outage_s=chosen.mean_outage_s,
        seed=outage_seed,
        step_s=step_s,
    )


def _between_outages(whole: Preset) -> Preset:
    """Return the statistics that hold between outages, where the outages are not counted in.

    With the share u of time up: the mean is u times that between outages, and so is the mean square.
    """
    up_share = 1 - whole.zero_share
    return dataclasses.replace(
        whole,
        mean_bps=whole.mean_bps / up_share,
        coefficient_of_variation=math.sqrt((1 + whole.coefficient_of_variation**2) * up_share - 1),
        zero_share=0.0,
    )

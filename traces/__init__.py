"""Link traces: the rate of a network path over time; read, write, generate, describe."""

from typing import TYPE_CHECKING

from traces.common.faces import lazy_face

if TYPE_CHECKING:
    from traces.common.errors import InputError as InputError
    from traces.common.errors import RopebridgeError as RopebridgeError
    from traces.common.errors import RunError as RunError
    from traces.common.units import parse_bandwidth_bps as parse_bandwidth_bps
    from traces.common.units import parse_duration_s as parse_duration_s
    from traces.formats import read_trace as read_trace
    from traces.formats import write_trace as write_trace
    from traces.generators.presets import generate as generate
    from traces.generators.presets import preset as preset
    from traces.preemption.files import read_preemption as read_preemption
    from traces.preemption.trace import PreemptionTrace as PreemptionTrace
    from traces.resample import resampled as resampled
    from traces.statistics import describe as describe
    from traces.statistics import sparkline as sparkline
    from traces.trace import LinkTrace as LinkTrace
else:
    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "traces.trace": ("LinkTrace",),
            "traces.formats": ("read_trace", "write_trace"),
            "traces.generators.presets": ("generate", "preset"),
            "traces.resample": ("resampled",),
            "traces.statistics": ("describe", "sparkline"),
            "traces.preemption.trace": ("PreemptionTrace",),
            "traces.preemption.files": ("read_preemption",),
            "traces.common.errors": ("RopebridgeError", "InputError", "RunError"),
            "traces.common.units": ("parse_duration_s", "parse_bandwidth_bps"),
        },
    )

"""The bytes that a device holds for each parameter while it trains: rules of frameworks, each with its source.

They are the parameter, its gradient, the optimizer's values, and the copies and buffers that a framework holds beside
them. Buffers whose size does not depend on the parameters are `planner.scenario.effects.MemoryEffects.framework_bytes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from planner.scenario.training import FLOAT32_BYTES, OPTIMIZER_STATES, PRECISIONS, Precision, Training
from traces.common.errors import InputError, find_by_name


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Bytes for each parameter.

    Attributes:
        parts: What is held, with its bytes.
        source: Where the number is from.
    """

    parts: tuple[tuple[str, float], ...]
    source: str

    @property
    def total_bytes(self) -> float:
        """Bytes of all parts."""
        return sum(size_bytes for _, size_bytes in self.parts)

    def __str__(self) -> str:
        """Return the parts and the source in words."""
        listed = ", ".join(f"{name} {size_bytes:g}" for name, size_bytes in self.parts)
        return f"{listed}; {self.source}" if len(self.parts) > 1 else self.source


_TORCH = "torch"

# The bytes of Adam's two moments, which are float32 in all of the frameworks.
_ADAM = ("optimizer", 2 * FLOAT32_BYTES)

_MEGATRON = "Megatron-LM without distributed optimizer, docs.nvidia.com/megatron-core, dist_optimizer"

# For each framework and precision, what is held with the optimizer adamw.
_FRAMEWORKS: Mapping[str, Mapping[str, ParameterMemory]] = {
    # The table "theoretical number of bytes per parameter" of its documentation, which gives the sums 16, 18 and 20.
    # With the distributed optimizer over d replicas: 8 + 8/d, 6 + 12/d and 4 + 16/d.
    "megatron-lm": {
        "fp32": ParameterMemory((("parameter", 4), ("gradient", 4), _ADAM), _MEGATRON),
        "bf16": ParameterMemory((("parameter", 2), ("gradient", 4), ("main parameter", 4), _ADAM), _MEGATRON),
        "fp16": ParameterMemory(
            (("parameter", 2), ("gradient", 2), ("main parameter", 4), ("main gradient", 4), _ADAM), _MEGATRON
        ),
    },
    # Section 3.1 of the paper: 2 + 2 + 12 bytes with Adam in mixed precision, without partitioning.
    "deepspeed": {
        "fp16": ParameterMemory(
            (("parameter", 2), ("gradient", 2), ("main parameter", 4), _ADAM),
            "DeepSpeed without ZeRO's stages, Rajbhandari et al., arXiv 1910.02054, section 3.1",
        )
    },
    # What the planner of eth-easl/sailor counts for the framework of its measured runs.
    "sailor": {
        "fp32": ParameterMemory(
            (("parameter", 4), ("gradient", 4), _ADAM, ("two copies in buffers", 8)),
            "the planner of eth-easl/sailor",
        )
    },
}

FRAMEWORKS = (_TORCH, *_FRAMEWORKS)


def parameter_memory(training: Training) -> ParameterMemory:
    """Return the bytes for each parameter: those of the scenario, of its framework, or of torch's mixed precision.

    Raises:
        InputError: The framework is unknown, or its rule is not known for the precision or the optimizer.
    """
    if training.bytes_per_parameter is not None:
        return ParameterMemory((("all", training.bytes_per_parameter),), "given in the scenario")
    return _of_framework(training.framework, training.precision, training.optimizer.name)


# Cached, because searches ask for it many times.
@lru_cache(maxsize=64)
def _of_framework(name: str, precision: str, optimizer: str) -> ParameterMemory:
    find_by_name(name, dict.fromkeys(FRAMEWORKS), "framework")
    if name == _TORCH:
        return _of_torch(PRECISIONS[precision], OPTIMIZER_STATES[optimizer])
    known = _FRAMEWORKS[name]
    if precision not in known:
        raise InputError(
            f"the bytes per parameter of '{name}' are not known in precision {precision}",
            valid=f"known precisions: {', '.join(known)}; for another one give 'bytes_per_parameter'",
        )
    if optimizer != "adamw":
        raise InputError(
            f"the bytes per parameter of '{name}' are not known for optimizer '{optimizer}'",
            valid="known optimizer: adamw; for another one give 'bytes_per_parameter'",
        )
    return known[precision]


def _of_torch(formats: Precision, states: int) -> ParameterMemory:
    """Return what a device of a run holds: all in float32, and the copy that half precisions compute with."""
    parts: list[tuple[str, float]] = [("parameter", FLOAT32_BYTES), ("gradient", FLOAT32_BYTES)]
    if states:
        parts.append(("optimizer", FLOAT32_BYTES * states))
    if formats.copy_bytes:
        parts.append(("copy in half precision", formats.copy_bytes))
    return ParameterMemory(tuple(parts), "torch with autocast, as in runs")

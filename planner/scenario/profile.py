"""Cost of a model: the compute times of each layer on each device kind, and its bytes."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf, isnan, nan

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Seconds of compute for one microbatch: forward, input gradient, weight gradient."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def backward_s(self) -> float:
        """Seconds of the input gradient and the weight gradient."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def total_s(self) -> float:
        """Seconds of the forward and both gradients."""
        return self.forward_s + self.backward_s

    def __add__(self, other: "ComputeTimes") -> "ComputeTimes":
        return ComputeTimes(
            self.forward_s + other.forward_s,
            self.backward_input_s + other.backward_input_s,
            self.backward_weight_s + other.backward_weight_s,
        )


NO_TIME = ComputeTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """The measured table of a device kind (`planner.scenario.kind_table`) from which a layer's times were estimated.

    Attributes:
        source: The file of the table, and how it was measured.
        least_samples: The smallest microbatch with which the sizes of all matrix products of the layer were measured.
        most_samples: The largest such microbatch, smaller than ``least_samples`` if there is none; None for any.
    """

    source: str
    least_samples: int = 1
    most_samples: int | None = None

    def cover(self, samples: int) -> bool:
        """Return whether the sizes of the layer's products with a microbatch of ``samples`` are among the measured."""
        return self.least_samples <= samples and (self.most_samples is None or samples <= self.most_samples)


@dataclass(frozen=True)
class TimeTable:
    """Times of one layer on one device kind, measured or modelled at some sample counts.

    Times are interpolated linearly between rows. Above the last row the slope of the last two rows continues; below the
    first row, times are proportional to the samples.

    Attributes:
        samples: Sample count of each row, rising; at least one row.
        forward_s: Seconds of the forward, one per row.
        backward_input_s: Seconds of the input gradient, one per row.
        backward_weight_s: Seconds of the weight gradient, one per row.
        rates: Where the times are from, if they were estimated from a measured table of the kind; otherwise None.
    """

    samples: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    rates: MeasuredRates | None = None

    def __post_init__(self) -> None:
        columns = (self.forward_s, self.backward_input_s, self.backward_weight_s)
        if not self.samples or any(len(column) != len(self.samples) for column in columns):
            raise InputError(
                "columns of a time table differ in length", valid="give every column the same rows, one or more"
            )
        if self.samples[0] < 1 or any(b <= a for a, b in zip(self.samples, self.samples[1:], strict=False)):
            raise InputError(
                f"sample counts {list(self.samples)} are not allowed",
                valid="they are positive and rise from row to row",
            )
        if any(not 0 <= value < float("inf") for column in columns for value in column):
            raise InputError("a time is negative or not finite", valid="times are finite and not negative, in seconds")

    def at(self, samples: int) -> ComputeTimes:
        """Return the times for a microbatch of ``samples``; `NO_TIME` for 0."""
        if samples <= 0:
            return NO_TIME
        return ComputeTimes(
            self._interpolate(self.forward_s, samples),
            self._interpolate(self.backward_input_s, samples),
            self._interpolate(self.backward_weight_s, samples),
        )

    @property
    def most_samples(self) -> float:
        """The largest microbatch whose times are not extrapolated; infinite if a single row gives those of all."""
        return self.samples[-1] if len(self.samples) > 1 else inf

    def _interpolate(self, times_s: tuple[float, ...], samples: int) -> float:
        counts = self.samples
        if samples <= counts[0] or len(counts) == 1:
            return times_s[0] * samples / counts[0]
        right = min(bisect_left(counts, samples), len(counts) - 1)
        left = right - 1
        slope = (times_s[right] - times_s[left]) / (counts[right] - counts[left])
        return max(0.0, times_s[left] + slope * (samples - counts[left]))


@dataclass(frozen=True, slots=True)
class GroupSums:
    """All-reduces over the devices of a tensor-parallel group in one pass of a layer.

    An all-gather moves half as many bytes as an all-reduce, and counts as one of half of its bytes.

    Attributes:
        count: Number of all-reduces.
        sample_bytes: Bytes that all of them together sum for one sample.
    """

    count: int = 0
    sample_bytes: int = 0

    def __add__(self, other: "GroupSums") -> "GroupSums":
        return GroupSums(self.count + other.count, self.sample_bytes + other.sample_bytes)


NO_SUMS = GroupSums()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that are held only while a pass of a layer runs.

    Attributes:
        fixed_bytes: Bytes whatever the samples, such as those of a weight's gradient.
        sample_bytes: Bytes for each sample.
    """

    fixed_bytes: int = 0
    sample_bytes: int = 0

    def at(self, samples: int) -> int:
        """Return the bytes for a microbatch of ``samples``."""
        return self.fixed_bytes + samples * self.sample_bytes


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """Measured memory of a layer whose backward is split in input gradient and weight gradient.

    Attributes:
        deferred_bytes: Bytes that the layer holds for one sample from its input gradient to its weight gradient: inputs
            and gradients of outputs of the modules whose weight gradient is computed later.
        forward: What is held beside the saved activations during the forward.
        input: What is held beside the saved activations while the input gradient is computed.
        weight: What is held beside ``deferred_bytes`` while the weight gradient is computed.
    """

    deferred_bytes: int
    forward: Workspace = Workspace()
    input: Workspace = Workspace()
    weight: Workspace = Workspace()


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Measured memory of a layer's forward and backward beside the activations that it saves.

    Attributes:
        output_bytes: Bytes of the layer's output for one sample if the layer itself saves it, else 0. They count only
            at the end of a stage, since elsewhere the output is counted as the next layer's input.
        workspace: What is held beside the saved activations during the forward and an unsplit backward.
        split: The memory of a split backward; None if it was not measured.
    """

    output_bytes: int = 0
    workspace: Workspace = Workspace()
    split: SplitMemory | None = None


@dataclass(frozen=True)
class LayerProfile:
    """One layer of a model.

    Attributes:
        output_bytes: Bytes of the layer's output for one sample; transferred if a stage ends with this layer.
        activation_bytes: Bytes of activations that the layer saves for one sample from forward to backward.
        times: Time table of the layer for each device kind.
        update_s: Seconds of the optimizer's update of the layer for each device kind; a missing kind was not measured.
        forward_sums: Sums over the tensor-parallel group in the forward, whose time ``times`` does not include; none if
            the layer is not sharded, or if its times were measured in a group.
        backward_sums: The same of the input gradient.
        memory: Measured memory of its passes; None if only ``activation_bytes`` is known.
        tied_bytes: Bytes of the layer's copy of the parameters that it shares with other layers, such as the table of
            tied embeddings; all layers with such a copy share the same parameters.
    """

    name: str
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    times: Mapping[str, TimeTable]
    update_s: Mapping[str, float] = field(default_factory=dict)
    forward_sums: GroupSums = NO_SUMS
    backward_sums: GroupSums = NO_SUMS
    tied_bytes: int = 0
    memory: PassMemory | None = None

    @property
    def saved_output_bytes(self) -> int:
        """Bytes of the output for one sample that the layer itself saves."""
        return 0 if self.memory is None else self.memory.output_bytes

    def workspace_bytes(self, samples: int, share: float) -> float:
        """Return the bytes that are held only while a pass of the layer runs.

        If they were not measured, they are ``share`` of the activations that the layer saves.
        """
        return share * samples * self.activation_bytes if self.memory is None else self.memory.workspace.at(samples)


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """A model as a chain of layers with their costs.

    Attributes:
        layers: Layers in the order of the forward.
        sharded: Profile of one device of a tensor-parallel group, by the number of devices in the group.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    sharded: Mapping[int, "ModelProfile"] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"ModelProfile({self.name!r}, {len(self.layers)} layers)"

    @cached_property
    def tied_layers(self) -> tuple[int, ...]:
        """Indices of the layers that share parameters, each of which holds a copy."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.tied_bytes)

    def tied_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the copies of shared parameters in layers ``start`` to ``stop - 1``."""
        return sum(self.layers[index].tied_bytes for index in self.tied_layers if start <= index < stop)

    def at_degree(self, degree: int) -> "ModelProfile":
        """Return the profile of one device of a tensor-parallel group.

        Raises:
            InputError: The model has no profile for groups of ``degree`` devices.
        """
        if degree == 1:
            return self
        if degree not in self.sharded:
            raise InputError(
                f"model '{self.name}' has no profile for tensor parallelism over {degree} devices",
                valid=f"profiled degrees: {', '.join(map(str, [1, *sorted(self.sharded)]))}",
            )
        return self.sharded[degree]

    def times(self, start: int, stop: int, kind: str, samples: int) -> ComputeTimes:
        """Return the times of layers ``start`` to ``stop - 1`` on a device kind, for one microbatch.

        Raises:
            InputError: The profile has no times for this kind.
        """
        return _range_times(self, start, stop, kind, samples)

    def most_samples(self, kind: str) -> float:
        """Return the largest microbatch for which no layer's times on a device kind are extrapolated."""
        return _most_samples(self, kind)

    def group_sums(self, start: int, stop: int) -> tuple[GroupSums, GroupSums]:
        """Return the sums over a tensor-parallel group of layers ``start`` to ``stop - 1``, forward and backward."""
        layers = self.layers[start:stop]
        return (
            sum((layer.forward_sums for layer in layers), NO_SUMS),
            sum((layer.backward_sums for layer in layers), NO_SUMS),
        )

    def update_s(self, start: int, stop: int, kind: str) -> float:
        """Return the seconds that updating layers ``start`` to ``stop - 1`` takes, once a step; 0 if not measured."""
        return sum(layer.update_s.get(kind, 0.0) for layer in self.layers[start:stop])

    def parameter_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the parameters of layers ``start`` to ``stop - 1``."""
        until = self._parameter_bytes_until
        return until[stop] - until[start]

    def activation_bytes(self, start: int, stop: int) -> int:
        """Return the bytes that a stage of layers ``start`` to ``stop - 1`` saves for one sample until its backward."""
        until, last = self._activation_bytes_until, self.layers[stop - 1]
        return until[stop] - until[start] + (last.saved_output_bytes if start < stop else 0)

    # Sums of the bytes of the layers before each one, exact since bytes are whole: searches ask for many ranges.
    @cached_property
    def _parameter_bytes_until(self) -> tuple[int, ...]:
        return tuple(accumulate((layer.parameter_bytes for layer in self.layers), initial=0))

    @cached_property
    def _activation_bytes_until(self) -> tuple[int, ...]:
        return tuple(accumulate((layer.activation_bytes for layer in self.layers), initial=0))

    def workspace_bytes(self, start: int, stop: int, samples: int, share: float) -> float:
        """Return the most bytes that a stage of layers ``start`` to ``stop - 1`` holds beside all that it saves.

        The backward of a layer runs when the activations of the later layers are freed, so that the workspace of an
        early layer adds nothing to the peak unless it is larger than they are. ``share`` is that of
        `LayerProfile.workspace_bytes`.
        """
        layers = self.layers[start:stop]
        return _most_beside(
            [each.workspace_bytes(samples, share) for each in layers],
            [samples * each.activation_bytes for each in layers],
            samples * sum(each.saved_output_bytes for each in layers[-1:]),
        )

    def split_workspace_bytes(self, start: int, stop: int, samples: int, share: float) -> tuple[float, float]:
        """Return the same of forward and input gradient, and the most bytes that the weight gradient holds.

        The latter are those beside `deferred_bytes`. While the input gradient of a layer is computed, the later layers
        hold what their weight gradients need. If this was not measured for all layers, the input gradient holds what an
        unsplit backward does, and the weight gradient nothing more.
        """
        layers, split = self.layers[start:stop], self._split_memory(start, stop)
        if not split:
            return self.workspace_bytes(start, stop, samples, share), 0.0
        saved = [samples * each.activation_bytes for each in layers]
        deferred = [samples * each.deferred_bytes for each in split]
        freed = [before - after for before, after in zip(saved, deferred, strict=True)]
        output_bytes = samples * layers[-1].saved_output_bytes
        forward, of_input, of_weight = (
            [each.at(samples) for each in parts]
            for parts in zip(*((each.forward, each.input, each.weight) for each in split), strict=True)
        )
        most_bytes = max(
            _most_beside(forward, saved, output_bytes),
            _most_beside(of_input, freed, output_bytes),
            # What is held when the input gradient ends.
            -output_bytes - sum(freed),
        )
        return most_bytes, _most_beside(of_weight, deferred, 0)

    def deferred_bytes(self, start: int, stop: int) -> int | None:
        """Return the bytes that a stage holds for one sample from its input gradient to its weight gradient.

        None if they were not measured for all layers.
        """
        split = self._split_memory(start, stop)
        return sum(each.deferred_bytes for each in split) if split else None

    def _split_memory(self, start: int, stop: int) -> list[SplitMemory]:
        """Return the measured memory of each layer; an empty list if some layer has none."""
        found = []
        for layer in self.layers[start:stop]:
            if layer.memory is None or layer.memory.split is None:
                return []
            found.append(layer.memory.split)
        return found


def _most_beside(workspaces: Sequence[float], freed: Sequence[int], freed_before: int) -> float:
    """Return the most bytes that passes of layers, from the last layer on, hold beside what was held before; 0 or more.

    Args:
        workspaces: Bytes held only during the pass of each layer.
        freed: Bytes freed at its end, negative if more are held then.
        freed_before: Bytes freed before the first pass.
    """
    most_bytes, freed_bytes = 0.0, freed_before
    for workspace_bytes, own_bytes in zip(reversed(workspaces), reversed(freed), strict=True):
        most_bytes = max(most_bytes, workspace_bytes - freed_bytes)
        freed_bytes += own_bytes
    return most_bytes


@lru_cache(maxsize=65536)
def _range_times(model: ModelProfile, start: int, stop: int, kind: str, samples: int) -> ComputeTimes:
    total = ComputeTimes(*(sum(times_s[start:stop], 0.0) for times_s in _layer_times(model, kind, samples)))
    if isnan(total.forward_s):
        missing = next(layer for layer in model.layers[start:stop] if kind not in layer.times)
        raise InputError(
            f"model '{model.name}' has no times for layer '{missing.name}' on device kind '{kind}'",
            valid=f"profiled kinds: {', '.join(sorted(missing.times)) or 'none'}; profile it on this kind too, or take "
            "the kind's devices out of the cluster",
        )
    return total


@lru_cache(maxsize=256)
def _most_samples(model: ModelProfile, kind: str) -> float:
    return min((layer.times[kind].most_samples for layer in model.layers if kind in layer.times), default=inf)


@lru_cache(maxsize=256)
def _layer_times(model: ModelProfile, kind: str, samples: int) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of forward, input gradient and weight gradient of each layer; NaN where there are none."""
    tables = (layer.times.get(kind) for layer in model.layers)
    times = [ComputeTimes(nan, nan, nan) if table is None else table.at(samples) for table in tables]
    parts = ((each.forward_s, each.backward_input_s, each.backward_weight_s) for each in times)
    return tuple(zip(*parts, strict=True)) or ((), (), ())

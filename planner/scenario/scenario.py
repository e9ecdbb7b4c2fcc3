"""A scenario: the cluster, the model, its training, effects on devices and links, and faults."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import Effects
from planner.scenario.faults import Fault, LinkOutage
from planner.scenario.profile import ModelProfile
from planner.scenario.training import Training
from traces.common.errors import InputError
from traces.trace import LinkTrace


@dataclass(frozen=True, slots=True)
class ModelCode:
    """The model's own code, for runs with real compute.

    Attributes:
        path: Python file with a function ``build``.
        arguments: Keyword arguments for ``build``.
    """

    path: Path
    arguments: Mapping[str, int | float | str | bool]

    @property
    def source(self) -> Path:
        """The file that error messages name."""
        return self.path


@dataclass(frozen=True, slots=True)
class HuggingFaceCode:
    """A model of the package ``transformers``, for runs with real compute.

    Attributes:
        source: The ``config.json``, for error messages; ranks read ``config`` instead.
        config: The content of the ``config.json``.
        tokens: Number of tokens in a sample; of patches and the class token for a model of images.
        path: A safetensors file, or a folder or an index of such files, with the first weights; None for random ones,
            which follow the training's seed.
    """

    source: Path
    config: Mapping[str, Any]
    tokens: int
    path: Path | None = None


# Name of the index beside weights that are split into several files, as transformers writes it.
WEIGHT_INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights of a folder or of an index; otherwise the one file that ``path`` is.

    A folder with an index `WEIGHT_INDEX` has the files that the index names; one without has all its safetensors files.

    Raises:
        InputError: The index cannot be read, or names files that are not in its folder.
    """
    index = path / WEIGHT_INDEX if path.is_dir() else path
    if index.name.endswith(".index.json") and index.is_file():
        return _indexed_files(index)
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _indexed_files(index: Path) -> list[Path]:
    valid = f"an index as transformers writes it, '{WEIGHT_INDEX}': {{\"weight_map\": {{WEIGHT: FILE}}}}"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"the index cannot be read: {error!r}", where=str(index), valid=valid) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise InputError(f"the index names the file {name!r}, which is not beside it", str(index), valid)
    return [index.parent / name for name in sorted(names)]


# What can be trained. Each host needs a copy of the file or folder ``path``, if there is one.
Code = ModelCode | HuggingFaceCode


@dataclass(frozen=True, eq=False)
class Scenario:
    """Everything that a plan depends on, and the faults that happen during the run.

    Attributes:
        model: Cost of the model's layers.
        code: Code of the model, for runs with real compute; None if there is none.
        effects: Effects on devices and networks beyond the profile and the links' nominal values.
        faults: Departures, hangs and outages during the run.
        data: Number of samples stored in each region; they are only used in that region. Empty if every region has all
            samples.
    """

    name: str
    cluster: Cluster
    model: ModelProfile
    training: Training
    code: Code | None = None
    effects: Effects = field(default_factory=Effects)
    faults: tuple[Fault, ...] = ()
    data: Mapping[str, int] = field(default_factory=dict)


# Bytes of a step above which a model is refused: arrays count bytes in 64 bits, and also add them up.
_MOST_BYTES = 2**60


def check_countable(scenario: Scenario) -> None:
    """Raise `InputError` if the bytes of a step's samples are too many to be counted in 64 bits."""
    training = scenario.training
    for layer in scenario.model.layers:
        sizes = (layer.parameter_bytes, layer.output_bytes, layer.activation_bytes, layer.saved_output_bytes)
        if max(sizes) * training.largest_batch * len(scenario.model.layers) > _MOST_BYTES:
            problem = f"layer '{layer.name}' has {max(sizes):.3g} B, in a batch of {training.largest_batch:,} samples"
            valid = f"{_MOST_BYTES:.3g} B at most for all layers and samples of a step"
            raise InputError(problem, where=f"model '{scenario.model.name}'", valid=valid)


def check_takes_time(scenario: Scenario, kind: str, samples: int = 1) -> None:
    """Raise `InputError` if devices of a kind compute so many samples in no time.

    Strategies that divide samples by the speeds of devices call this.
    """
    model = scenario.model
    if not model.times(0, len(model.layers), kind, samples).total_s > 0:
        raise InputError(
            f"devices of kind '{kind}' compute all layers in no time, so that samples cannot be divided by speed",
            where=f"model '{model.name}'",
            valid="give a layer a time above zero on every kind of device, or choose a strategy such as 'megatron'",
        )


def code_to_train(scenario: Scenario) -> Code:
    """Return the code of a scenario's model; raise `InputError` if there is none."""
    if scenario.code is None:
        raise InputError(
            f"model '{scenario.model.name}' has no code to train",
            where="model.code",
            valid="add 'code: model.py' to the scenario, or run with '--compute paced'",
        )
    return scenario.code


# Memory of a device in `with_unlimited_memory`: more than any plan needs.
_UNLIMITED_BYTES = 2**60

# Lower limit on the rate of a link in `in_window`, so that steps end even if the whole window is an outage.
_LEAST_BPS = 1.0

# The two ends of a link, without direction.
Ends = frozenset[str]


def ends_of(link: Link) -> Ends:
    """Return the ends of a link; a network interface ends at its host and at ``network``."""
    return frozenset((link.source, link.target))


def with_better_links(
    scenario: Scenario, rate_ratio: float = 1.0, latency_ratio: float = 1.0, only: Collection[Ends] | None = None
) -> Scenario:
    """Return the scenario with scaled links and network interfaces, in both directions, and without traces on them.

    The bandwidths and the rates of size curves are multiplied by ``rate_ratio``, latencies by ``latency_ratio``, on the
    links with the ends ``only``; None for all links.
    """

    def changes(ends: Ends) -> bool:
        return only is None or ends in only

    def device(each: Device) -> Device:
        changed = changes(frozenset((each.machine, "network")))
        return replace(each, interface_bps=rate_ratio * each.interface_bps) if changed else each

    links = (
        _better(link, rate_ratio, latency_ratio) if changes(ends_of(link)) else link for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(tuple(map(device, scenario.cluster.devices)), tuple(links)))


def within_regions(scenario: Scenario, regions: Collection[str]) -> Scenario:
    """Return the scenario with the devices of some regions only, with their effects and faults, and their links."""
    devices = tuple(device for device in scenario.cluster.devices if device.region in regions)
    names = {device.name for device in devices}
    ends = names.union(*((device.machine, device.region) for device in devices))
    links = tuple(link for link in scenario.cluster.links if {link.source, link.target} <= ends)
    kept = {link.name for link in links}
    compute = scenario.effects.compute
    effects = replace(
        compute,
        stragglers=tuple(each for each in compute.stragglers if each.device in names),
        slowdowns=tuple(each for each in compute.slowdowns if each.device in names),
    )
    return replace(
        scenario,
        cluster=Cluster(devices, links),
        effects=replace(scenario.effects, compute=effects),
        faults=tuple(
            fault
            for fault in scenario.faults
            if (fault.link in kept if isinstance(fault, LinkOutage) else fault.device in names)
        ),
        data={region: samples for region, samples in scenario.data.items() if region in regions},
    )


def with_unlimited_memory(scenario: Scenario) -> Scenario:
    """Return the scenario with devices whose memory holds any plan."""
    devices = tuple(replace(device, memory_bytes=_UNLIMITED_BYTES) for device in scenario.cluster.devices)
    return replace(scenario, cluster=Cluster(devices, scenario.cluster.links))


def allowing_compressions(scenario: Scenario, formats: tuple[str, ...]) -> Scenario:
    """Return the scenario in which messages between regions may have some formats."""
    return replace(scenario, training=replace(scenario.training, compressions=formats))


def _better(link: Link, rate_ratio: float, latency_ratio: float) -> Link:
    curve = link.size_curve
    if curve is not None:
        curve = replace(
            curve,
            quadratic=rate_ratio * curve.quadratic,
            linear=rate_ratio * curve.linear,
            constant=rate_ratio * curve.constant,
            ceiling_bps=rate_ratio * curve.ceiling_bps,
        )
    return replace(
        link,
        bandwidth_bps=rate_ratio * link.bandwidth_bps,
        latency_s=latency_ratio * link.latency_s,
        size_curve=curve,
        trace=None,
    )


def in_window(scenario: Scenario, start_s: float, end_s: float) -> Scenario:
    """Return the scenario with each trace replaced by its mean rate and latency from ``start_s`` to ``end_s``."""
    links = tuple(_steady(link, start_s, end_s) for link in scenario.cluster.links)
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


def _steady(link: Link, start_s: float, end_s: float) -> Link:
    trace = link.trace
    if trace is None:
        return link
    rate_bps = float(trace.bits_between(start_s, end_s)) / (end_s - start_s)
    latency_s = link.latency_s
    if trace.latency_s is not None:
        # The latency is also piecewise constant: `bits_between` integrates it if it takes the place of the rate.
        as_rate = LinkTrace(trace.times_s, trace.latency_s, trace.duration_s, loops=trace.loops)
        latency_s = float(as_rate.bits_between(start_s, end_s)) / (end_s - start_s)
    return replace(link, bandwidth_bps=max(rate_bps, _LEAST_BPS), latency_s=latency_s, trace=None)

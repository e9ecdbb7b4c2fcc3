"""The verb ``ropebridge profile network``: measures the path to another host, or serves a host that measures."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from executor.profiling.message_times import (
    SERVICE,
    MessageProfile,
    can_measure_messages,
    measure_messages,
    serve_messages,
)
from experiments.profiles.cluster_file import MeasuredLink, add_links, check_cluster_file
from experiments.profiles.model_config import rising_numbers
from experiments.profiles.network_report import document_of, notes_on, table_of
from experiments.runs.console import CommandInterruptedError
from planner.scenario.effects import TCP, TCP_PAYLOAD_EFFICIENCY
from planner.scenario.size_curve import SizeCurve
from traces.common.errors import InputError, RunError
from traces.probe.bursts import MOST_BYTES, MOST_CONNECTIONS
from traces.probe.conversation import parse_address
from traces.probe.path_profile import PathProfile, profile_path
from traces.probe.peer import Peer, await_listener
from traces.probe.responder import Responder

# Least number of measured rates for a curve with three terms; with fewer the curve would be arbitrary between them.
_LEAST_POINTS = 4

# Largest relative error of a fitted curve at a measured rate.
_WITHIN = 1.25


def fit_size_curve(rates_bps: Mapping[float, float], ceiling_bps: float) -> SizeCurve | None:
    """Fit a size curve to measured rates by least squares of the relative errors.

    Args:
        rates_bps: Maps the size of a message, bytes, to its measured rate, bits per second.
        ceiling_bps: Rate limit of larger messages, bits per second.

    Returns:
        The curve; None if there are fewer than four rates, or the best curve misses one of them by over a quarter.
    """
    if len(rates_bps) < _LEAST_POINTS:
        return None
    exponents = np.log2(np.array(list(rates_bps)) / 1e6)
    rates = np.array(list(rates_bps.values())) / 8e9
    terms = [float(each) for each in np.polyfit(exponents, rates, 2, w=1 / rates)]
    curve = SizeCurve(terms[0], terms[1], terms[2], ceiling_bps)
    for size_bytes, rate_bps in rates_bps.items():
        found_bps = curve.rate_bps(size_bytes)
        if not min(rate_bps, ceiling_bps) / _WITHIN <= found_bps <= _WITHIN * rate_bps:
            return None
    return curve


# Sizes of timed messages: those that take at most _LONGEST_S and have at most _TRAFFIC_SHARE of all bytes to send.
_SIZES_BYTES = (1, 1_000, 4_000, 16_000, 64_000, 250_000, 1_000_000, 4_000_000, 16_000_000)
_LONGEST_S = 0.5
_TRAFFIC_SHARE = 0.01
# Timing a message takes this many round trips beside the message's own time. _ROUND_S limits all messages of one size.
_ROUND_TRIPS = 2
_ROUND_S = 0.1
_MOST_REPEATS = 5

# Jitter below this share of the latency is ascribed to the hosts, not to the network.
_JITTER_SHARE = 0.05
_JITTER_S = 2e-4

# A path gets a size curve if a message takes this many times as long as latency and bandwidth predict.
_SLOWER = 1.25


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Options of a measurement, as given on the command line.

    Attributes:
        address: Address of the responder; None if none was given.
        names: Names of this end and the other one, separated by a comma; None if no file is written.
        connections: Numbers of connections, separated by commas.
        traffic_bytes: Most bytes of all bursts together.
        output: The cluster file to write or complete; None writes none.
    """

    address: str | None
    names: str | None
    connections: str
    traffic_bytes: int
    output: Path | None


def listen_at(address: str, other: str | None, tell: Callable[[str], None]) -> None:
    """Serve measurements of other hosts until the command is interrupted, which is no error.

    ``other``, the address of another host to measure, must be None: a host either listens or measures.

    Raises:
        InputError: The address cannot be listened at, or ``other`` is given too.
    """
    if other is not None:
        raise InputError(
            f"both --listen and '{other}' are given",
            where="profile network",
            valid="listen on one host, and give its address on the other",
        )
    services = {SERVICE: serve_messages} if can_measure_messages() else {}
    with Responder(parse_address(address), services, tell) as responder, suppress(CommandInterruptedError):
        tell(
            f"serving measurements at {responder.address} to every host that reaches it, without authentication; "
            "Ctrl-C ends it"
        )
        responder.serve()


def profile_network(config: NetworkConfig, as_json: bool, tell: Callable[[str], None]) -> str:
    """Measure the path to another host, write or complete the cluster file, and return the text to print.

    Raises:
        InputError: The address does not answer, an option is wrong, or the file is no cluster file.
        RunError: The connection to the other end was lost.
    """
    if config.address is None:
        raise InputError(
            "no host to measure is given",
            where="profile network",
            valid="give HOST:PORT, or '--listen ADDRESS' on the other one",
        )
    address = parse_address(config.address)
    connections = rising_numbers(config.connections, "--connections", MOST_CONNECTIONS)
    names = _names(config)
    bursts = 2 * len(connections)
    if not 0 < config.traffic_bytes // bursts <= MOST_BYTES:
        problem = f"{config.traffic_bytes} bytes in {bursts} bursts cannot be measured"
        raise InputError(problem, where="--traffic", valid=f"give 1 to {MOST_BYTES} bytes a burst, such as '2 GB'")
    if config.output is not None:
        check_cluster_file(config.output, names)
    await_listener(address)
    with Peer(address) as peer:
        path = profile_path(peer, connections, config.traffic_bytes, tell)
        _refuse_dead(path)
        messages = _messages(peer, path, config.traffic_bytes, tell)
    links = _links(path, messages, names)
    notes = notes_on(path)
    if config.output is not None:
        notes += [*add_links(config.output, *links), f"written to {config.output}: name it as 'cluster:' of a scenario"]
    if as_json:
        return json.dumps({**document_of(path, messages, links), "notes": notes}, indent=2)
    return "\n".join([*table_of(path, messages, names), *notes])


def _names(config: NetworkConfig) -> tuple[str, str]:
    if config.names is None:
        if config.output is not None:
            raise InputError("a cluster file needs names of both ends", "--names", "add '--names here,there'")
        return "here", "there"
    names = tuple(each.strip() for each in config.names.split(","))
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise InputError(
            f"'{config.names}' does not name two ends",
            where="--names",
            valid="give two names, such as 'berlin,workshop'",
        )
    return names


def _refuse_dead(path: PathProfile) -> None:
    for direction, found in path.directions.items():
        if not found.best_bps.median:
            raise RunError(f"no burst came through in the direction '{direction}': is there a firewall in between?")


def _messages(peer: Peer, path: PathProfile, traffic_bytes: int, tell: Callable[[str], None]) -> MessageProfile | None:
    if SERVICE not in peer.services or not can_measure_messages():
        tell("gloo's messages are not measured: torch is needed at both ends")
        return None
    round_trip_s = path.round_trip_s.median
    there = path.directions["there"]
    rate_bps = there.rates_bps[min(there.rates_bps)].median or there.best_bps.median
    most_bytes = min(_LONGEST_S * rate_bps / 8, _TRAFFIC_SHARE * traffic_bytes)
    sizes = [size for size in _SIZES_BYTES if size <= max(1, most_bytes)]
    taken_s = [_ROUND_TRIPS * round_trip_s + 8 * size / rate_bps for size in sizes]
    repeats = [min(_MOST_REPEATS, max(1, int(_ROUND_S / each_s))) for each_s in taken_s]
    tell(f"gloo's messages of 1 B to {sizes[-1] / 1e6:g} MB")
    try:
        return measure_messages(peer, sizes, repeats)
    except RunError as error:
        tell(f"gloo's messages are not measured: {error}")
        return None


def _links(
    path: PathProfile, messages: MessageProfile | None, names: tuple[str, str]
) -> tuple[MeasuredLink, MeasuredLink]:
    """Return a link for each direction, such that simulated messages over the links take the measured times."""
    jitter_s, latency_s = path.jitter_s, path.latency_s
    if jitter_s > max(_JITTER_S, _JITTER_SHARE * latency_s):
        latency_s = path.least_round_trip_s / 2
    else:
        jitter_s = 0.0
    if messages is not None:
        # The smallest message takes longer than a packet, since a process at each end handles it. The effects of TCP
        # add the usual time for this.
        handover_s = max(0.0, messages.arrival_s[1].median - path.latency_s)
        latency_s = max(0.0, latency_s + handover_s - TCP.handover_s)
    there, back = (path.directions[direction].best_bps.median for direction in ("there", "back"))
    curve = _size_curve(path, messages)
    return (
        MeasuredLink(*names, there / TCP_PAYLOAD_EFFICIENCY, latency_s, jitter_s, curve),
        MeasuredLink(*names[::-1], back / TCP_PAYLOAD_EFFICIENCY, latency_s, jitter_s, curve),
    )


def _size_curve(path: PathProfile, messages: MessageProfile | None) -> SizeCurve | None:
    """Return a size curve if messages take longer than latency and bandwidth predict, else None."""
    if messages is None:
        return None
    there, round_trip_s = path.directions["there"], path.round_trip_s.median
    window = there.window_bytes(round_trip_s)
    rate_bps = there.best_bps.median if window is None else 8 * window / round_trip_s
    latency_s = messages.arrival_s[1].median
    rates, slower = {}, False
    for size_bytes, arrival in messages.arrival_s.items():
        slower |= arrival.median > _SLOWER * (latency_s + 8 * size_bytes / rate_bps)
        if arrival.least > latency_s:
            rates[float(size_bytes)] = 8 * size_bytes / (arrival.median - latency_s)
    return fit_size_curve(rates, max(rates.values())) if slower and rates else None

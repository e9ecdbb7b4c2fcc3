"""`ropebridge profile network`: what it finds on links whose truth is known, and the cluster files that it writes."""

import json
import signal
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.profiling.message_times import SERVICE, measure_messages
from experiments.profiles.cluster_file import MeasuredLink, add_links
from experiments.profiles.network import (
    fit_size_curve,
)
from planner.cost.network import connections_ceiling_bps, nominal_path, payload_bps
from planner.files.scenario import read_scenario
from planner.scenario.effects import TCP_PAYLOAD_EFFICIENCY, WIDE_AREA_TCP
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from tests.helpers.networks.linked_hosts import RESPONDER, LinkedHosts, Outcome, run_in_hosts
from tests.helpers.networks.responders import free_port, responder, server
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import started, wait_until
from traces.common.errors import InputError, RunError
from traces.formats import read_trace
from traces.probe.conversation import GREETING, Address
from traces.probe.peer import Peer
from traces.probe.responder import Responder

CLUSTER = """\
# My two machines.
devices:
  - {name: one, kind: jetson-nano, region: berlin}  # under the desk
  - {name: two, kind: jetson-nano, region: workshop}
"""

SCENARIO = """\
name: measured
cluster: cluster.yaml
model:
  name: one-layer
  layers: [{name: block, repeat: 2, parameters: 1 MB, output: 1 MB, activation: 1 MB, forward: 1 GFLOP}]
training: {global_batch: 4}
"""


def scenario(folder: Path, effects: str = "") -> Scenario:
    """What a scenario says that names the folder's cluster file."""
    path = folder / "scenario.yaml"
    path.write_text(f"{SCENARIO}{effects}\n")
    return read_scenario(path)


# ---- the measurements, on emulated links

NAMES = ["--names", "berlin,workshop"]
STEADY_BPS, STEADY_S = 100e6, 0.02
# Linux takes a third and more of a send buffer for headers and bookkeeping.
WINDOW_LINK_BPS, WINDOW_S, BUFFER_BYTES = 120e6, 0.025, 500_000
STEP_BPS = (80e6, 20e6)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of the commands by link, and the folder with their files."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "cluster.yaml").write_text(CLUSTER)
    profile = ["profile", "network", RESPONDER, *NAMES, "--connections", "1,4", "--json"]
    record = ["traces", "record", RESPONDER, "-o", str(folder / "link.csv"), "--every", "1 s", "--duration", "12 s"]
    stepped = read_step(folder)
    profile += ["--traffic", "40 MB"]
    pairs = {
        "steady": LinkedHosts(STEADY_BPS, STEADY_S, [[*profile, "-o", str(folder / "cluster.yaml")]]),
        "window": LinkedHosts(WINDOW_LINK_BPS, WINDOW_S, [profile], wmem_bytes=BUFFER_BYTES),
        "stepped": LinkedHosts(50e6, 0.01, [record], trace=stepped),
    }
    # Side by side: each has a link of its own, and together they are a third of what the relay can carry.
    outcomes = run_in_hosts(list(pairs.values()), folder)
    return {"folder": folder, **dict(zip(pairs, outcomes, strict=True))}


def read_step(folder: Path) -> Any:
    path = folder / "steps.csv"
    path.write_text(f"time_s,bandwidth_bps\n0,{STEP_BPS[0]}\n9,{STEP_BPS[1]}\n100,\n")
    return read_trace(path)


def result(outcomes: list[Outcome]) -> dict[str, Any]:
    """What the measuring end printed; the responder ended well."""
    near, far = outcomes
    assert near.returncode == 0, near.stderr
    assert (far.returncode, far.stdout) == (0, ""), far.stderr
    found: dict[str, Any] = json.loads(near.stdout)
    return found


def assert_rate(interval: dict[str, float], truth_bps: float) -> None:
    """No round above what the relay carries, where nothing is lost; one of six within 5 % of it, the median within 20.

    Who has to wait for a turn of another process in one round has had it in another one.
    """
    assert interval["median"] <= 1.02 * truth_bps
    assert interval["most"] >= 0.95 * truth_bps
    assert interval["median"] >= 0.8 * truth_bps


@pytest.mark.slow
@pytest.mark.timed
def test_latency_and_bandwidth_are_the_links(measured: dict[str, Any]) -> None:
    found = result(measured["steady"])
    latency_s = found["round_trip_s"]["median"] / 2
    assert STEADY_S <= latency_s <= STEADY_S + max(1e-3, 0.05 * STEADY_S)
    for direction in found["directions"].values():
        for interval in direction["payload_bps"].values():
            assert_rate(interval, TCP_PAYLOAD_EFFICIENCY * STEADY_BPS)
        assert direction["window_bytes"] is None


@pytest.mark.slow
@pytest.mark.timed
def test_several_connections_show_the_window_of_one(measured: dict[str, Any]) -> None:
    found = result(measured["window"])
    for direction in found["directions"].values():
        single, four = (direction["payload_bps"][count]["median"] for count in ("1", "4"))
        assert single < 0.8 * four
        assert_rate(direction["payload_bps"]["4"], TCP_PAYLOAD_EFFICIENCY * WINDOW_LINK_BPS)
        # What is under way is what the buffer holds, less what Linux takes of it.
        assert 0.4 * BUFFER_BYTES <= direction["window_bytes"] <= BUFFER_BYTES
        assert direction["window_bytes"] == pytest.approx(single * found["round_trip_s"]["median"] / 8)
    assert any("base: tcp, window: 0." in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.timed
def test_the_ready_notice_takes_the_way_back(measured: dict[str, Any]) -> None:
    messages = result(measured["steady"])["messages"]
    assert messages["ready_notice_s"]["median"] == pytest.approx(STEADY_S, abs=5e-3)
    # A message is there after the latency, and the time that its bytes take.
    for size, arrival in messages["arrival_s"].items():
        least_s = STEADY_S + 8 * int(size) / (TCP_PAYLOAD_EFFICIENCY * STEADY_BPS)
        assert 0.99 * least_s <= arrival["median"] <= 1.2 * least_s + 5e-3


@pytest.mark.slow
@pytest.mark.timed
def test_the_cluster_file_simulates_what_was_measured(measured: dict[str, Any]) -> None:
    found, folder = result(measured["steady"]), measured["folder"]
    text = (folder / "cluster.yaml").read_text()
    assert text.startswith(CLUSTER)
    best_bps = min(
        max(direction["payload_bps"].values(), key=lambda each: each["least"])["median"]
        for direction in found["directions"].values()
    )
    path = nominal_path(scenario(folder, "effects: {network: tcp}"), "one", "two")
    assert path.rate_bps == pytest.approx(best_bps, rel=1e-3)
    assert path.latency_s == pytest.approx(found["messages"]["arrival_s"]["1"]["median"], rel=1e-3)
    # Two processes pass a message on, and wait for a core; counted twice, the way would take 20 ms more.
    assert 0 <= path.latency_s - found["round_trip_s"]["median"] / 2 <= 5e-3
    done = ropebridge("simulate", folder / "scenario.yaml", "--strategy=megatron", "--steps", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timed
def test_a_recording_shows_both_rates_of_a_step(measured: dict[str, Any]) -> None:
    near, far = measured["stepped"]
    assert near.returncode == 0, near.stderr
    assert far.returncode == 0, far.stderr
    trace = read_trace(measured["folder"] / "link.csv")
    for rate_bps in STEP_BPS:
        near_it = abs(trace.bandwidth_bps / rate_bps - 1) < 0.05
        assert near_it.sum() >= 2, trace.bandwidth_bps
    assert trace.latency_s is not None
    assert float(trace.latency_s.min()) == pytest.approx(0.01, abs=1e-3)


# ---- the command, on this machine

QUICK = ["--connections", "1,2", "--traffic", "40 MB"]


def test_a_table_and_a_new_cluster_file(tmp_path: Path) -> None:
    with responder(tmp_path / "far") as (address, process):
        done = ropebridge("profile", "network", address, *QUICK, *NAMES, "-o", tmp_path / "cluster.yaml")
        assert done.returncode == 0, done.stderr
        for words in ("latency, one way", "payload, berlin to workshop", "2 connections", "a late receive costs"):
            assert words in done.stdout
        # Interrupted, it ends in good order, and so does whatever it started.
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    assert "devices: []" in (tmp_path / "cluster.yaml").read_text()
    with pytest.raises(InputError, match="the cluster has no devices"):
        scenario(tmp_path)


def test_without_gloo_at_the_other_end_the_rest_is_measured() -> None:
    address = Address("127.0.0.1", free_port())
    with Responder(address, {}, [].append) as there:
        threading.Thread(target=there.serve, daemon=True).start()
        done = ropebridge("profile", "network", address, *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    assert "gloo's messages are not measured: torch is needed at both ends" in done.stderr
    found = json.loads(done.stdout)
    assert found["messages"] is None
    assert [(link["source"], link["target"]) for link in found["links"]] == [("here", "there"), ("there", "here")]


def test_gloo_that_finds_no_way_is_not_the_end() -> None:
    def fails(own: str, peer: str, message: dict[str, Any]) -> dict[str, Any]:
        assert (own, peer, set(message)) == ("127.0.0.1", "127.0.0.1", {"do", "port"})
        raise RunError("no way")

    address = Address("127.0.0.1", free_port())
    with Responder(address, {SERVICE: fails}, [].append) as there:
        threading.Thread(target=there.serve, daemon=True).start()
        with Peer(address) as peer, pytest.raises(RunError, match="refused: no way"):
            measure_messages(peer, [1], [1])


def test_either_end_can_be_interrupted(tmp_path: Path) -> None:
    with responder(tmp_path / "far") as (address, far):
        (tmp_path / "near").mkdir()
        measure = ["profile", "network", address, "--traffic", "30 GB", *NAMES, "-o", str(tmp_path / "cluster.yaml")]
        with started(measure, tmp_path / "near") as (process, _):
            assert process.stderr is not None
            wait_until(lambda: "there: 1 connection" in process.stderr.readline(), "it does not begin")
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=30)
        assert (process.returncode, said) == (130, "")
        assert errors.splitlines()[-1] == "ropebridge: interrupted"
        # The far end serves the next one, and is interrupted in the middle of that.
        (tmp_path / "next").mkdir()
        with started(measure, tmp_path / "next") as (process, _):
            assert process.stderr is not None
            wait_until(lambda: "there: 1 connection" in process.stderr.readline(), "it does not begin")
            far.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
            assert far.wait(timeout=30) == 0
        assert (process.returncode, said) == (1, "")
        assert f"ropebridge: {address} closed the connection" in errors.splitlines()[-1]
    assert not (tmp_path / "cluster.yaml").exists()


def test_a_responder_says_why_it_cannot_listen(tmp_path: Path) -> None:
    with server(lambda connection: None) as address:
        done = ropebridge("profile", "network", "--listen", address)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot listen at {address}: Address already in use" in done.stderr
    done = ropebridge("profile", "network", "--listen", "192.0.2.1:7117")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot listen at 192.0.2.1:7117: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no host to measure"),
        (["--listen", "127.0.0.1", "10.0.0.1"], "both --listen and '10.0.0.1'"),
        (["127.0.0.1", "-o", "cluster.yaml"], "--names: a cluster file needs names of both ends"),
        (["127.0.0.1", "--names", "a"], "--names: 'a' does not name two ends; give two names"),
        (["127.0.0.1", "--names", "a,a"], "--names: 'a,a' does not name two ends; give two names"),
        (
            ["127.0.0.1", "--connections", "4,2"],
            "--connections: '4,2' is no list of rising numbers; give rising whole numbers up to 32",
        ),
        (["127.0.0.1", "--traffic", "2"], "'2' has no unit"),
        (["127.0.0.1", "--traffic", "1 B"], "--traffic: 1 bytes"),
        (["127.0.0.1", *NAMES, "-o", "none/cluster.yaml"], "the folder 'none' does not exist"),
        (["127.0.0.1", *NAMES, "-o", "cluster.json"], "let its name end in .yaml"),
        ([f"127.0.0.1:{free_port()}", *NAMES, "-o", "cluster.yaml"], "nothing listens at 127.0.0.1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = ropebridge("profile", "network", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_another_protocol_is_refused(tmp_path: Path) -> None:
    with server(lambda connection: connection.sendall(b"220 mail\r\n")) as address:
        done = ropebridge("profile", "network", address, *NAMES, "-o", tmp_path / "cluster.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"what listens at {address} is not a responder: it starts with b'220 mail" in done.stderr
    assert list(tmp_path.iterdir()) == []
    # But for the greeting.
    assert not b"220 mail".startswith(GREETING[:1])


# ---- cluster files


def links(there_bps: float, back_bps: float, **others: Any) -> tuple[MeasuredLink, MeasuredLink]:
    return (
        MeasuredLink("berlin", "workshop", there_bps, 0.02, **others),
        MeasuredLink("workshop", "berlin", back_bps, 0.02, **others),
    )


def added(folder: Path, content: str, *measured_links: MeasuredLink) -> str:
    """What the file has beside its first content."""
    path = folder / "cluster.yaml"
    path.write_text(content)
    add_links(path, *measured_links)
    text = path.read_text()
    assert text.startswith(content.partition("links:")[0])
    return text.removeprefix(content.partition("links:")[0])


def test_like_directions_are_one_link_and_unlike_ones_two(tmp_path: Path) -> None:
    assert added(tmp_path, CLUSTER, *links(100e6, 98e6)) == (
        "links:\n  - {between: [berlin, workshop], bandwidth: 98 Mbit/s, latency: 20 ms}\n"
    )
    assert added(tmp_path, CLUSTER, *links(100e6, 20e6, jitter_s=0.003)) == (
        "links:\n"
        "  - {from: berlin, to: workshop, bandwidth: 100 Mbit/s, latency: 20 ms, jitter: 3 ms}\n"
        "  - {from: workshop, to: berlin, bandwidth: 20 Mbit/s, latency: 20 ms, jitter: 3 ms}\n"
    )
    path = nominal_path(scenario(tmp_path), "two", "one")
    assert (path.rate_bps, path.latency_s, path.jitter_s) == (
        payload_bps(WIDE_AREA_TCP, 20e6),
        0.02 + WIDE_AREA_TCP.handover_s,
        0.003,
    )


def test_what_a_person_wrote_of_a_link_stays(tmp_path: Path) -> None:
    before = f"""{CLUSTER}links:
  - {{inside: berlin, bandwidth: 10 Gbit/s, latency: 0.1 ms}}  # the switch
  - {{between: [workshop, berlin], bandwidth: 5 Mbit/s, latency: 99 ms, jitter: 1 ms, price_usd_per_gb: 0.02}}
"""
    assert added(tmp_path, before, *links(100e6, 100e6)) == (
        "links:\n"
        "  - {inside: berlin, bandwidth: 10 Gbit/s, latency: 0.1 ms}  # the switch\n"
        "  - {between: [berlin, workshop], bandwidth: 100 Mbit/s, latency: 20 ms, price_usd_per_gb: 0.02}\n"
    )
    scenario(tmp_path)


def test_a_trace_stays_and_the_reader_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    (tmp_path / "link.csv").write_text("time_s,bandwidth_mbps\n0,10\n10,20\n")
    path.write_text(
        f"{CLUSTER}links:\n  - {{from: berlin, to: workshop, latency: 9 ms, trace: {{file: link.csv}}}}\n"
        "  - {from: workshop, to: berlin, latency: 9 ms, bandwidth: 1 Mbit/s}\n"
    )
    (note,) = add_links(path, *links(100e6, 100e6))
    assert note == "berlin to workshop: the file's trace stays, in place of the bandwidth measured here"
    found = scenario(tmp_path).cluster
    (there,), (back,) = found.path("one", "two"), found.path("two", "one")
    assert (there.trace is not None, there.latency_s, back.bandwidth_bps) == (True, 0.02, 100e6)


def test_each_pair_adds_its_links(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{CLUSTER}  - {{name: three, kind: jetson-nano, region: lab}}\n")
    for ends in (("berlin", "workshop"), ("berlin", "lab"), ("lab", "workshop"), ("berlin", "lab")):
        add_links(path, MeasuredLink(*ends, 1e8, 0.01), MeasuredLink(*ends[::-1], 1e8, 0.01))
    cluster = scenario(tmp_path).cluster
    assert len(cluster.links) == 6
    assert cluster.path("three", "two")[0].name == "lab->workshop"


@given(st.floats(1e3, 1e12), st.floats(1e3, 1e12), st.floats(1e-6, 2), st.floats(0, 1))
def test_links_are_read_as_they_were_measured(
    there_bps: float, back_bps: float, latency_s: float, jitter: float
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(CLUSTER)
        jitter_s = jitter * latency_s
        curve = SizeCurve(1e-3, 2e-2, 0.3, there_bps)
        add_links(
            folder / "cluster.yaml",
            MeasuredLink("berlin", "workshop", there_bps, latency_s, jitter_s, curve),
            MeasuredLink("workshop", "berlin", back_bps, latency_s, jitter_s),
        )
        cluster = scenario(folder).cluster
    (there,), (back,) = cluster.path("one", "two"), cluster.path("two", "one")
    alike = min(there_bps, back_bps) >= 0.95 * max(there_bps, back_bps)
    expected = [min(there_bps, back_bps)] * 2 if alike else [there_bps, back_bps]
    assert [there.bandwidth_bps, back.bandwidth_bps] == pytest.approx(expected, rel=1e-3)
    assert there.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert there.jitter_s == pytest.approx(jitter_s, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: x\ncluster: {devices: []}\n", "this is a whole scenario"),
        ("name: x\nlayers: []\n", "unknown key 'name'"),
        ("- one\n", "is not valid"),
        ("devices: [\n", "not YAML"),
        ("devices:\n  - {name: one, kind: jetson-nano, region: berlinn}\n", "'berlin'; did you mean 'berlinn'?"),
        (f"{CLUSTER}links: all\n", "cluster.yaml:5: links"),
    ],
)
def test_a_file_that_cannot_take_links_is_left_alone(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    done = ropebridge("profile", "network", "127.0.0.1", *NAMES, "-o", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert path.read_text() == content


# ---- size curves


@given(st.sets(st.integers(-3, 7), min_size=4), st.floats(0, 0.01), st.floats(0.07, 0.2), st.floats(1, 5))
def test_a_curve_is_fitted_to_what_follows_one(exponents: set[int], a: float, b: float, c: float) -> None:
    """Where a polynomial rises and no smaller message takes longer, it is the curve."""
    truth = SizeCurve(a, b, c, 1e12)
    rates = {1e6 * 2.0**exponent: truth.rate_bps(1e6 * 2.0**exponent) for exponent in exponents}
    found = fit_size_curve(rates, 1e12)
    assert found is not None
    for size, rate_bps in rates.items():
        assert found.rate_bps(size) == pytest.approx(rate_bps, rel=1e-6)


@given(st.dictionaries(st.floats(1e3, 1e9), st.floats(1e3, 1e11), max_size=9))
def test_a_curve_comes_within_a_quarter_of_everything_or_is_none(rates: dict[float, float]) -> None:
    found = fit_size_curve(rates, max(rates.values(), default=1.0))
    if found is not None:
        for size, rate_bps in rates.items():
            assert found.rate_bps(size) == pytest.approx(rate_bps, rel=0.26)


def test_what_follows_no_curve_gets_none() -> None:
    assert fit_size_curve({1e3: 1e9, 1e4: 1e6, 1e5: 1e9, 1e6: 1e6, 1e7: 1e9}, 1e9) is None
    assert fit_size_curve({1e3: 1e6, 1e4: 1e7, 1e5: 1e8}, 1e9) is None


def test_a_window_in_the_effects_is_the_ceiling_of_a_connection(tmp_path: Path) -> None:
    """What the command advises, in the words of the simulator: a window per round trip, of payload."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    add_links(tmp_path / "cluster.yaml", *links(1e9, 1e9))
    found = scenario(tmp_path, "effects: {network: {base: tcp, window: 0.4 MB}}")
    assert connections_ceiling_bps(found, "one", "two", 1) == pytest.approx(8 * 0.4e6 / 0.04)

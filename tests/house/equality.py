"""Shows that a refactor changed nothing: ``python tests/house/equality.py OLD_CHECKOUT NEW_CHECKOUT``.

Runs the same combinations of scenario, strategy and policy through the command of each checkout, and compares what they
leave: plans, orders of actions, run folders, traces for Perfetto, pages. Prints a line for each
combination: that it is the same, or the first thing that differs; exits with 1 if anything does. Takes a few minutes.

Each checkout's commands run one after another in one process, since it takes two seconds to start one. That process
works in the checkout and finds its modules there, wherever this file lies and whatever is installed. What ``plan``
prints, its explanation for example, is left out: the plan is compared itself.
"""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

# Keys, and values that are such a word: what the new version says for what the old one said. Either may say either.
RENAMED: Mapping[str, str] = {"every": "interval_steps"}

# Keys that are not compared, and why.
IGNORED: Mapping[str, str] = {"version": "of the plan's format, which goes up when one of its keys is renamed"}

# Left out of pages, of which only the order of first appearance is compared: the random names and the running numbers
# that bokeh gives to what it draws, which say nothing, and the version of the program that is installed.
_NUMBERED = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r'|(?<=")p\d{4,}(?=")'
    r"|(?<=Made by ropebridge )[\w.+]+(?=\. )"
)

_PACKAGES = ("traces", "planner", "sim", "executor", "experiments")
_SHOWN = 80

# The command's exit status when somebody stops it.
_INTERRUPTED = 130
_FEW_STEPS, _MANY_STEPS = 8, 20


@dataclass(frozen=True)
class Combination:
    """One run of the simulator.

    Attributes:
        scenario: A ready one, or one of `SCENARIOS`.
        strategy: Makes the plan.
        options: More words for ``plan``, about the order of actions.
        policy: Adapts the plan.
        steps: Training steps.
        changes: Keys of the plan's file to put in place of the strategy's, before the simulation.
    """

    scenario: str
    strategy: str
    options: tuple[str, ...] = ()
    policy: str = "none"
    steps: int = _FEW_STEPS
    changes: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = [json.dumps(self.changes)] if self.changes else []
        return ", ".join([self.scenario, self.strategy, *self.options, f"policy {self.policy}", *changed])


# The other ready files are models, which these scenarios name.
READY = ("two-regions", "cloud-edge-end", "cloud-edge-end-small", "digits")
STRATEGIES = (
    *("auto", "deepcee", "asteroid", "asteroid-duplex", "cannikin", "cloudless", "megatron", "ddp", "pipedream"),
    *("gpipe", "dapple", "hetpipe", "zb-h1-equal", "lb-bsp", "adaptdl", "greedy"),
)
# Not `optimal`: its solver stops when its time is over.
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "compact-zb", "portfolio")

_HEAD = """
model:
  name: stack
  layers:
    - {name: embedding, parameters: 1 MB, output: 400 kB, activation: 2 kB, forward: 0 FLOP}
    - {name: block, repeat: 8, parameters: 4 MB, output: 400 kB, activation: 4 MB, forward: 2 GFLOP}
    - {name: head, parameters: 1 MB, output: 100 kB, activation: 1 MB, forward: 100 MFLOP}
cluster:
  devices:
    - {name: hub-a, kind: t4, region: hub, host: rack, interface: 2 Gbit/s, price_usd_per_hour: 0.35}
    - {name: hub-b, kind: p4000, region: hub, host: rack, interface: 2 Gbit/s, price_usd_per_hour: 0.51}
    - {name: site-a, kind: jetson-agx-orin, region: site}
    - {name: site-b, kind: jetson-agx-xavier, region: site}
    - {name: edge-a, kind: p4000, region: edge, price_usd_per_hour: 0.4}
  links:
    - {inside: hub, bandwidth: 1 Gbit/s, latency: 0.3 ms}
    - {inside: site, latency: 0.3 ms, size_curve: {linear: 0.01, constant: 0.05, ceiling: 800 Mbit/s}}
"""
_STEADY = """
    - {between: [hub, site], bandwidth: 400 Mbit/s, latency: 10 ms, price_usd_per_gb: 0.09}
    - {between: [hub, edge], bandwidth: 400 Mbit/s, latency: 20 ms}
    - {between: [site, edge], bandwidth: 300 Mbit/s, latency: 5 ms}
"""
_LOSSY = """
    - {between: [hub, site], bandwidth: 400 Mbit/s, latency: 10 ms, jitter: 3 ms, loss: 0.001}
    - {between: [hub, edge], bandwidth: 400 Mbit/s, latency: 20 ms, jitter: 8 ms}
    - {between: [site, edge], bandwidth: 300 Mbit/s, latency: 5 ms, loss: 0.0002}
"""
_SWAYING = """
    - between: [hub, site]
      latency: 10 ms
      trace:
        steps: [{at: 0 s, bandwidth: 400 Mbit/s}, {at: 6 s, bandwidth: 60 Mbit/s}, {at: 30 s, bandwidth: 400 Mbit/s}]
        duration: 40 s
    - {between: [hub, edge], latency: 20 ms, trace: {preset: lte, mean: 200 Mbit/s, seed: 7}}
    - {from: site, to: edge, latency: 5 ms, trace: {preset: 5g, mean: 300 Mbit/s, seed: 11, duration: 90 s}}
    - {from: edge, to: site, bandwidth: 150 Mbit/s, latency: 7 ms}
"""
_PLAIN = "training: {global_batch: 64, microbatch: 4, optimizer: {name: adamw, learning_rate: 0.001}}\n"
_STORED = """
training:
  global_batch: 48
  microbatch: 4
  optimizer: {name: momentum, momentum: 0.8, schedule: {shape: cosine, warmup_steps: 2, decay_steps: 6}}
  precision: bf16
data: {hub: 3000, site: 2000, edge: 1000}
"""
_UNLIKE = """
effects:
  compute:
    launch_overhead: 0.2 ms
    jitter: 0.1
    seed: 5
    stragglers: [{device: hub-b, factor: 1.7}]
    slowdowns: [{device: site-a, pieces: [{from: 0 s, speed: 1}, {from: 4 s, speed: 0.4}, {from: 20 s, speed: 1.2}]}]
  memory: {framework: 500 MB, workspace_share: 0.5}
"""
_BLOCKING = "effects: {network: {base: tcp, share: 0.8, window: 1 MB}, compute: {transfers_block: true}}"
_FAULTS = """
faults:
  - {device: site-b, leaves: 3 s, returns: 7 s}
  - {device: hub-a, hangs: 5 s, goes_on: 6 s}
  - {link: hub->site, out: 2 s, back: 2.5 s}
"""
_GONE = "faults: [{device: site-a, leaves: 4 s}, {device: edge-a, leaves: 12 s, returns: 15 s}]"
SCENARIOS: Mapping[str, str] = {
    "swaying": _SWAYING + _PLAIN,
    "shared-tcp": _SWAYING + _PLAIN + "effects: {network: tcp}",
    "lossy": _LOSSY + _PLAIN + "effects: {network: tcp-wide-area}",
    "blocking": _STEADY + _PLAIN + _BLOCKING,
    "unlike": _STEADY + _PLAIN + _UNLIKE,
    "stored": _STEADY + _STORED + _UNLIKE,
    "faults": _STEADY + _PLAIN + _FAULTS,
    "gone": _STEADY + _PLAIN + _GONE,
}

_ORDERED = (("cloud-edge-end", "zb-h1-equal"), ("cloud-edge-end-small", "zb-h1-equal"), ("shared-tcp", "megatron"))
_ADAPTED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "none": (("blocking", "asteroid"), ("lossy", "hetpipe"), ("shared-tcp", "asteroid"), ("faults", "cloudless")),
    "depth": (("two-regions", "megatron"), ("swaying", "megatron"), ("lossy", "megatron"), ("stored", "dapple")),
    "auto": (("swaying", "megatron"), ("stored", "hetpipe"), ("faults", "megatron"), ("gone", "hetpipe")),
    "deepcee": (("cloud-edge-end-small", "megatron"), ("swaying", "megatron"), ("unlike", "deepcee")),
    "cannikin": (("unlike", "ddp"), ("stored", "lb-bsp"), ("faults", "cannikin"), ("digits", "ddp")),
    "cloudless": (("unlike", "cloudless"), ("stored", "cloudless"), ("shared-tcp", "cloudless")),
    "asteroid-replay": (("gone", "asteroid"), ("gone", "megatron"), ("faults", "hetpipe")),
    "heavy-rescheduling": (("gone", "asteroid"), ("faults", "megatron")),
}


def combinations() -> Iterator[Combination]:
    """Yield what is run: every strategy, every schedule and every policy, on all effects, faults and traces."""
    for scenario in READY:
        for strategy in STRATEGIES:
            yield Combination(scenario, strategy)
    for scenario, strategy in _ORDERED:
        for schedule in SCHEDULES:
            yield Combination(scenario, strategy, ("--schedule", schedule))
    yield Combination("two-regions", "megatron", ("--dynamic",))
    yield Combination("swaying", "pipedream", ("--dynamic", "--schedule", "compact-zb"))
    yield Combination("unlike", "zb-h1-equal", ("--dynamic",))
    yield Combination("faults", "megatron", ("--dynamic",))
    for policy, pairs in _ADAPTED.items():
        for scenario, strategy in pairs:
            yield Combination(scenario, strategy, policy=policy, steps=_MANY_STEPS)
    averaged = {"method": "ma", "staleness_bound": 1}
    yield Combination("swaying", "cloudless", steps=_MANY_STEPS, changes={"synchronisation": averaged})
    yield Combination("lossy", "cloudless", steps=_MANY_STEPS, changes={"synchronisation": {"method": "asgd"}})
    yield Combination("lossy", "hetpipe", changes={"compression": "int8", "connections": 4})
    yield Combination("shared-tcp", "asteroid", changes={"synchronisation": {"algorithm": "tree"}})
    overlapped = {"algorithm": "hierarchical", "bucket_bytes": 4_000_000}
    yield Combination("unlike", "ddp", changes={"synchronisation": overlapped})


def drive(scenarios: Path, output: Path) -> None:
    """Carry out all combinations with the code of the checkout in which this process works.

    Args:
        scenarios: Folder of those that are written here.
        output: Folder that gets one for each combination, by number.
    """
    import_module("planner")
    _check_places()
    for number, each in enumerate(combinations(), start=1):
        folder = output / str(number)
        # Named so that what differs is found in plans first, then in runs, then in what is shown of them.
        shown = folder / "shown"
        shown.mkdir(parents=True)
        scenario = str(scenarios / f"{each.scenario}.yaml") if each.scenario in SCENARIOS else each.scenario
        plan, run, orders = folder / "plan.json", folder / "run", shown / "orders.csv"
        making = ["plan", scenario, "--strategy", each.strategy, *each.options, "-o", str(plan)]
        running = ["simulate", scenario, "--plan", str(plan), "--policy", each.policy, "--steps", str(each.steps)]
        reporting = ["report", str(run), "-o", str(shown / "trace.json")]
        # Pages take half a second each: those of the longer runs are enough.
        reporting += ["-o", str(shown / "page.html")] if each.steps == _MANY_STEPS else []
        try:
            _command([*making, "--torch-csv", str(orders)])
            if each.changes:
                plan.write_text(json.dumps(json.loads(plan.read_text()) | dict(each.changes)))
            # What these print is left out: figures for people, which are in the summary too, and where files are.
            _command([*running, "-o", str(run)])
            _command(reporting)
        except Exception:
            (folder / "failure.txt").write_text(traceback.format_exc())
    _check_places()


def _check_places() -> None:
    """Only the checkout's own code may have been loaded, whatever is installed."""
    for name, module in sys.modules.items():
        if name.partition(".")[0] in _PACKAGES and module.__file__ is not None:
            assert Path(module.__file__).is_relative_to(Path.cwd()), f"{name} was loaded from {module.__file__}"


def _command(words: Sequence[str]) -> str:
    """Run ``python -m experiments`` in this process; return what it prints as its result."""
    sys.argv = ["ropebridge", *words]
    # Not StringIO: the command sets how its standard output treats errors.
    result, messages = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = None
    with contextlib.redirect_stdout(result), contextlib.redirect_stderr(messages):
        try:
            runpy.run_module("experiments", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    printed, told = (stream.buffer.getvalue().decode() for stream in (result, messages))
    if code == _INTERRUPTED:
        # Not a result of this combination: the driver ends, and the comparison with it.
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"'{' '.join(words)}' ends with {code}: {told.strip()}")
    return printed


def compare(folders: Sequence[Path], checkouts: Sequence[Path]) -> str:
    """Return the first thing that differs in what the checkouts left of a combination; empty if nothing does."""
    for folder, checkout in zip(folders, checkouts, strict=True):
        if (failure := folder / "failure.txt").exists():
            return f"fails in {checkout}: {failure.read_text().splitlines()[-1]}"
    files = [sorted(str(each.relative_to(folder)) for each in folder.rglob("*.*")) for folder in folders]
    if files[0] != files[1]:
        return _difference(files[0], files[1], "files")
    for name in files[0]:
        paths = [folder / name for folder in folders]
        # Equal bytes are equal values.
        if paths[0].read_bytes() != paths[1].read_bytes():
            old, new = map(_content, paths, checkouts)
            found = _difference(old, new, name)
            if found:
                return found
    return ""


def _content(path: Path, checkout: Path) -> object:
    """What is in a file of a checkout, in the words of the new version."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        types = {name: str(kind) for name, kind in zip(table.schema.names, table.schema.types, strict=True)}
        return _renamed({"types": types, "rows": table.to_pydict()})
    # Left out: where the checkout lies, which a resolved scenario says with the place of its model's code.
    text = path.read_text().replace(f"{checkout}/", "")
    if path.suffix == ".json":
        return _renamed(json.loads(text))
    if path.suffix == ".jsonl":
        return [_renamed(json.loads(line)) for line in text.splitlines()]
    for before, after in RENAMED.items():
        text = text.replace(f'"{before}"', f'"{after}"')
    seen: dict[str, str] = {}
    return _NUMBERED.sub(lambda found: seen.setdefault(found[0], f"#{len(seen)}"), text).splitlines()


def _renamed(value: Any) -> Any:
    """The value in the new version's words, without what is ignored."""
    if isinstance(value, dict):
        return {RENAMED.get(key, key): _renamed(each) for key, each in value.items() if key not in IGNORED}
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    return RENAMED.get(value, value) if isinstance(value, str) else value


def _difference(old: object, new: object, place: str) -> str:
    """The first place at which two values differ, in type, order, digits or sign; empty if there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        inside = (_difference(old[key], new[key], f"{place}: {key}") for key in old if key in new)
        return next(filter(None, inside), "") or _difference(list(old), list(new), f"{place}: keys")
    if isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(zip_longest(old, new, fillvalue="(nothing)"))
        return next(filter(None, (_difference(*pair, f"{place}[{index}]") for index, pair in pairs)), "")
    texts = repr(old), repr(new)
    if texts[0] == texts[1]:
        return ""
    # Lines of pages are long.
    alike = next(index for index, (one, other) in enumerate(zip_longest(*texts)) if one != other)
    start = max(0, alike - _SHOWN // 2)
    return f"{place}: {texts[0][start : start + _SHOWN]} in OLD, {texts[1][start : start + _SHOWN]} in NEW"


def main(*checkouts: Path) -> bool:
    """Compare two checkouts, the old one first, and print what was found; return whether all combinations are equal."""
    places = [checkout.resolve(strict=True) for checkout in checkouts]
    with tempfile.TemporaryDirectory(prefix="equality-") as folder:
        scenarios = Path(folder, "scenarios")
        scenarios.mkdir()
        for name, text in SCENARIOS.items():
            (scenarios / f"{name}.yaml").write_text(f"name: {name}{_HEAD}{text}")
        outputs = [Path(folder, "old"), Path(folder, "new")]
        for place, output in zip(places, outputs, strict=True):
            # Nothing from beside this file (-P), and the checkout before what is installed. What numba has compiled
            # before is not used: it may hold functions of other files as they were then.
            driver = [sys.executable, "-P", __file__, "--drive", str(scenarios), str(output)]
            environment = {**os.environ, "PYTHONPATH": str(place), "NUMBA_CACHE_DIR": f"{output}-compiled"}
            subprocess.run(driver, cwd=place, env=environment, check=True)
        count = equal = 0
        for count, each in enumerate(combinations(), start=1):
            found = compare([output / str(count) for output in outputs], places)
            equal += not found
            print(f"{each}: {found or 'same'}")
    print(f"{equal} of {count} combinations are equal")
    return equal == count


if __name__ == "__main__":
    if sys.argv[1] == "--drive":
        drive(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(not main(Path(sys.argv[1]), Path(sys.argv[2])))

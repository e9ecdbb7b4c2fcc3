"""Valid files of every kind, and the commands that read them, which the generated attacks spoil."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.files.training import CONVERGENCE_VERSION
from planner.runs.published_laws import published_law
from tests.helpers.processes.command import ropebridge

READY = Path(__file__).parents[2] / "experiments" / "scenarios"

# Two regions with everything that a scenario can describe, each part small.
SCENARIO = """\
name: small
cluster:
  devices:
    - {name: left, kind: t4, region: west, price_usd_per_hour: 0.5, interface: 10 Gbit/s}
    - {name: right, kind: v100-16, region: east, memory: 12 GiB, host: box}
    - {name: other, kind: made-up, region: east}
  kinds:
    made-up: {peak: {fp32: 5 TFLOP/s, bf16: 20 TFLOP/s}, memory: 8 GiB, memory_bandwidth: 200 GB/s}
  links:
    - {inside: east, bandwidth: 10 Gbit/s, latency: 1 ms}
    - {from: west, to: east, latency: 10 ms, jitter: 1 ms, loss: 0.001, trace: {file: link.csv, after: hold},
       price_usd_per_gb: 0.1}
    - {from: east, to: west, bandwidth: 100 Mbit/s, latency: 10 ms,
       size_curve: {quadratic: 0, linear: 0.1, constant: 0.01, ceiling: 90 Mbit/s}}
model: model.yaml
training:
  global_batch: 8
  microbatch: 2
  precision: fp32
  clip_norm: 1.0
  optimizer: {name: adamw, learning_rate: 0.001, weight_decay: 0.1,
              schedule: {shape: cosine, warmup_steps: 2, decay_steps: 10, final_share: 0.1}}
  batch: {from: 8, to: 32, learning_rate: adascale,
          noise_scale: [{samples: 0, noise_scale: 10}, {samples: 100, noise_scale: 50}]}
effects:
  network: {base: tcp, share: 0.9, payload_efficiency: 0.95, window: 4 MB, idle: 200 ms, initial_window: 14 kB,
            handover: 1 ms}
  compute:
    launch_overhead: 10 us
    jitter: 0.05
    seed: 3
    stragglers: [{device: left, factor: 1.2}]
    slowdowns:
      - {device: right, pieces: [{from: 0 s, speed: 1}, {from: 2 s, speed: 0.5}]}
      - {device: left, file: speed.csv}
  memory: {framework: 500 MB, workspace_share: 0.1}
faults:
  - {device: right, hangs: 1 s, goes_on: 2 s}
  - {device: left, leaves: 3 s, returns: 4 s}
  - {link: west->east, out: 5 s, back: 6 s}
  - {preemption: spot.csv, devices: [other], from: 1 s}
"""

MODEL = """\
name: tiny
precision: fp32
layers:
  - {name: first, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP, fixed: 1 kB}
  - {name: layer, repeat: 4, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP, shard: column}
  - name: last
    parameters: 4 MB
    output: 1 kB
    activation: 2 MB
    memory:
      output: 1 MB
      fixed: 1 kB
      sample: 2 MB
      split: {deferred: 1 MB, forward: {fixed: 1 kB, sample: 1 kB}, input: {sample: 1 kB}, weight: {sample: 1 kB}}
    times:
      t4: &times
        {samples: [1, 2], forward: [1 ms, 2 ms], backward_input: [1 ms, 2 ms], backward_weight: [1 ms, 2 ms]}
      v100-16: *times
      made-up: {samples: [2], forward: [1 ms], backward_input: [1 ms], backward_weight: [1 ms], update: 1 ms}
"""

# The same without most of it, so that changes are not hidden behind the first mistake.
PLAIN = """\
name: plain
cluster:
  devices:
    - {name: left, kind: t4, region: west}
    - {name: right, kind: v100-16, region: east}
  links:
    - {between: [west, east], bandwidth: 100 Mbit/s, latency: 10 ms}
model:
  name: tiny
  layers:
    - {name: layer, repeat: 4, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP}
training: {global_batch: 8, microbatch: 2}
"""

IMPORTED = """\
name: imported
cluster:
  kinds:
    box: {peak: 1 TFLOP/s, memory: 4 GiB, memory_bandwidth: 20 GB/s}
  hosts:
    - {name: host-east, kind: box, region: east, devices: 2, interconnect: 8 GB/s, interface: 1 Gbit/s}
    - {name: host-west, kind: box, region: west, devices: 2, interconnect: 8 GB/s}
  links:
    - {between: [east, west], latency: 1 ms, trace: {preset: lte, mean: 100 Mbit/s, duration: 60 s, seed: 1}}
model: {name: small, huggingface: config.json, tokens: 64, roofline: [box.yaml]}
training: {global_batch: 8, microbatch: 2, framework: megatron-lm, optimizer: {name: adamw}}
"""

KIND_TABLE = """\
kind: box
device: CPU
precision: fp32
source: made up
launch: 10 us
memory_bandwidth: 20 GB/s
rows: [1, 256]
inner: [64]
outer: [64, 1024]
rates: [[[1 GFLOP/s, 2 GFLOP/s]], [[10 GFLOP/s, 50 GFLOP/s]]]
"""

SWEEP = """\
scenario: plain.yaml
steps: 2
parameters:
  training.global_batch: {grid: [8, 16]}
  strategy: {list: [megatron, gpipe]}
  plan.connections: {list: [1, 2]}
  cluster.links[west-east].latency: {uniform: [5 ms, 50 ms]}
  cluster.links[west-east].bandwidth: {loguniform: [10 Mbit/s, 100 Mbit/s]}
draws: 1
seed: 4
"""

HOSTS = """\
hosts:
  left:
    address: 10.7.0.1
    interface: wg0
    ssh: me@north
    slurm: [--partition=a, --gres=gpu:1]
    kubernetes: {image: 'registry.example/ropebridge:1', resourcesPerNode: {limits: {cpu: '4'}}}
    skypilot: {infra: gcp/us-central1, accelerators: 'A100:1'}
  right:
    interface: wg0
    folder: /data/jobs
    command: venv/bin/ropebridge
    kubernetes: {image: 'registry.example/ropebridge:1', claim: runs, pod: {nodeSelector: {disk: fast}}}
    skypilot: {infra: aws/us-east-1, cpus: 8+}
environment: {GREETING: "it's $HOME"}
secrets: [MY_TOKEN]
"""

POLICY = """\
from dataclasses import replace


class Policy:
    name = "mine"

    def __init__(self, scenario):
        self.seen = 0

    def decide(self, observation, plan):
        self.seen += 1
        if self.seen == 1:
            return replace(plan, connections=2)
        return None


def policy(scenario):
    return Policy(scenario)
"""

STRATEGY = """\
from planner.plan.plan import Pipeline, Plan, Replica, Stage


def plan(scenario):
    layers = len(scenario.model.layers)
    stage = Stage(0, layers, (Replica("left"),), 1)
    return Plan(scenario.name, scenario.model.name, "mine", "1f1b", (Pipeline((stage,), (2,) * 4),))
"""

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
METIS_FILE = "DeviceType.V100_tp1_bs1.json"
METIS = {
    "model": {"model_name": "toy", "parameters": {"parameters_per_layer_bytes": [4, 8]}},
    "execution_time": {"layer_compute_total_ms": [3.0, 6.0]},
    "execution_memory": {"layer_memory_total_mb": [1, 1]},
}
GRAPH = """\
node1 -- Linear(2, 2) -- forward_compute_time=3.0, backward_compute_time=6.0, activation_size=64.0, parameter_size=4
node2 -- Linear(2, 2) -- forward_compute_time=3.0, backward_compute_time=6.0, activation_size=64.0, parameter_size=4
\tnode1 -- node2
"""
TIMES = {"toy": {"V100-16": {"1": {"1": {"0": [0.1, 0.2, 0.1], "1": [0.1, 0.2, 0.1]}}}}}
SIZE = {"params_bytes": 4, "act_output_bytes": 8, "act_mem_bytes": 8}
SIZES = {"toy": {"1": {"0": SIZE, "1": SIZE}}}
IPERF = {
    "start": {"test_start": {"protocol": "TCP"}},
    "intervals": [
        {"sum": {"start": float(second), "end": second + 1.0, "seconds": 1.0, "bits_per_second": 1e7 * (second + 1)}}
        for second in range(3)
    ],
    "end": {},
}

LAW = asdict(published_law(10**8, 64))
CONVERGENCE = {
    "version": CONVERGENCE_VERSION,
    "model": "tiny",
    "task": "made up",
    "global_batch": 8,
    "runs": [],
    "law": {**LAW, "draws": LAW["draws"][:10]},
}
TO_LOSS = PLAIN.replace("microbatch: 2}", "microbatch: 2, convergence: loss.json}")

FILES = {
    "small.yaml": SCENARIO,
    "to-loss.yaml": TO_LOSS,
    "loss.json": json.dumps(CONVERGENCE),
    **{each.name: each.read_text().replace("../models", "models") for each in sorted(READY.glob("*.yaml"))},
    "model.yaml": MODEL,
    "plain.yaml": PLAIN,
    "imported.yaml": IMPORTED,
    "box.yaml": KIND_TABLE,
    "sweep.yaml": SWEEP,
    "hosts.yaml": HOSTS,
    "policy.py": POLICY,
    "strategy.py": STRATEGY,
    "config.json": json.dumps(CONFIG),
    METIS_FILE: json.dumps(METIS),
    "graph.txt": GRAPH,
    "times.json": json.dumps(TIMES),
    "sizes.json": json.dumps(SIZES),
    "link.csv": "time_s,bandwidth_mbps,latency_ms\n0,100,10\n5,50,20\n10,120,10\n60,,\n",
    "cooked.txt": "0.0 1.5\n0.5 2.5\n1.0 0.5\n",
    "mahimahi.trace": "1\n2\n2\n5\n9\n",
    "iperf3.json": json.dumps(IPERF),
    "spot.csv": "0,add,a\n5000,remove,a\n9000,add,a\n",
    "counts.json": json.dumps({"metadata": {"gap_seconds": 60}, "data": [1, 0, 1]}),
    "speed.csv": "time_s,speed\n0,1\n2,0.5\n8,1\n",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command that is carried out if the files are valid.

    Attributes:
        arguments: Words after ``ropebridge``.
        spoiled: The files that an attack may spoil, relative to the folder.
    """

    arguments: tuple[str, ...]
    spoiled: tuple[str, ...]


def _command(line: str, *spoiled: str) -> Command:
    return Command(tuple(line.split()), spoiled)


SMALL = ("small.yaml", "small.yaml", "model.yaml", "link.csv", "speed.csv", "spot.csv")
RUN_FILES = ("scenario.json", "plan.json", "events.parquet", "decisions.jsonl", "summary.json")
JOB_FILES = ("scenario.json", "plan.json", "run.json", "hosts.json", "key", "environment.sh")

DEPLOY = "deploy plain.yaml --plan plan.json --hosts hosts.yaml -o job-1 --compute paced --target"

TO_LOSS_PLAN = "plan to-loss.yaml --strategy auto --objective"

COMMANDS = (
    _command("simulate small.yaml --strategy megatron --steps 2 -o out", *SMALL),
    _command("simulate small.yaml --strategy ddp --steps 3 --policy cannikin --backup-every 1", *SMALL),
    _command("plan small.yaml --strategy asteroid --explain -o plan-2.json --torch-csv orders.csv", *SMALL),
    _command("simulate plain.yaml --strategy megatron --steps 2 --policy depth -o out", "plain.yaml"),
    _command("simulate plain.yaml --strategy megatron --duration 2s", "plain.yaml"),
    _command("plan plain.yaml --strategy cloudless --json", "plain.yaml"),
    _command("plan plain.yaml -o out.json", "plain.yaml"),
    _command("plan cloud-edge-end.yaml", "cloud-edge-end.yaml", "gpt-768.yaml"),
    _command("plan four-sites.yaml --strategy auto --explain", "four-sites.yaml", "gpt-small.yaml"),
    _command("simulate digits.yaml --strategy ddp --steps 2", "digits.yaml", "digits-mlp.yaml"),
    _command(f"{TO_LOSS_PLAN} time-to-loss --loss 3.5", "to-loss.yaml", "loss.json", "loss.json"),
    _command("simulate run/scenario.json --strategy megatron --steps 1 -o out", "run/scenario.json"),
    _command("plan imported.yaml --strategy megatron", "imported.yaml", "box.yaml", "config.json"),
    _command("simulate imported.yaml --strategy dapple --steps 1", "imported.yaml", "box.yaml", "config.json"),
    _command("simulate plain.yaml --plan plan.json --steps 2 -o out", "plan.json"),
    _command("simulate plain.yaml --plan plan.json --orders orders.csv --steps 1", "orders.csv", "plan.json"),
    _command("simulate plain.yaml --strategy megatron --policy policy.py --steps 4 -o out", "policy.py"),
    _command("simulate plain.yaml --strategy strategy.py --steps 1 -o out", "strategy.py"),
    _command("traces show link.csv", "link.csv"),
    _command("traces show link.csv --plot plot.png", "link.csv"),
    _command("traces convert link.csv out.trace --to mahimahi", "link.csv"),
    _command("traces convert link.csv out.csv --step 2s", "link.csv"),
    _command("traces show cooked.txt", "cooked.txt"),
    _command("traces convert mahimahi.trace out.csv", "mahimahi.trace"),
    _command("traces show iperf3.json", "iperf3.json"),
    _command("traces show spot.csv", "spot.csv"),
    _command("traces show counts.json", "counts.json"),
    _command("sweep sweep.yaml -o out -j 1", "sweep.yaml", "sweep.yaml", "plain.yaml"),
    _command(
        "backtest plain.yaml --traces traces --policies depth --window 2s --rivals ddp -o out -j 1",
        "traces/link.csv",
        "plain.yaml",
    ),
    _command(
        "deploy plain.yaml --plan plan.json --target ssh --hosts hosts.yaml -o job-1 --compute paced",
        "hosts.yaml",
        "plan.json",
    ),
    _command(f"{DEPLOY} slurm", "hosts.yaml"),
    _command(
        "deploy plain.yaml --plan plan.json --target kubernetes --hosts hosts.yaml -o job-1 --compute paced",
        "hosts.yaml",
    ),
    _command(f"{DEPLOY} skypilot", "hosts.yaml"),
    _command("profile import huggingface config.json --tokens 64 --name llama -o out.yaml", "config.json"),
    _command(
        f"profile import metis {METIS_FILE} --layer-output 8B --kind V100=v100-16 -o out.yaml",
        METIS_FILE,
    ),
    _command("profile import pipedream graph.txt --samples 8 --kind v100-16 --name toy -o out.yaml", "graph.txt"),
    _command("profile import sailor times.json sizes.json -o out.yaml", "times.json", "sizes.json"),
    _command("profile import huggingface config.json --tokens 64 --name tiny -o model.yaml", "model.yaml"),
    _command("report run -o report.html", *(f"run/{name}" for name in RUN_FILES)),
    _command("compare run run --json", *(f"run/{name}" for name in RUN_FILES)),
    _command("report run -o out.json", *(f"run/{name}" for name in RUN_FILES)),
    _command("status deployed", "deployed/deployment.json", "deployed/job/hosts.json"),
    _command("logs deployed", "deployed/deployment.json", "deployed/job/hosts.json"),
    _command("host deployed/job nobody", *(f"deployed/job/{name}" for name in JOB_FILES)),
    _command("report swept -o report.html", "swept/sweep.json", "swept/points.parquet"),
    _command("jobs status --server http://127.0.0.1:1 --token-file token", "token"),
    _command("run plain.yaml --strategy megatron --steps 1", "plain.yaml"),
    _command("export run -o exported", *(f"run/{name}" for name in RUN_FILES)),
)


def write_seeds(folder: Path) -> None:
    """Write all files into a folder, and those that commands make of them."""
    shutil.copytree(READY.parent / "models", folder / "models", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(READY / "llama-7b-config.json", folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "traces").mkdir()
    shutil.copy(folder / "link.csv", folder / "traces")
    (folder / "token").write_text("secret-" * 5)
    (folder / "token").chmod(0o600)
    for line in (
        "plan plain.yaml --strategy megatron -o plan.json --torch-csv orders.csv",
        "simulate plain.yaml --strategy megatron --policy depth --steps 3 -o run",
        "deploy plain.yaml --plan plan.json --target torchrun --hosts hosts.yaml -o deployed --compute paced",
        "sweep sweep.yaml -o swept -j 1",
    ):
        done = ropebridge(*line.split(), cwd=folder)
        assert done.returncode == 0, done.stderr


def seeds_are_valid(commands: Sequence[Command]) -> Sequence[Command]:
    """Return the commands that succeed with files that nothing has spoiled."""
    verbs = ("run", "host", "jobs", "export", "status", "logs")
    # A model that a person wrote is not replaced by an imported one.
    return [each for each in commands if each.arguments[0] not in verbs and each.arguments[-1] != "model.yaml"]

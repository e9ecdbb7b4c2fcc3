"""Folders of tokens, and scenarios that train on data which they name."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

LAYERS = """
    - {name: embedding, parameters: 2048 B, output: 1024 B, activation: 2 kB, forward: 1 MFLOP}
    - {name: middle, parameters: 1088 B, output: 1024 B, activation: 2 kB, forward: 1 MFLOP}
    - {name: head, parameters: 2176 B, output: 2048 B, activation: 4 kB, forward: 1 MFLOP}
"""

MODEL = """
from torch import nn
from torch.nn import functional


class Model:
    def __init__(self):
        self.layers = [nn.Embedding(32, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 32)]

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build():
    return Model()
"""

SCENARIO = """
name: tokens
cluster:
  devices:
    - {name: a, kind: raspberry-pi-4, region: here, memory: 1 GB}
    - {name: b, kind: raspberry-pi-4, region: here, memory: 1 GB}
  links: [{inside: here, bandwidth: 1 Gbit/s, latency: 1 ms}]
model:
  name: small
  code: model.py
  layers: LAYERS
training:
  global_batch: 8
  microbatch: 2
  seed: 3
  data: DATA
"""


def write_tokens(folder: Path, files: Sequence[Sequence[int]], dtype: str = "uint16") -> Path:
    """Write a file of each of the lists of tokens, in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, tokens in enumerate(files):
        np.array(tokens, dtype).tofile(folder / f"part-{number:02}.bin")
    return folder


def write_scenario(folder: Path, data: str, model: str = MODEL) -> Path:
    """Write a scenario with a small language model of samples of 16 tokens, and its ``data`` as YAML."""
    (folder / "model.py").write_text(model)
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO.replace("LAYERS", LAYERS).replace("DATA", data))
    return path


def tokens_of(seed: int, count: int) -> list[int]:
    """Return tokens below 32 of which each mostly follows the one before it, so that a model can learn them."""
    noise = np.random.default_rng(seed).integers(0, 3, count)
    return ((5 * np.arange(count) + noise) % 32).tolist()

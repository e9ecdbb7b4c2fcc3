"""The scenarios of Asteroid's reproduction: Jetson boards on a LAN, and four models to train there.

From the paper: the kinds of boards, 100 Mbit/s, the four models. Assumption: the number of boards of each kind; a
latency of 0.5 ms one way; a switch that never limits; 1 GiB of each board's memory for system and framework; times from
datasheets (`planner.scenario.roofline`); images of 32 x 32 pixels and 10 classes (CIFAR-10) for EfficientNet-B1 and
MobileNetV2, of 224 x 224 and 100 classes (Mini-ImageNet) for ResNet-50, 128 tokens for BERT-small; SGD with momentum,
AdamW for BERT-small; global batches of 32 and of 256.
"""

from collections.abc import Sequence
from functools import cache

from experiments.reproductions.architectures import bert_small, efficientnet_b1, mobilenet_v2, resnet_50
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import find_kind
from planner.scenario.effects import TCP_PAYLOAD_EFFICIENCY, Effects, MemoryEffects, NetworkEffects
from planner.scenario.profile import ModelProfile
from planner.scenario.roofline import LayerWork, roofline_layer
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training

LAN_BPS = 100e6
LATENCY_S = 0.5e-3
SWITCH_BPS = 1e12
FRAMEWORK_BYTES = 2**30

NANO, TX2, NX = "jetson-nano", "jetson-tx2", "jetson-xavier-nx"

# Boards of each cluster, in the order in which strategies that ignore their speeds use them.
CLUSTERS = {
    "4 boards": (NX, TX2, NANO, NANO),
    "5 boards": (NX, TX2, TX2, NANO, NANO),
    "6 boards": (NX, TX2, TX2, NANO, NANO, NANO),
}

BATCHES = (32, 256)

# Number formats in which every setting is measured. Boards of these kinds have no bfloat16.
PRECISIONS = ("fp32", "fp16")


@cache
def edge_models() -> dict[str, tuple[tuple[LayerWork, ...], str]]:
    """Return the layers and the name of the optimizer of each of the four models, by the model's name."""
    return {
        "EfficientNet-B1": (efficientnet_b1(32, 10), "momentum"),
        "MobileNetV2": (mobilenet_v2(32, 10), "momentum"),
        "ResNet-50": (resnet_50(224, 100), "momentum"),
        "BERT-small": (bert_small(128, 2), "adamw"),
    }


def edge_scenario(model: str, boards: Sequence[str], batch: int, precision: str = PRECISIONS[0]) -> Scenario:
    """Return one of `edge_models` on boards of these kinds on one LAN, with a global batch of ``batch`` samples."""
    layers, optimizer = edge_models()[model]
    kinds = [find_kind(kind) for kind in dict.fromkeys(boards)]
    memory_bytes = {kind.name: kind.memory_bytes for kind in kinds}
    devices = tuple(
        Device(f"{kind.removeprefix('jetson-')}-{index}", kind, "lan", memory_bytes[kind], interface_bps=LAN_BPS)
        for index, kind in enumerate(boards)
    )
    profile = ModelProfile(model, tuple(roofline_layer(layer, kinds, precision) for layer in layers))
    training = Training(batch, optimizer=Optimizer(optimizer), precision=precision)
    effects = Effects(
        network=NetworkEffects(payload_efficiency=TCP_PAYLOAD_EFFICIENCY),
        memory=MemoryEffects(framework_bytes=FRAMEWORK_BYTES),
    )
    cluster = Cluster(devices, (Link("lan", "lan", SWITCH_BPS, LATENCY_S),))
    return Scenario(f"{model} on {len(boards)} boards", cluster, profile, training, effects=effects)

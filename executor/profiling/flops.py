"""What a model's layers compute, counted without memory: torch's FLOP counter over tensors that have shapes alone."""

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from executor.profiling.layer_memory import activations_bytes
from executor.training.models.data_order import DataOrder
from executor.training.models.loading import LoadedModel, load_model, user_code
from planner.scenario.roofline import LayerWork
from planner.scenario.scenario import ModelCode, Training


def count_work(loaded: LoadedModel, code: ModelCode, training: Training) -> Sequence[LayerWork]:
    """Return each layer's work and bytes for one sample.

    Args:
        loaded: The model, which gives the data.
        code: It is built again from this, without memory.
        training: The seed.

    Raises:
        InputError: A layer cannot do without values.
    """
    samples, _ = DataOrder(loaded.model, 1, training.seed).samples(0, 0, 1)
    passed = samples.to("meta")
    with torch.device("meta"):
        model = load_model(code, training.seed)
    flop = []
    for index, layer in enumerate(model.layers):
        counter = FlopCounterMode(display=False)
        with user_code(code.path, f"layer {index} cannot be counted"), torch.no_grad(), counter:
            passed = layer(passed)
        flop.append(float(counter.get_total_flops()))
    activations = activations_bytes(loaded, training)
    return [
        LayerWork(
            f"{index}-{type(layer).__name__.lower()}",
            flop[index],
            loaded.sizes[index].parameter_bytes,
            loaded.sizes[index].output.size_bytes,
            activations[index],
        )
        for index, layer in enumerate(loaded.model.layers)
    ]

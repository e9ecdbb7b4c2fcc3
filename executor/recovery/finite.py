"""Stops a run whose loss or parameters are not finite: such training is lost, and so would be its later checkpoints."""

import math
from collections.abc import Collection, Mapping

import torch

from executor.recovery.checkpoint_file import LayerTensors
from planner.plan.plan import Plan
from traces.common.errors import RunError

_ADVICE = "lower the learning rate or clip gradients ('clip_norm'), look for a defect of the model or its data, or "
_ADVICE += "train on all the same with '--allow-nan'"


def check_loss(loss: float, step: int, steps: int, plan: Plan, device: str) -> None:
    """Raise `RunError` if a device's part of the loss of a step is not finite.

    Args:
        loss: This device's part of the loss.
        step: Index of the step.
        steps: Number of steps of the run.
        plan: The plan of the step, which tells the stage of the device.
        device: The device, which has the last stage of a pipeline.
    """
    if math.isfinite(loss):
        return
    pipeline = next(
        index
        for index, pipeline in enumerate(plan.pipelines)
        if any(device in replica.devices for replica in pipeline.stages[-1].replicas)
    )
    stage = len(plan.pipelines[pipeline].stages) - 1
    raise RunError(
        f"the loss of step {step + 1} of {steps} is {loss}, in stage {stage} of pipeline {pipeline}; {_ADVICE}"
    )


def check_state(layers: Mapping[int, LayerTensors], buffers: Mapping[int, Collection[str]], step: int) -> None:
    """Raise `RunError` if a parameter, or what the optimizer keeps for one, is not finite.

    Args:
        layers: The state of layers, by their index.
        buffers: Names of the layers' buffers, which may be infinite: masks of attention are.
        step: Number of steps after which the layers have this state.
    """
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            if name not in buffers[layer] and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RunError(f"'{name}' of layer {layer} is not finite after step {step}; {_ADVICE}")

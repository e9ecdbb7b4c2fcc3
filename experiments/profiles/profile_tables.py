"""Layers of a model file as a table for people, where nothing was measured here."""

from collections.abc import Sequence
from itertools import groupby

from planner.scenario.profile import LayerProfile
from planner.scenario.roofline import LayerWork
from traces.common.sizes import size_text


def work_table(layers: Sequence[LayerProfile | LayerWork]) -> list[str]:
    """Return a line for each layer, one for equal ones that follow each other: bytes, and work or times."""
    width = max(len(layer.name) for layer in layers) + 6
    lines = [f"{'layer':{width}} {'parameters':>12} {'output':>12} {'kept a sample':>14}  forward"]
    for _, group in groupby(layers, key=_content):
        alike = list(group)
        name = alike[0].name if len(alike) == 1 else f"{alike[0].name} x {len(alike)}"
        sizes = (alike[0].parameter_bytes, alike[0].output_bytes, alike[0].activation_bytes)
        one, two, three = map(size_text, sizes)
        lines.append(f"{name:{width}} {one:>12} {two:>12} {three:>14}  {_forward(alike[0])}")
    return lines


def _content(layer: LayerProfile | LayerWork) -> tuple[object, ...]:
    work = layer.forward_flop if isinstance(layer, LayerWork) else None
    return (layer.name, layer.parameter_bytes, layer.output_bytes, work)


def _forward(layer: LayerProfile | LayerWork) -> str:
    if isinstance(layer, LayerWork):
        return f"{layer.forward_flop / 1e9:.4g} GFLOP a sample"
    rows = [
        f"{1000 * table.forward_s[-1]:.3f} ms of {table.samples[-1]} on {kind}" for kind, table in layer.times.items()
    ]
    return ", ".join(rows)

"""The first weights of some layers of a model of transformers: random ones, or those of safetensors files.

A model is built without memory for its matrices, so that a rank needs memory for its own layers only, however large the
others are.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping

from planner.scenario.scenario import weight_files
from traces.common.errors import InputError

# Functions that fill a tensor, by name: torch has each of the first ones as a method, in `torch.nn.init`, or as both,
# and transformers wraps them. All overwrite every element.
_RANDOM = ("normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_")
_CONSTANT = ("constant_", "fill_", "zero_")

# Buffers that older versions of transformers saved, and which the model computes: masks of attention, and frequencies.
_COMPUTED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


class DeferredWeights(TorchFunctionMode):
    """A context in which a model is built without memory for its matrices; `fill` gives those of some modules values.

    Torch's random numbers go on as if all matrices were filled, so that each has the values of a model that is built
    whole from the same seed. Small tensors that are not made by `torch.empty` get memory at once, such as buffers.
    After the context `named` must be called; copies of the model can then be filled too.

    Args:
        draws: Whether random numbers are drawn; without them `fill` leaves the values open, for weights of files.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self._draws = draws
        self._memory = torch.empty(0)
        # By the identity of a tensor: the tensor, what fills it, and the state of torch's random numbers before that.
        self._fills: dict[int, tuple[torch.Tensor, Callable[[torch.Tensor], object], torch.Tensor]] = {}
        # What fills a parameter, and the state before that, by its name.
        self._named: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, but make empty tensors without memory, and keep what would fill them for later."""
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            return func(*args, **{**given, "device": "meta"})
        name = getattr(func, "__name__", "")
        if name not in _RANDOM and name not in _CONSTANT:
            return func(*args, **given)
        tensor: torch.Tensor = args[0] if args else given.pop("tensor")
        if not tensor.is_meta:
            return func(tensor, *args[1:], **given)
        if self._draws:
            fill = partial(_call, func, args[1:], given)
            self._fills[id(tensor)] = tensor, fill, torch.get_rng_state()
            if name in _RANDOM:
                fill(self._scratch(tensor))
        return tensor

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape in memory that the next call uses again, so that the heap stays small."""
        if len(self._memory) < like.numel():
            self._memory = torch.empty(like.numel(), dtype=like.dtype)
        return self._memory[: like.numel()].view(like.shape)

    def named(self, model: nn.Module) -> None:
        """Keep what fills the parameters of ``model``, which was built in this context, by their names."""
        if self._draws:
            parameters = [(name, id(each)) for name, each in model.named_parameters() if each.is_meta]
            self._named = {name: self._fills[key][1:] for name, key in parameters}
        self._fills.clear()
        self._memory = torch.empty(0)

    def fill(self, model: nn.Module, chosen: Iterable[nn.Module]) -> None:
        """Give the parameters of the chosen modules of ``model`` memory and values, wherever else it uses them too."""
        names = {id(each): name for name, each in model.named_parameters()}
        parameters = [each for module in chosen for each in module.parameters() if each.is_meta]
        filled = {id(each): self._filled(each, names[id(each)]) for each in parameters}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in filled:
                    setattr(module, name, filled[id(parameter)])
            # Transformers fills this row by an index, which is not seen here.
            if self._draws and isinstance(module, nn.Embedding) and module.padding_idx is not None:
                with torch.no_grad():
                    module.weight[module.padding_idx].zero_()

    def _filled(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        values = torch.empty_like(parameter, device="cpu")
        if self._draws:
            fill, state = self._named[name]
            with torch.random.fork_rng(devices=()):
                torch.set_rng_state(state)
                fill(values)
        return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _call(func: Callable[..., object], args: tuple[object, ...], given: Mapping[str, object], to: torch.Tensor) -> None:
    with torch.no_grad():
        func(to, *args, **given)


def load_weights(model: Any, path: Path) -> None:
    """Replace the weights of a model of transformers by those of safetensors files; see `weight_files`.

    Of weights on torch's meta device only names and shapes are compared, so that no others take memory.

    Raises:
        InputError: A file cannot be read, or the weights are not exactly those of the model.
    """
    files = weight_files(path)
    if not files:
        raise InputError("the folder has no weights", where=str(path), valid="a folder with *.safetensors")
    own = model.state_dict(keep_vars=True)
    missing = {id(value): name for name, value in own.items()}
    names = partial(_own_name, own=own, prefix=model.base_model_prefix, renamings=get_model_conversion_mapping(model))
    for file in files:
        for name in _load_file(file, own, names):
            missing.pop(id(own[name]), None)
    if missing:
        raise InputError(
            f"there are no weights for '{next(iter(missing.values()))}'",
            where=str(path),
            valid=f"weights of the model of the config.json; {len(missing)} are missing",
        )


def _own_name(there: str, own: Collection[str], prefix: str, renamings: Iterable[Any]) -> str:
    """Return the name in the model of a tensor of a file, with the changes of names that transformers makes itself.

    Names in files may lack the ``prefix`` of those in the model, as in files of a model without its head.
    """
    renamed = there
    for renaming in renamings:
        renamed, _ = renaming.rename_source_key(renamed)
    return next((name for name in (there, renamed, f"{prefix}.{renamed}") if name in own), there)


def _load_file(file: Path, own: Mapping[str, torch.Tensor], own_name: Callable[[str], str]) -> list[str]:
    """Copy the tensors of a file into those of the model, unless these are on the meta device; return their names."""
    loaded = []
    try:
        with safe_open(file, framework="pt") as opened:
            for there in opened.keys():  # noqa: SIM118 - the file is no mapping
                name = own_name(there)
                target = own.get(name)
                if target is None and _COMPUTED.search(there):
                    continue
                shape = list(opened.get_slice(there).get_shape())
                if target is None or list(target.shape) != shape:
                    found = "is unknown" if target is None else f"has shape {list(target.shape)}"
                    raise InputError(
                        f"'{there}' has shape {shape}, and in the model of the config.json it {found}",
                        where=str(file),
                        valid="give the weights of this model",
                    )
                if not target.is_meta:
                    with torch.no_grad():
                        target.copy_(opened.get_tensor(there))
                loaded.append(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"the file cannot be read: {error}", str(file), "a safetensors file") from None
    return loaded

"""Reads the ``training`` of a scenario: batch, update rule, precision, seed and data."""

from dataclasses import asdict, field
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from planner.cost.parameter_memory import FRAMEWORKS, parameter_memory
from planner.files.parsing import NotNegative, Number, Part, Positive, Seed, file_entry
from planner.scenario.data import TOKEN_TYPES, DatasetCode, DataSource, SavedDataset, TokenFiles, TrainingData
from planner.scenario.training import (
    DEFAULT_PRECISION,
    PRECISIONS,
    RATE_RULES,
    SHAPES,
    BatchLimits,
    LearningRateSchedule,
    Optimizer,
    Training,
)
from traces.common.errors import InputError, find_by_name


@file_entry
class ScheduleEntry:
    """The learning rate over the steps: a linear warm-up, followed by ``constant``, ``linear`` or ``cosine``.

    Attributes:
        shape: Shape of the learning rate after the warm-up.
        warmup_steps: Number of steps with a rising rate.
        decay_steps: Number of steps after the warm-up over which ``linear`` and ``cosine`` fall.
        final_share: Share of the full rate that ``linear`` and ``cosine`` reach and keep.
    """

    shape: Annotated[str, WithJsonSchema({"enum": list(SHAPES)})] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_share: Number = 0.0


@file_entry
class OptimizerEntry:
    """The update rule: name, learning_rate, momentum and weight_decay (without unit), and the rate's schedule."""

    name: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0
    schedule: ScheduleEntry = field(default_factory=ScheduleEntry)


@file_entry
class DataEntry:
    """The training data: a folder of ``tokens``, a ``dataset`` in Python, or a saved ``huggingface`` dataset.

    Attributes:
        tokens: Folder of .bin files of token numbers.
        length: Tokens in a sample; only with ``tokens``.
        dtype: Type of a token number; only with ``tokens``.
        dataset: Python file whose function ``build`` returns a torch Dataset or IterableDataset.
        arguments: Arguments of ``build``; only with ``dataset``.
        huggingface: Folder that ``save_to_disk`` of Hugging Face's datasets has written.
        inputs: Column of the inputs; only with ``huggingface``.
        targets: Column of the targets; only with ``huggingface``.
        workers: Processes of each rank that read ahead; by default 0 with ``tokens``, otherwise 1.
    """

    tokens: str | None = None
    length: Positive | None = None
    dtype: Annotated[str, WithJsonSchema({"enum": list(TOKEN_TYPES)})] | None = None
    dataset: str | None = None
    arguments: dict[str, int | float | str | bool] | None = None
    huggingface: str | None = None
    inputs: str | None = None
    targets: str | None = None
    workers: Annotated[int, Field(ge=0, le=64)] | None = None


# The forms of the data: the keys that each needs, and those that it may have.
_FORMS = {
    "tokens": (("length",), ("dtype",)),
    "dataset": ((), ("arguments",)),
    "huggingface": (("inputs", "targets"), ()),
}


# A gradient noise scale in samples.
NoiseScale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@file_entry
class NoisePoint:
    """The gradient noise scale, in samples, after a number of ``samples`` of training."""

    samples: Annotated[int, Field(ge=0)]
    noise_scale: NoiseScale


@file_entry
class BatchEntry:
    """Limits within which a plan or a policy chooses the global batch.

    Attributes:
        smallest: Least global batch; ``global_batch`` if absent.
        largest: Largest global batch.
        learning_rate: Rule by which the learning rate follows the batch: AdaScale's gain, the square root of the ratio
            to ``global_batch``, or this ratio itself.
        noise_scale: Gradient noise scale, in samples, that is assumed in steps in which none is measured, such as
            simulated ones: a number, or points. If absent, batches are adapted only where the noise is measured.
    """

    smallest: Annotated[Positive | None, Field(alias="from")] = None
    largest: Annotated[Positive, Field(alias="to")]
    learning_rate: Annotated[str, WithJsonSchema({"enum": list(RATE_RULES)})]
    noise_scale: NoiseScale | tuple[NoisePoint, ...] | None = None


@file_entry
class TrainingEntry:
    """Batch, update rule, precision, seed and data.

    Attributes:
        global_batch: Samples per update over the whole cluster.
        microbatch: Samples per microbatch, for strategies that do not choose the size themselves.
        optimizer: Update rule and its parameters.
        precision: Number formats of the layers: fp32, tf32, bf16, fp16 or fp8. Parameters and their gradients are
            float32 in all of them.
        seed: Seed of the initial parameters and of the order of the data.
        clip_norm: Limit on the Euclidean norm of the gradients of all layers together; no limit if absent.
        noise_scale: Whether the gradient noise scale is measured.
        data: The data for runs with real compute, or the path of a file with it; the model's own data if absent.
        batch: Limits within which a policy may change the global batch; it never changes if absent.
        bytes_per_parameter: Bytes that plans count on a device for each parameter with its gradient, the optimizer's
            values and all copies; those of ``framework`` if absent.
        framework: The framework whose rule gives these bytes: torch (that of runs), megatron-lm, deepspeed or sailor.
    """

    global_batch: Positive
    microbatch: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    optimizer: OptimizerEntry = field(default_factory=OptimizerEntry)
    precision: Annotated[str, WithJsonSchema({"enum": list(PRECISIONS)})] = DEFAULT_PRECISION
    seed: Seed = 0
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    noise_scale: bool = False
    data: DataEntry | str | None = None
    batch: BatchEntry | None = None
    bytes_per_parameter: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    framework: Annotated[str, WithJsonSchema({"enum": list(FRAMEWORKS)})] | None = None


# Planning a step of more would take hours.
_MOST_MICROBATCHES = 20_000


def read_training(part: Part) -> Training:
    """Return the training that a part of a scenario describes; raise an InputError for the first mistake."""
    entry = part.parse(TrainingEntry)
    find_by_name(entry.precision, PRECISIONS, "precision", where=part.where("precision"))
    try:
        schedule = LearningRateSchedule(**asdict(entry.optimizer.schedule))
    except InputError as error:
        raise InputError(error.problem, part.where("optimizer", "schedule", error.where), error.valid) from None
    if entry.microbatch and entry.global_batch > _MOST_MICROBATCHES * entry.microbatch:
        problem = f"{entry.global_batch // entry.microbatch:,} microbatches in a step are too many"
        least = -(-entry.global_batch // _MOST_MICROBATCHES)
        raise InputError(problem, part.where("microbatch"), f"give {least} samples or more, or a smaller global batch")
    optimizer = Optimizer(**{**asdict(entry.optimizer), "schedule": schedule})
    data = None if entry.data is None else read_data(part.inner("data"))
    limits = None if entry.batch is None else _batch_limits(entry.batch, entry.global_batch, part)
    if entry.bytes_per_parameter is not None and entry.framework is not None:
        raise InputError(
            "'bytes_per_parameter' and 'framework' are two ways to say one number",
            where=part.where("framework"),
            valid="remove one of them",
        )
    framework = {} if entry.framework is None else {"framework": entry.framework}
    given = {key: each for key, each in asdict(entry).items() if key != "framework"}
    training = Training(**{**given, "optimizer": optimizer, "data": data, "batch": limits, **framework})
    try:
        parameter_memory(training)
    except InputError as error:
        raise InputError(error.problem, part.where("framework"), error.valid) from None
    return training


def _batch_limits(entry: BatchEntry, global_batch: int, part: Part) -> BatchLimits:
    given = entry.noise_scale
    points: tuple[tuple[float, float], ...] = ()
    if isinstance(given, tuple):
        points = tuple((float(each.samples), each.noise_scale) for each in given)
    elif given is not None:
        points = ((0.0, given),)
    try:
        limits = BatchLimits(entry.smallest or global_batch, entry.largest, entry.learning_rate, points)
    except InputError as error:
        raise InputError(error.problem, part.where("batch", error.where), error.valid) from None
    if not limits.smallest <= global_batch <= limits.largest:
        raise InputError(
            f"a run begins with the global batch of {global_batch} samples, which the limits exclude",
            where=part.where("batch"),
            valid=f"let 'from' be at most {global_batch}, and 'to' at least {global_batch}",
        )
    return limits


def read_data(part: Part) -> TrainingData:
    """Return the training data that a part describes; the files themselves are not opened.

    Raises:
        InputError: The part does not describe exactly one form of data.
    """
    entry = part.parse(DataEntry)
    given = {key: value for key, value in vars(entry).items() if value is not None}
    forms = [form for form in _FORMS if form in given]
    if len(forms) != 1:
        raise InputError(
            "the data needs one source", where=part.where(), valid=f"give one of {', '.join(map(repr, _FORMS))}"
        )
    (form,) = forms
    needed, possible = _FORMS[form]
    for key in needed:
        if key not in given:
            raise InputError(f"the key '{key}' is missing", where=part.where(), valid=f"add '{key}:' to '{form}'")
    for key in given:
        if key not in (form, "workers", *needed, *possible):
            owner = next(other for other, keys in _FORMS.items() if key in (*keys[0], *keys[1]))
            raise InputError(
                f"'{key}' belongs to '{owner}'", where=part.where(key), valid=f"leave it out with '{form}'"
            )
    source = _source(entry, part)
    return TrainingData(source, entry.workers if entry.workers is not None else int(form != "tokens"))


def _source(entry: DataEntry, part: Part) -> DataSource:
    if entry.tokens is not None:
        assert entry.length is not None, "it was checked"
        dtype = entry.dtype or TOKEN_TYPES[0]
        find_by_name(dtype, dict.fromkeys(TOKEN_TYPES), "type of token numbers", where=part.where("dtype"))
        return TokenFiles(part.path(entry.tokens).resolve(), entry.length, dtype)
    if entry.dataset is not None:
        return DatasetCode(part.path(entry.dataset).resolve(), entry.arguments or {})
    assert entry.huggingface is not None, "it was checked"
    assert entry.inputs is not None, "it was checked"
    assert entry.targets is not None, "it was checked"
    return SavedDataset(part.path(entry.huggingface).resolve(), entry.inputs, entry.targets)

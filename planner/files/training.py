"""Reads the ``training`` of a scenario: batch, update rule, precision, seed, data, and the file of its convergence."""

from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from planner.cost.parameter_memory import FRAMEWORKS, parameter_memory
from planner.files.documents import Document
from planner.files.parsing import NotNegative, Number, Part, Positive, Seed, file_entry, parse
from planner.plan.outer_step import OUTER_COMPRESSIONS
from planner.plan.plan import METHODS
from planner.scenario.convergence import SHAPE, TERMS, LossLaw
from planner.scenario.training import (
    COMPRESSIONS,
    DEFAULT_PRECISION,
    PRECISIONS,
    RATE_RULES,
    SHAPES,
    TOKEN_TYPES,
    BatchLimits,
    DatasetCode,
    DataSource,
    LearningRateSchedule,
    Optimizer,
    SavedDataset,
    TokenFiles,
    Training,
    TrainingData,
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


Momentum = Annotated[float, Field(ge=0, lt=1)]


@file_entry
class OptimizerEntry:
    """The update rule: name, learning_rate and weight_decay (without unit), and the rate's schedule.

    Attributes:
        momentum: Share of the previous update that is added to the next, only with the name momentum; 0.9 if absent.
    """

    name: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Momentum | None = None
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
    arguments: dict[str, int | Number | str | bool] | None = None
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
        convergence: File that 'ropebridge profile convergence' has written for this task.
        compressions: Formats in which strategy and policy ``auto`` may let outputs of stages and their gradients be
            sent between regions: none, bf16 (2 bytes a number) or int8 (1 byte, and a scale for each sample). Rounding
            changes the training.
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
    convergence: str | None = None
    compressions: tuple[Annotated[str, WithJsonSchema({"enum": list(COMPRESSIONS)})], ...] = ("none",)


CONVERGENCE_VERSION = 3

# Values of `planner.scenario.convergence.SHAPE` and `TERMS`, and one for each of at most so many knots.
_COUNT, _MOST_KNOTS = len(SHAPE + TERMS), 100
LawParameters = Annotated[
    tuple[Annotated[float, Field(gt=-100, lt=100)], ...],
    Field(min_length=_COUNT, max_length=_COUNT + _MOST_KNOTS),
]


@file_entry
class LawEntry:
    """The fitted law of `planner.scenario.convergence`: its parameters, and what it covers.

    Attributes:
        source: What the law is from.
        reference_samples: Samples at which the power law is its scale.
        mean: Parameters of the law.
        draws: Parameters drawn from their distribution, one set a row.
        methods: Methods of synchronisation that were measured.
        compressions: Formats of pseudo-gradients that were measured.
        most_interval: Largest number of steps between two exchanges that was measured.
        most_workers: Largest number of workers that was measured.
        least_loss: Lowest loss that was measured.
        momenta: Momenta of the outer step that were measured.
        knots: Where the power law is corrected, logarithms of the samples by the reference.
    """

    source: str
    reference_samples: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    mean: LawParameters
    draws: Annotated[tuple[LawParameters, ...], Field(min_length=1, max_length=1000)]
    methods: tuple[Annotated[str, WithJsonSchema({"enum": list(METHODS)})], ...]
    compressions: tuple[Annotated[str, WithJsonSchema({"enum": list(OUTER_COMPRESSIONS)})], ...]
    most_interval: Positive
    most_workers: Positive
    least_loss: NotNegative
    momenta: tuple[Momentum, ...]
    knots: Annotated[tuple[Number, ...], Field(max_length=_MOST_KNOTS)]


@file_entry
class LossRunEntry:
    """A finished run: its settings, and its loss after some of its steps.

    Attributes:
        method: Method of synchronisation.
        workers: Number of workers.
        interval_steps: Steps between two exchanges.
        fragments: Number of fragments.
        compression: Format of pseudo-gradients.
        momentum: Momentum of the outer step.
        seed: Seed of parameters and data.
        steps: Numbers of finished steps.
        losses: Loss after each of them.
    """

    method: str
    workers: Positive
    interval_steps: Positive
    fragments: Positive
    compression: str
    momentum: Momentum
    seed: Seed
    steps: tuple[Positive, ...]
    losses: tuple[Number, ...]


@file_entry
class ConvergenceEntry:
    """How the loss of a task falls with methods of synchronisation: finished runs, and the law fitted to them.

    Attributes:
        version: Version of the file format.
        model: Name of the model.
        task: What the losses depend on beside the runs' settings; runs of another task are not continued.
        global_batch: Samples of a step over all workers.
        runs: Runs that have finished, in their order.
        law: The law that was fitted to them; null until all runs that were asked for have finished.
    """

    version: Literal[3]
    model: str
    task: str
    global_batch: Positive
    runs: tuple[LossRunEntry, ...]
    law: LawEntry | None = None


def read_convergence(path: Path) -> ConvergenceEntry:
    """Return the content of a convergence file.

    Raises:
        InputError: The file is no convergence file of this version.
    """
    document = Document(path)
    value = document.value
    if not isinstance(value, dict) or "version" not in value:
        valid = "make one with 'ropebridge profile convergence'"
        raise InputError("this is not a convergence file", where=str(path), valid=valid)
    if value["version"] != CONVERGENCE_VERSION:
        raise InputError(
            f"the file has version {value['version']!r}",
            where=document.where(("version",)),
            valid=f"this ropebridge reads version {CONVERGENCE_VERSION}: measure again into another file",
        )
    return parse(ConvergenceEntry, document, value)


def _read_law(name: str, part: Part) -> LossLaw:
    """Return the law in the convergence file that a training names."""
    where, path = part.where("convergence"), part.path(name)
    if not path.is_file():
        raise InputError(f"there is no such file: '{name}'", where, "make it with 'ropebridge profile convergence'")
    entry = read_convergence(path)
    if entry.law is None:
        valid = "repeat the command that writes it: finished runs are kept"
        raise InputError(f"the runs of '{name}' have not all finished: it has {len(entry.runs)}", where, valid)
    _check_law(entry.law, name, where)
    return LossLaw(**vars(entry.law))


def _check_law(law: LawEntry, name: str, where: str) -> None:
    count = _COUNT + len(law.knots)
    if any(len(each) != count for each in (law.mean, *law.draws)) or list(law.knots) != sorted(set(law.knots)):
        valid = "make the file with 'ropebridge profile convergence'"
        raise InputError(f"in '{name}' the law's parameters do not match its knots, or these do not rise", where, valid)
    for method in law.methods:
        find_by_name(method, dict.fromkeys(METHODS), "method", where=f"{name}: methods")
    for compression in law.compressions:
        find_by_name(compression, dict.fromkeys(OUTER_COMPRESSIONS), "format", where=f"{name}: compressions")


# Planning a step of more would take hours.
_MOST_MICROBATCHES = 20_000


def read_training(part: Part) -> Training:
    """Return the training that a part of a scenario describes; raise an InputError for the first mistake."""
    entry = part.parse(TrainingEntry)
    try:
        schedule = LearningRateSchedule(**asdict(entry.optimizer.schedule))
    except InputError as error:
        raise InputError(error.problem, part.where("optimizer", "schedule", error.where), error.valid) from None
    if entry.microbatch and entry.global_batch > _MOST_MICROBATCHES * entry.microbatch:
        problem = f"{entry.global_batch // entry.microbatch:,} microbatches in a step are too many"
        least = -(-entry.global_batch // _MOST_MICROBATCHES)
        raise InputError(problem, part.where("microbatch"), f"give {least} samples or more, or a smaller global batch")
    if entry.microbatch > entry.global_batch:
        problem = f"a microbatch of {entry.microbatch} samples is larger than the global batch of {entry.global_batch}"
        raise InputError(problem, part.where("microbatch"), f"give {entry.global_batch} samples or fewer")
    rule = {key: each for key, each in asdict(entry.optimizer).items() if each is not None}
    if "momentum" in rule and entry.optimizer.name != "momentum":
        problem = f"update rule '{entry.optimizer.name}' takes no momentum"
        raise InputError(problem, part.where("optimizer", "momentum"), "give 'name: momentum', or leave it out")
    optimizer = Optimizer(**{**rule, "schedule": schedule})
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
    law = None if entry.convergence is None else _read_law(entry.convergence, part)
    read = {"optimizer": optimizer, "data": data, "batch": limits, "convergence": law}
    try:
        training = Training(**{**given, **read, **framework})
    except InputError as error:
        raise InputError(error.problem, part.where(error.where), error.valid) from None
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

"""The documents that the server, its hosts and its users exchange as JSON; what is read is checked first."""

import re
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from experiments.runs.jobs.states import Outcome
from traces.common.errors import InputError

# Names of jobs and hosts become parts of URLs and paths.
NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"

# The largest body of a request, in bytes: a job with its files.
BODY_BYTES = 64 << 20

# The largest piece of a log in a request, and how much of an attempt's log the server keeps, from its beginning.
LOG_PIECE_BYTES = 1 << 18
LOG_BYTES = 16 << 20

_MOST_DEVICES = 100_000

Name = Annotated[str, Field(pattern=f"^{NAME}$")]
Devices = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[int, Field(ge=1, le=_MOST_DEVICES)]],
    Field(max_length=100),
]
Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Reason = Annotated[str, Field(max_length=4000)]

Document = TypeVar("Document")


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt that a host has.

    Attributes:
        steps: Number of finished training steps, with those of earlier attempts.
    """

    job: Name
    attempt: Number
    steps: Number


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A host's message, by which it renews its lease.

    Attributes:
        incarnation: When the host's process began; of two processes with the same name the later one counts.
        devices: What the host offers: numbers of devices by kind.
    """

    incarnation: Number
    devices: Devices
    attempts: Annotated[list[Running], Field(max_length=10_000)]


@dataclass(frozen=True, slots=True)
class Assignment:
    """An attempt that a host shall have; the host ends all attempts that it has beside its assignments.

    Attributes:
        stops: Whether the user has asked to stop the job.
        log_bytes: How much of the attempt's log the server has.
    """

    job: Name
    attempt: Number
    devices: Devices
    stops: bool
    log_bytes: Number


@dataclass(frozen=True, slots=True)
class Assignments:
    """The server's answer to a heartbeat: everything that the host shall run, until the next answer.

    Attributes:
        lease_s: Time in seconds after which a host that is not heard counts as lost.
    """

    lease_s: float
    attempts: list[Assignment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """A host's report that an attempt has ended."""

    attempt: Number
    outcome: Outcome
    reason: Reason
    steps: Number


def parse(kind: type[Document], text: bytes | str) -> Document:
    """Return the document in a JSON text.

    Raises:
        InputError: The text is not such a document.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{first['msg']}", where=f"{kind.__name__}{'.' if place else ''}{place}") from None


def dump(document: object) -> bytes:
    """Return a document as JSON."""
    return TypeAdapter(type(document)).dump_json(document)


def check_name(name: str, where: str) -> str:
    """Return the name of a job or host; raise `InputError` if it is none."""
    if not re.fullmatch(NAME, name):
        raise InputError(
            f"'{name}' is no name", where=where, valid="give 1 to 63 small letters, digits and dashes, such as 'host-1'"
        )
    return name

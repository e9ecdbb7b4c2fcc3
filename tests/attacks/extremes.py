"""Values at and beyond the ends of what a file's keys and a verb's options take: one value at a time is spoiled."""

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import typer.main
import yaml

from experiments.cli.app import app
from experiments.cli.options import POLICIES, SCHEDULES, STRATEGIES
from planner.files.documents import parse_yaml
from tests.attacks.mutations import ODD, TEXTS, places

WHOLE = (0, 1, 2, 3, 7, 64, 100, 1000, 10_000, 15_625, 10**6, 10**9, 999_999_999, 2**31, 2**63, 10**30, 10**400, -1)
REAL = (0.0, -0.0, 1e-300, 5e-324, 1e-9, 1e-3, 0.999999, 1.0, 1.000001, 1e3, 1e9, 1e18, 1e300, float("nan"))
ENDLESS = (float("inf"), float("-inf"), -1.0, -1e-9)
AMOUNTS = (
    *("0", "-0", "-0.0", "1e-300", "1e-12", "1e-6", "0.001", "1", "100", "1000", "4000000", "1e9", "1e15", "1e100"),
    *("1e300", "1e400", "nan", "inf", "-1", "-1e-9", "9" * 400, "1_000", "1,000", "0x10", "٣", ".", "1e", "+5"),
)
UNITS = ("ns", "us", "ms", "s", "min", "h", "bit/s", "kbit/s", "Mbit/s", "Gbit/s", "GB/s", "B", "kB", "MB", "GiB", "TB")
MORE_UNITS = ("FLOP", "GFLOP", "TFLOP/s", "", "parsec", "S", "Mb/s", "mb", "%")

# What options name.
_NAMES = {"strategy": STRATEGIES, "schedule": SCHEDULES, "policy": POLICIES, "policies": POLICIES, "rivals": STRATEGIES}

_QUANTITY = re.compile(r"-?[\d.]+(?:e[+-]?\d+)? ?(\S+)")


def extreme_quantity(random: Random, unit: str | None = None) -> str:
    """Return an amount with a unit: mostly the given one."""
    if unit is None or random.random() < 0.15:
        unit = random.choice((*UNITS, *MORE_UNITS))
    return f"{random.choice(AMOUNTS)}{random.choice((' ', ' ', ''))}{unit}"


def extreme_like(value: Any, random: Random) -> Any:
    """Return a value of the same type at the ends of its range, or sometimes of another type."""
    if random.random() < 0.15:
        return random.choice((*ODD, *TEXTS, *WHOLE, *REAL))
    if isinstance(value, bool):
        return random.choice((0, 1, "yes", "perhaps", None, [True]))
    if isinstance(value, int):
        return random.choice((*WHOLE, *WHOLE, *REAL, *ENDLESS))
    if isinstance(value, float):
        return random.choice((*WHOLE, *REAL, *ENDLESS))
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        return extreme_quantity(random, match.group(1)) if match else random.choice(TEXTS)
    if isinstance(value, list):
        return random.choice(([], value * 2, value[:1], [value], value * 300, None))
    return random.choice((*ODD, *WHOLE))


def spoiled_extremely(content: bytes, name: str, random: Random) -> bytes:
    """Return a YAML or JSON file in which one or two values are extreme."""
    is_json = name.endswith(".json")
    value = deepcopy(json.loads(content) if is_json else parse_yaml(content.decode()))
    for _ in range(random.choice((1, 1, 1, 2))):
        path = random.choice([each for each in places(value) if each] or [()])
        if not path:
            break
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = extreme_like(holder[path[-1]], random)
    text = json.dumps(value) if is_json else yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
    return text.encode(errors="surrogatepass")


def spoiled_table(content: bytes, random: Random) -> bytes:
    """Return a text of rows in which one number is extreme."""
    found = [*re.finditer(rb"(?<![\w.])-?\d+(?:\.\d+)?", content)]
    if not found:
        return content
    number = random.choice(found)
    return content[: number.start()] + random.choice(AMOUNTS).encode() + content[number.end() :]


@cache
def _options(words: tuple[str, ...]) -> tuple[Any, ...]:
    command = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return tuple(each for each in command.params if each.name != "help" and each.opts[0].startswith("-"))


# Options that would reach other machines, or wait for a person.
_LEFT_OUT = ("--submit", "--head", "--server", "--live", "--prometheus", "--install-completion", "--help")


def with_extreme_option(arguments: Sequence[str], random: Random) -> list[str]:
    """Return the arguments with one option of their verb that has an extreme value."""
    verbs = tuple(word for word in arguments[:2] if not word.startswith("-"))
    options = [each for each in _options(verbs) if each.opts[0] not in _LEFT_OUT]
    if not options:
        return [*arguments, "--steps", random.choice(AMOUNTS)]
    option = random.choice(options)
    words = [*_without(arguments, option.opts)]
    name = random.choice(option.opts)
    if option.is_flag:
        return [*words, name]
    return [*words, name, _text_for(option, random)]


def _without(arguments: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    skips = False
    for word in arguments:
        if skips or word in names:
            skips = not skips
            continue
        yield word


def _text_for(option: Any, random: Random) -> str:
    kind = option.type_descriptor.annotation
    if random.random() < 0.1:
        # No command may write outside of the folder, and no argument has a null byte.
        return random.choice([each.replace("\0", "") for each in TEXTS if not each.startswith(("/", "~", ".."))])
    if kind is int:
        return str(random.choice((*WHOLE, *REAL)))
    if kind is float:
        return str(random.choice((*WHOLE, *REAL, *ENDLESS)))
    if option.name in _NAMES and random.random() < 0.5:
        return random.choice(_NAMES[option.name])
    if kind is Path:
        return random.choice(
            (
                "loop",
                "\udcfe",
                "/dev/full",
                "/proc/absent",
                ".",
                "plan.json",
                "plain.yaml",
                "run",
                "link.csv",
                "absent/file",
                "policy.py",
                "x" * 300,
            )
        )
    return random.choice(
        (extreme_quantity(random), extreme_quantity(random, "s"), f"k={extreme_quantity(random)}", "a,b", "none", "")
    )

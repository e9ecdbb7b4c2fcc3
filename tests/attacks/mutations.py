"""Ways to spoil a file, from single bytes over the structure of its values to what it is on the disk."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]

# Text that YAML and JSON read as other values than a person may expect, and values that nothing expects.
TEXTS = (
    "",
    " ",
    "~",
    "-",
    "\t",
    "null",
    "yes",
    "NaN",
    "-inf",
    "1e999",
    "0x10",
    "1_000",
    "1:30",
    "٣",
    "½",
    "\uff0b5 s",
    "\u202etxet",
    "e\u0301",
    "\U0001f600",
    "a\nb",
    "a\x1b[31mb",
    "a\x00b",
    "..",
    "/",
    "/dev/zero",
    "/dev/stdin",
    "/proc/self/mem",
    "~root",
    "$(id)",
    "{{ 7 * 7 }}",
    "%s%n",
    "x" * 5000,
    "9" * 500,
    "../" * 40,
    "-1 s",
    "0 s",
    "1e300 s",
    "1e-300 s",
    "nan s",
    "inf GB",
    "10",
    "10 parsec",
    "10 Gbit/s",
    "0 bit/s",
    "1e30 bit/s",
    "5 GB",
    "1e400 MB",
    "100 %",
    "-3",
    "west->east",
    "west->west",
    "a->b->c",
)
NUMBERS = (0, -1, 1, 2, 3, 7, -0.0, 0.5, 1e-300, 1e300, 5e-324, 10**6, 10**9, 2**31, 2**63, 10**30, 10**400, -(10**9))
ODD = (
    None,
    True,
    False,
    float("nan"),
    float("inf"),
    float("-inf"),
    [],
    {},
    [None],
    [[]],
    {"": ""},
    [[[[1]]]],
    {"a": {"a": 1}},
)


def odd_value(random: Random) -> Any:
    """Return a value that is rarely valid."""
    kind = random.randrange(8)
    if kind == 0:
        return deep(random.choice((10, 70, 200)), random)
    if kind == 1:
        return [odd_value(random) for _ in range(random.randrange(4))]
    if kind == 2:
        return {str(odd_value(random))[:50]: odd_value(random) for _ in range(random.randrange(4))}
    return random.choice(random.choice((TEXTS, NUMBERS, NUMBERS, ODD)))


def deep(levels: int, random: Random) -> Any:
    """Return a value in so many lists or mappings."""
    value: Any = 1
    for _ in range(levels):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


# --- structure ---


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        found += places(each, (*path, key))
    return found


def known_keys() -> list[str]:
    """Return all keys of the schemas of files that people write."""
    found: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            found.update(value.get("properties", {}))
            for each in value.values():
                collect(each)
        elif isinstance(value, list):
            for each in value:
                collect(each)

    for path in sorted((ROOT / "docs" / "schemas").glob("*.json")):
        collect(json.loads(path.read_text()))
    return sorted(found)


KEYS = known_keys()


def restructured(value: Any, random: Random) -> Any:
    """Return the value with one change in its structure."""
    value = deepcopy(value)
    path = random.choice(places(value))
    if not path:
        return random.choice((odd_value(random), [value], {"scenario": value}, [value, value]))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    old = holder[last]
    change = random.randrange(13)
    if change <= 2:
        holder[last] = odd_value(random)
    elif change == 3:
        del holder[last]
    elif change == 4 and isinstance(holder, list):
        holder[last:last] = [deepcopy(old)] * random.choice((1, 2, 500))
    elif change == 5:
        other = random.choice(places(value))
        found = value
        for key in other:
            found = found[key]
        holder[last] = deepcopy(found)
    elif change == 6:
        holder[last] = [old] if random.random() < 0.5 else {random.choice(KEYS): old}
    elif change == 7:
        holder[last] = str(old) if not isinstance(old, str) else [*old]
    elif change == 8 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[last] = random.choice(
            (-old, old * 10 ** random.randrange(1, 12), old / 10 ** random.randrange(1, 12), old + 0.5)
        )
    elif change == 9 and isinstance(old, str):
        holder[last] = respelled(old, random)
    elif change == 10 and isinstance(holder, dict):
        new = random.choice((respelled(str(last), random), random.choice(KEYS), str(odd_value(random))[:60]))
        holder[new] = holder.pop(last)
    elif isinstance(holder, dict):
        holder[random.choice(KEYS)] = random.choice((odd_value(random), deepcopy(old)))
    else:
        holder.append(odd_value(random))
    return value


def respelled(text: str, random: Random) -> str:
    """Return a text with another number, or with a letter less, more or changed."""
    if any(character.isdigit() for character in text) and random.random() < 0.7:
        digits = [place for place, character in enumerate(text) if character.isdigit()]
        place = random.choice(digits)
        return text[:place] + random.choice(("0", "-1", "999999999", "1e300", ".", "nan", "")) + text[place + 1 :]
    place = random.randrange(len(text) + 1)
    return text[:place] + random.choice(("", "x", "é", "-", " ", "\n", "/")) + text[place + random.randrange(2) :]


def spoiled_values(content: bytes, name: str, random: Random) -> bytes:
    """Return a YAML or JSON file with one to three changes in its structure."""
    is_json = name.endswith(".json")
    value = json.loads(content) if is_json else yaml.safe_load(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = restructured(value, random)
    try:
        text = json.dumps(value) if is_json else yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
    except (RecursionError, ValueError, yaml.YAMLError):
        text = json.dumps(value, default=str) if not is_json else "[" * 5000
    return text.encode(errors="surrogatepass")


# --- text and bytes ---


def _truncated(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _bytes_changed(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 3, 30))):
        place = random.randrange(len(changed) + 1)
        change = random.randrange(3)
        changed[place : place + (change > 0)] = bytes([random.randrange(256)]) if change < 2 else b""
    return bytes(changed)


def _lines_changed(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    place, other = random.randrange(len(lines)), random.randrange(len(lines))
    change = random.randrange(6)
    if change == 0:
        del lines[place]
    elif change == 1:
        lines.insert(other, lines[place])
    elif change == 2:
        lines[place], lines[other] = lines[other], lines[place]
    elif change == 3:
        lines[place] = b" " * random.randrange(1, 5) + lines[place]
    elif change == 4:
        lines[place] = lines[place].lstrip()
    else:
        lines[place] = random.choice(TEXTS).encode() + b"\n"
    return b"".join(lines)


def _numbers_changed(content: bytes, random: Random) -> bytes:
    digits = [place for place, byte in enumerate(content) if 48 <= byte < 58]
    if not digits:
        return content
    place = random.choice(digits)
    new = random.choice((b"-1", b"0", b"1e308", b"nan", b"inf", b"99999999999", b".", b"", b"1e-320", b"9" * 400))
    return content[:place] + new + content[place + 1 :]


def _words_changed(content: bytes, random: Random) -> bytes:
    words = content.split(b" ")
    words[random.randrange(len(words))] = random.choice(random.choice((TEXTS, KEYS))).encode()
    return b" ".join(words)


def _surrounded(content: bytes, random: Random) -> bytes:
    return random.choice(
        (
            b"\xef\xbb\xbf" + content,
            b"\xff\xfe" + content,
            content.replace(b"\n", b"\r\n"),
            content.replace(b"  ", b"\t"),
            content + b"\0",
            content + content,
            content + b"\n---\n" + content,
            b"%YAML 9.9\n---\n" + content,
            b"# \xe9\n" + content,
            b"",
            b"\n \n",
            b"\0" * 100,
            bytes(random.randrange(256) for _ in range(300)),
        )
    )


def _bombs(content: bytes, random: Random) -> bytes:
    """Return text that YAML or JSON readers multiply, nest or run."""
    levels = random.choice((9, 30, 60))
    laughs = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
        b"a%d: &a%d [%s]\n" % (level, level, b", ".join([b"*a%d" % (level - 1)] * 9)) for level in range(1, levels)
    )
    merges = b"m0: &m0 {a: 1}\n" + b"".join(
        b"m%d: &m%d {<<: [%s], k%d: 1}\n" % (level, level, b", ".join([b"*m%d" % (level - 1)] * 9), level)
        for level in range(1, levels)
    )
    lines = content.splitlines() or [b""]
    place = random.randrange(len(lines))
    tagged = [*lines[:place], lines[place].replace(b": ", b": " + random.choice(_TAGS) + b" ", 1), *lines[place + 1 :]]
    return random.choice(
        (
            laughs + content,
            content + b"\n" + laughs,
            merges + content,
            b"[" * random.choice((70, 2000, 100_000)),
            b'{"a":' * random.choice((70, 2000, 100_000)),
            b"- " * 3000 + b"1",
            b"&a [*a]",
            b"? " * 2000 + b"1",
            b"[" + b"1," * 400_000 + b"1]",
            b"{" + b",".join(b'"k%d": 1' % number for number in range(100_000)) + b"}",
            b"!!python/object/apply:os.system ['touch broken-in']",
            b"\n".join(tagged),
            b"1" * 1_000_000,
            b'"' + b"x" * 3_000_000 + b'"',
        )
    )


_TAGS = (
    b"!!python/name:os.system",
    b"!!binary",
    b"!!set",
    b"!!bool",
    b"!!int",
    b"!!float",
    b"!!null",
    b"!!omap",
    b"!x",
    b"&a",
    b"*a",
    b"!!str",
)

Spoil = Callable[[bytes, Random], bytes]
TEXTUAL: Sequence[Spoil] = (
    _truncated,
    _bytes_changed,
    _lines_changed,
    _lines_changed,
    _numbers_changed,
    _numbers_changed,
    _words_changed,
    _surrounded,
    _bombs,
)


def spoiled_text(content: bytes, random: Random) -> bytes:
    """Return a file with one to three changes in its text or bytes."""
    for _ in range(random.choice((1, 1, 2, 3))):
        content = random.choice(TEXTUAL)(content, random)
    return content


# --- what the file is ---


def replace_file(path: Path, random: Random) -> str:
    """Put something else in the place of a file; return what."""
    path.unlink()
    kind = random.choice(
        (
            *("nothing", "a folder", "a full folder", "an empty file", "a loop of links", "a link to nothing"),
            *("a pipe", "a link to /dev/zero", "a link to /dev/null", "a huge sparse file", "a socket"),
            *(
                "a link to itself",
                "an unreadable file",
                "a link to the folder",
                "a terminal",
                "a link to /proc/self/mem",
            ),
        )
    )
    if kind == "a folder":
        path.mkdir()
    elif kind == "a full folder":
        path.mkdir()
        (path / "file").write_text("name: file\n")
    elif kind == "an empty file":
        path.touch()
    elif kind == "a loop of links":
        path.symlink_to(path.name + "-2")
        path.with_name(path.name + "-2").symlink_to(path.name)
    elif kind == "a link to nothing":
        path.symlink_to("nowhere")
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "a link to the folder":
        path.symlink_to(".")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind.startswith("a link to /"):
        path.symlink_to(kind.removeprefix("a link to "))
    elif kind == "a terminal":
        path.symlink_to("/dev/tty")
    elif kind == "a huge sparse file":
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    elif kind == "an unreadable file":
        path.write_text("name: file\n")
        path.chmod(0)
    return kind

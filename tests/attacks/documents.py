"""Documents that follow the schema of a file, with values that are valid one by one and rarely together."""

import json
from pathlib import Path
from random import Random
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"

# Names that fit somewhere, so that references between parts of a document often hold.
NAMES = ("left", "right", "west", "east", "t4", "v100-16", "a100-40", "box", "adamw", "sgd", "lte", "west->east")
# Files beside the document.
FILES = ("link.csv", "spot.csv", "speed.csv", "model.yaml", "box.yaml", "config.json", "times.json", "sizes.json", ".")
QUANTITIES = ("{} s", "{} ms", "{} MB", "{} GiB", "{} Mbit/s", "{} GFLOP", "{} TFLOP/s", "{} GB/s", "{}")
AMOUNTS = ("0", "1", "2", "0.5", "16", "100", "1e6", "1e-9", "1e12", "-1", "inf", "nan")
COUNTS = (0, 1, 1, 2, 2, 3, 4, 8, 16, 64, 1000, 10**6, -1)
SHARES = (0, 0.1, 0.5, 1, 1.0, 1.5, 2, 1e-9, 1e9, -0.5, 0.001)

# Depth from which only the keys that must be there are drawn.
_DEEP = 6


class Drawing:
    """Draws documents by the schema of one kind of file: ``scenario``, ``plan`` or ``sweep``."""

    def __init__(self, kind: str, random: Random) -> None:
        self._schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
        self._random = random

    def document(self) -> Any:
        """Return a document."""
        return self._draw(self._schema, "", 0)

    def _draw(self, schema: Any, key: str, depth: int) -> Any:
        random = self._random
        if schema is True or not schema:
            return random.choice((*NAMES, *COUNTS))
        if "$ref" in schema:
            return self._draw(self._schema["$defs"][schema["$ref"].rpartition("/")[2]], key, depth)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                return self._draw(random.choice(schema[choice]), key, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return random.choice(schema["enum"])
        if "default" in schema and random.random() < 0.3:
            return schema["default"]
        return self._of_type(schema.get("type"), schema, key, depth)

    def _of_type(self, kind: str | None, schema: Any, key: str, depth: int) -> Any:
        random = self._random
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            parts = schema.get("prefixItems")
            if parts is not None:
                return [self._draw(each, key, depth + 1) for each in parts]
            return [
                self._draw(schema.get("items", True), key, depth + 1) for _ in range(random.choice((0, 1, 2, 2, 3)))
            ]
        if kind == "integer":
            return min(random.choice(COUNTS), schema.get("maximum", 10**9))
        if kind == "number":
            return random.choice((*SHARES, *COUNTS))
        if kind == "boolean":
            return random.random() < 0.5
        if kind == "null":
            return None
        return self._text(schema)

    def _text(self, schema: Any) -> str:
        random = self._random
        if "examples" in schema and random.random() < 0.8:
            unit = random.choice(schema["examples"]).partition(" ")[2]
            return f"{random.choice(AMOUNTS)} {unit}".strip()
        pool = random.choice((NAMES, NAMES, FILES, QUANTITIES))
        return random.choice(pool).format(random.choice(AMOUNTS))

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        random = self._random
        needed, found = set(schema.get("required", ())), {}
        share = random.choice((0.1, 0.4, 0.8)) if depth < _DEEP else 0.0
        for name, part in schema.get("properties", {}).items():
            if name in needed or random.random() < share:
                found[name] = self._draw(part, name, depth + 1)
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            for _ in range(random.choice((0, 1, 1, 2))):
                found[random.choice(NAMES)] = self._draw(more, "", depth + 1)
        return found


def grafted(valid: Any, drawn: Any, random: Random) -> Any:
    """Return a valid document in which some parts, at any depth, are those of a drawn one."""
    if not isinstance(valid, dict) or not isinstance(drawn, dict) or random.random() < 0.1:
        return drawn
    result = dict(valid)
    for key in dict.fromkeys((*valid, *drawn)):
        if key in drawn and random.random() < (0.3 if key in valid else 0.2):
            result[key] = grafted(valid.get(key), drawn[key], random)
    return result

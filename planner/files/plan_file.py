"""Plans as JSON files, with a schema version."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from planner.files.documents import Document
from planner.files.parsing import STRICT, parse
from planner.plan import SCHEMA_VERSION, Pipeline, Plan, Replica, Stage
from traces.atomic import write_text_atomically
from traces.errors import InputError

for _kind in (Replica, Stage, Pipeline, Plan):
    setattr(_kind, "__pydantic_config__", STRICT)  # noqa: B010 - the plan itself knows nothing of files


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        InputError: Not a plan of this version; names the file, the line and the key.
    """
    document = Document(path)
    if not isinstance(document.value, dict) or "version" not in document.value:
        raise InputError("this is not a plan", where=str(path), valid="make one with 'ropebridge plan'")
    version = document.value["version"]
    if version != SCHEMA_VERSION:
        raise InputError(
            f"the plan has version {version!r}",
            where=document.where(("version",)),
            valid=f"this ropebridge reads version {SCHEMA_VERSION}: make the plan again",
        )
    return parse(Plan, document, document.value)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan to a file that `read_plan` reads."""
    write_text_atomically(path, plan_json(plan) + "\n")


def plan_json(plan: Plan) -> str:
    """Return a plan as JSON text."""
    return json.dumps({"version": plan.version, **asdict(plan)}, indent=1)


def parse_plan(text: str) -> Plan:
    """Return the plan in JSON text that `plan_json` made."""
    return _adapter().validate_json(text)


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of plan files, for editors."""
    return _adapter().json_schema()


@cache
def _adapter() -> TypeAdapter[Plan]:
    """Made once: making it takes longer than reading many plans with it."""
    return TypeAdapter(Plan)

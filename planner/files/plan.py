"""Plans as JSON files, with a schema version, and decisions, which contain plans.

Fields with the default value of `planner.plan.plan` are left out; these defaults do not change within a version.
Actions are text such as ``"2F0"``.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from planner.adapt.migration import LayerTransfer, Migration
from planner.adapt.policy import Decision
from planner.files.documents import Document, plain
from planner.files.parsing import STRICT, cached_adapter, parse, reported
from planner.plan.actions import Action, parse_action
from planner.plan.outer_step import OuterStep
from planner.plan.plan import SCHEMA_VERSION, Pipeline, Plan, Replica, Stage, Synchronisation
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError


def _action(text: object) -> Action:
    if not isinstance(text, str):
        raise InputError(f"{text!r} is not an action", valid="write stage, kind (F, B, I or W) and microbatch: '2F0'")
    return parse_action(text)


def _action_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    return core_schema.no_info_plain_validator_function(reported(_action))


def _action_json_schema(schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
    return {"type": "string", "pattern": r"^\d+[FBIW]\d+$", "examples": ["2F0"]}


# Set here, because the classes of the plan must not depend on pydantic.
for _kind in (Replica, Stage, Pipeline, OuterStep, Synchronisation, Plan):
    setattr(_kind, "__pydantic_config__", STRICT)  # noqa: B010
setattr(Action, "__get_pydantic_core_schema__", _action_schema)  # noqa: B010
setattr(Action, "__get_pydantic_json_schema__", _action_json_schema)  # noqa: B010


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        InputError: The file is not a plan of this version; the message names the file, the line and the key.
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
    return json.dumps({"version": plan.version, **plain(plan, defaults=False)}, indent=1)


def parse_plan(text: str) -> Plan:
    """Return the plan from JSON text that `plan_json` returned."""
    plan: Plan = cached_adapter(Plan).validate_json(text)
    return plan


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of plan files, for editors."""
    return cached_adapter(Plan).json_schema()


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return a decision as a plain value for JSON."""
    return {
        "observed_step": decision.observed_step,
        "first_step": decision.first_step,
        "change": decision.change,
        "moved_bytes": decision.migration.size_bytes,
        "moves": [asdict(move) for move in decision.migration.moves],
        "plan": json.loads(plan_json(decision.plan)),
    }


def parse_decision(data: Mapping[str, Any]) -> Decision:
    """Return the decision from a plain value that `decision_json` returned."""
    plan = parse_plan(json.dumps(data["plan"]))
    # Runs of versions without migration lack this entry.
    migration = Migration(tuple(LayerTransfer(**move) for move in data.get("moves", ())))
    return Decision(data["observed_step"], data["first_step"], plan, data["change"], migration)

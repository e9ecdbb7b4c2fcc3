"""Writes the JSON Schemas of scenario, plan and sweep files: ``python -m experiments.tools.schemas FOLDER``."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.sweep.sweep_file import sweep_schema
from planner.files.plan import plan_schema
from planner.files.scenario import scenario_schema
from traces.common.atomic import write_text_atomically


def schema_texts() -> Mapping[str, str]:
    """Return the text of each schema file by its name."""
    schemas: dict[str, dict[str, Any]] = {
        "scenario.json": scenario_schema(),
        "plan.json": plan_schema(),
        "sweep.json": sweep_schema(),
    }
    return {name: json.dumps(schema, indent=1) + "\n" for name, schema in schemas.items()}


def main(folder: Path) -> None:
    """Write all schemas into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_texts().items():
        write_text_atomically(folder / name, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

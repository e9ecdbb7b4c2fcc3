"""The published JSON Schemas are those of the code."""

import json
from pathlib import Path

from experiments.tools.documentation import main, schema_texts

PUBLISHED = Path(__file__).parents[3] / "docs" / "schemas"


def test_the_published_schemas_are_current(tmp_path: Path) -> None:
    main("schemas", tmp_path)
    for name in schema_texts():
        assert json.loads((PUBLISHED / name).read_text()) == json.loads((tmp_path / name).read_text()), "make schemas"

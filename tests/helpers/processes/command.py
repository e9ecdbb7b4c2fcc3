"""The real command, as tests call it."""

import subprocess
import sys
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("ropebridge"))]


def ropebridge(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=cwd, check=False
    )

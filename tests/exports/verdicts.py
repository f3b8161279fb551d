"""How the loaders of frameworks give their verdicts. Runs in environments that have nothing of this project's."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Check = Callable[[Path, dict[str, Any]], Iterable[str] | None]
"""What is wrong with the plan of a folder: raised, or given as sentences. The second argument is the devices there are:
`nodes`, `per_node`, and `devices` in all."""


def report(check: Check) -> None:
    """Print a line of JSON for every plan in the folder that the script is given."""
    for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        try:
            # Some loaders print.
            with contextlib.redirect_stdout(io.StringIO()):
                error = "; ".join(check(folder, json.loads((folder / "world.json").read_text())) or ())
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {problem}"[:400]
        print(json.dumps({"plan": folder.name, "ok": not error, "error": error}), flush=True)

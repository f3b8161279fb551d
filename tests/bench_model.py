"""The model against published measurements: a JSON line per data set. `make bench-model`, or --data for other rows."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("accuracy_kernels", "accuracy_training", "accuracy_serving", "accuracy_rl", "accuracy_calibration")


def main() -> None:
    """Every set that the folder has."""
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE / "data", metavar="DIR", help="folder of measurements")
    parser.add_argument("--set", action="append", default=[], metavar="NAME", help="only these sets")
    options = parser.parse_args()
    for part in PARTS:
        for name, evaluate in importlib.import_module(part).SETS.items():
            if options.set and name not in options.set:
                continue
            found = evaluate(options.data)
            if found is None:
                print(json.dumps({"name": f"accuracy.{name}", "skipped": f"no file for it in {options.data.name}"}))
                continue
            figures = found if isinstance(found, dict) else found.figures()
            print(json.dumps({"name": f"accuracy.{name}"} | figures), flush=True)


if __name__ == "__main__":
    main()

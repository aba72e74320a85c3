"""`make bench`: measure, and print a JSON object a line. `FIGURES=prefix` measures a part.

Every module beside this one may have FIGURES: a mapping from the prefix of its figures' names to a function that sets
itself up and returns them. A figure is {"figure", "value", "unit", "ratios": {reference: ours / reference}}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Measure = Callable[[], list[dict[str, Any]]]


def collect() -> dict[str, Measure]:
    """Every measuring function, by the prefix of the names that it measures."""
    import tests.bench as package

    found: dict[str, Measure] = {}
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
        if module.name != "__main__":
            found.update(getattr(importlib.import_module(f"tests.bench.{module.name}"), "FIGURES", {}))
    return found


def main() -> int:
    """Exit codes: 0 all measured, 1 a measurement failed, 2 no figure has that prefix."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--figures", default="", metavar="PREFIX", help="measure only figures whose name begins so")
    prefix = parser.parse_args().figures
    chosen = {
        name: measure for name, measure in collect().items() if name.startswith(prefix) or prefix.startswith(name)
    }
    if not chosen:
        print(f"No figure begins with {prefix!r}. There are: {', '.join(sorted(collect()))}", file=sys.stderr)
        return 2
    failed = 0
    for name, measure in chosen.items():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            figures = measure()
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"{name}: could not be measured", file=sys.stderr)
            continue
        for figure in figures:
            if figure["figure"].startswith(prefix):
                print(json.dumps(figure), flush=True)
        print(f"  took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.check_migrations`: exit 1 if migrations and models give different schemas."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from marketplace.core.migrate import check, upgrade
from marketplace.embedded import EmbeddedStores


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="fallow-migrations-"))
    folder.chmod(0o755)
    stores = EmbeddedStores(folder)
    try:
        url = stores.start().database_url
        upgrade(url)
        differences = check(url)
    finally:
        stores.stop()
        shutil.rmtree(folder, ignore_errors=True)
    for difference in differences:
        print(difference)
    print("Models and migrations differ." if differences else "Models and migrations give the same schema.")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

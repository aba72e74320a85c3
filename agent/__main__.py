"""`python -m agent DIR`: the daemon alone, without the command line's libraries, which it would carry for its life."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from agent import trim
from agent.assembly import serve
from agent.config import ConfigError
from agent.home import LEVEL_VARIABLE, URL_VARIABLE, AlreadyRunning
from agent.identity import IdentityError
from agent.logs import configure


def main() -> int:
    """Run the agent of the folder that the first argument names. Returns the exit code."""
    if len(sys.argv) != 2:
        print("usage: python -m agent DIR", file=sys.stderr)
        return 2
    trim.begin()
    configure(os.environ.get(LEVEL_VARIABLE, "INFO"))
    try:
        return asyncio.run(serve(Path(sys.argv[1]).absolute(), url=os.environ.get(URL_VARIABLE) or None))
    except (ConfigError, IdentityError, AlreadyRunning) as error:
        print(error, file=sys.stderr)
    except PermissionError as error:
        print(f"{error.filename} may not be used: {error.strerror}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

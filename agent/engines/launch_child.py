"""Turns itself into somebody else's engine: bound to the agent's life, enclosed, with a clean environment.

Started by agent.engines.launched, told what to run on stdin. Its one answer says what encloses it; then the program has
replaced it, and answers for itself.
"""

from __future__ import annotations

import os
import sys

from agent.engines.child import bind, give_up, say


def main() -> None:
    """Never returns."""
    config = bind(lifeline=False)
    environment = {**os.environ, **config["environment"]}
    # What the engine writes may quote prompts: the agent reads its errors, nothing else is kept.
    null = os.open(os.devnull, os.O_RDWR)
    say(protection=config["protection"])
    os.dup2(null, 0)
    os.dup2(2, 1)
    try:
        os.execvpe(config["argv"][0], config["argv"], environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"error: {config['argv'][0]} cannot be run: {error.strerror}\n")
        give_up(str(error))


if __name__ == "__main__":
    main()

"""What every engine child does first: read its configuration, and make sure that it never outlives the agent.

Standard library only: it runs before anything heavy is loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from agent.engines.sandbox import enclose

_PR_SET_PDEATHSIG: Final = 1
_OOM_SCORE: Final = "500"
"""If the machine runs out of memory, the engine goes before the agent and the owner's programs."""


def prepare() -> dict[str, Any]:
    """Bind this process's life to the agent's, make it private, and return the configuration read from stdin."""
    return bind(lifeline=True)


def bind(*, lifeline: bool) -> dict[str, Any]:
    """As `prepare`. Without the lifeline the process may become another program, which the kernel still ends with the
    agent. The configuration gains `protection`: what keeps this process from files and network."""
    parent = os.getppid()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # A core dump would hold prompts.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    config = json.loads(sys.stdin.buffer.readline())
    if not isinstance(config, dict) or os.getppid() != parent:
        sys.exit(1)
    enclosure = config.pop("enclosure", None)
    config["protection"] = []
    if enclosure is not None:
        config["protection"] = enclosure.get("outside") or enclose(enclosure["readable"], enclosure["writable"])
        _die_with_parent()  # the kernel forgets it when the credentials change
    _protection.extend(config["protection"])
    if lifeline:
        threading.Thread(target=_follow_lifeline, name="lifeline", daemon=True).start()
    return config


_protection: list[str] = []


def say(**answer: object) -> None:
    """One JSON line to the agent, with what encloses this process."""
    sys.stdout.write(json.dumps({"protection": _protection, **answer}) + "\n")
    sys.stdout.flush()


def give_up(reason: str) -> NoReturn:
    """Tell the agent why this engine does not serve, and end at once, whatever native threads there are."""
    say(ready=False, error=reason)
    sys.stderr.flush()
    os._exit(1)


def _die_with_parent() -> None:
    """Linux kills us with the agent, even during a load that holds the interpreter. Elsewhere the lifeline must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _follow_lifeline() -> None:
    # The bare descriptor: a thread inside a buffered read would abort the interpreter's own shutdown.
    while os.read(0, 4096):
        pass
    os._exit(0)

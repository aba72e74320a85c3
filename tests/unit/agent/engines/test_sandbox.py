"""What an engine cannot reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.engines import sandbox
from agent.engines.sandbox import FEW_FILES, NO_NETWORK, wrapped

PROBE = """
import json, socket, sys
from agent.engines.sandbox import enclose, runtime_paths
done = enclose([*runtime_paths(), sys.argv[1]], [sys.argv[2]])
def works(call):
    try:
        call()
    except OSError:
        return False
    return True
def reach():
    with socket.create_connection(("127.0.0.1", int(sys.argv[4])), 1):
        pass
print(json.dumps({
    "done": done,
    "model": works(lambda: open(sys.argv[1]).read()),
    "model written": works(lambda: open(sys.argv[1], "a").write("x")),
    "own folder": works(lambda: open(sys.argv[2] + "/new", "w").write("x")),
    "owner's file": works(lambda: open(sys.argv[3]).read()),
    "network": works(reach),
}))
"""


class TestAnEnclosedProcess:
    def test_reaches_its_model_and_its_folder_and_nothing_else(self, tmp_path: Path) -> None:
        import json
        import socket

        for name in ("model", "secret"):
            (tmp_path / name).write_text("bytes")
        (tmp_path / "run").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:
            answer = subprocess.run(
                [
                    *(sys.executable, "-c", PROBE, str(tmp_path / "model"), str(tmp_path / "run")),
                    *(str(tmp_path / "secret"), str(server.getsockname()[1])),
                ],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
        found = json.loads(answer.stdout)
        done = found.pop("done")
        if FEW_FILES not in done and NO_NETWORK not in done:
            pytest.skip("this kernel offers neither Landlock nor network namespaces")
        assert found == {
            "model": True,
            "model written": FEW_FILES not in done,
            "own folder": True,
            "owner's file": FEW_FILES not in done,
            "network": NO_NETWORK not in done,
        }


class TestBubblewrap:
    def test_gets_no_network_no_home_and_no_rights(self) -> None:
        line = wrapped(["engine", "-x"], "/usr/bin/bwrap", readable=["/models/m.gguf"], writable=["/run/e"])
        assert line[-3:] == ["--", "engine", "-x"]
        joined = " ".join(line)
        assert "--unshare-all --die-with-parent" in joined
        assert "--ro-bind-try /models/m.gguf /models/m.gguf" in joined
        assert "--bind /run/e /run/e" in joined
        assert "--uid 65534" in joined
        assert "/home" not in joined

    def test_that_does_not_work_here_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "bwrap"
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        sandbox.bubblewrap.cache_clear()
        assert sandbox.bubblewrap() is None
        program.write_text("#!/bin/sh\nexit 0\n")
        sandbox.bubblewrap.cache_clear()
        assert sandbox.bubblewrap() == str(program)
        sandbox.bubblewrap.cache_clear()

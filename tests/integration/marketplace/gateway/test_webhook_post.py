"""The one call outward, against a real HTTPS server: certificates, names, redirects, proxies, rebinding, slowness."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from marketplace.gateway.webhooks import post
from marketplace.gateway.webhooks.post import Poster
from tests.receivers import NAME, Receiver, receiver

LOCAL = ["127.0.0.1"]
PUBLIC = ["93.184.215.14"]


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Receiver]:
    with receiver(tmp_path) as running:
        yield running


def poster(hook: Receiver) -> Poster:
    """One that finds every name on this machine."""
    return Poster(allow_private=True, ca_file=str(hook.ca_file), resolver=lambda host, port: LOCAL)


class TestACall:
    def test_goes_to_the_address_under_the_name_and_carries_what_was_said(self, hook: Receiver) -> None:
        answer = poster(hook).send(f"https://{NAME}:{hook.port}/a?b=c", {"webhook-id": "msg_1"}, b'{"type":"x"}')
        assert answer.ok
        (call,) = hook.calls
        assert (call.path, call.body) == ("/a?b=c", b'{"type":"x"}')
        assert call.headers["host"] == f"{NAME}:{hook.port}"
        assert call.headers["webhook-id"] == "msg_1"
        assert call.headers["content-type"] == "application/json"

    def test_needs_a_certificate_that_is_trusted_and_for_the_name(self, hook: Receiver) -> None:
        stranger = Poster(allow_private=True, resolver=lambda host, port: LOCAL)
        assert "not trusted" in stranger.send(f"https://{NAME}:{hook.port}/", {}, b"{}").error
        answer = poster(hook).send(f"https://other.example.org:{hook.port}/", {}, b"{}")
        assert (answer.status, "not trusted" in answer.error) == (None, True)
        assert hook.calls == []

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_follows_no_redirect(self, hook: Receiver, status: int) -> None:
        hook.decide = lambda call: status
        answer = poster(hook).send(hook.url, {}, b"{}")
        assert (answer.ok, answer.status) == (False, status)
        assert [call.path for call in hook.calls] == ["/hook"]

    def test_uses_no_proxy_of_the_environment(self, hook: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert poster(hook).send(hook.url, {}, b"{}").ok

    def test_says_what_went_wrong_and_never_raises(self, hook: Receiver) -> None:
        hook.decide = lambda call: 503
        assert poster(hook).send(hook.url, {}, b"{}").error == "It answered 503."
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        assert poster(hook).send(f"https://127.0.0.1:{port}/", {}, b"{}").error == "Connection refused"


class TestRebinding:
    def test_does_not_help_since_the_name_is_resolved_once(self, hook: Receiver) -> None:
        asked: list[str] = []

        def changing(host: str, port: int) -> list[str]:
            asked.append(host)
            return LOCAL if len(asked) == 1 else ["169.254.169.254"]

        caller = Poster(allow_private=True, ca_file=str(hook.ca_file), resolver=changing)
        assert caller.send(f"https://{NAME}:{hook.port}/", {}, b"{}").ok
        assert asked == [NAME]

    def test_is_seen_again_at_the_connection(self, hook: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        real = socket.create_connection
        monkeypatch.setattr(
            post.socket, "create_connection", lambda address, timeout: real(("127.0.0.1", hook.port), timeout)
        )
        caller = Poster(ca_file=str(hook.ca_file), resolver=lambda host, port: PUBLIC)
        answer = caller.send(f"https://{NAME}:8443/", {}, b"{}")
        assert answer.error == "The connection reached an address that is not on the public internet."
        assert hook.calls == []

    def test_refuses_a_private_address_without_a_connection(self, hook: Receiver) -> None:
        caller = Poster(ca_file=str(hook.ca_file), resolver=lambda host, port: LOCAL)
        assert "not on the public internet" in caller.send(f"https://{NAME}:{hook.port}/", {}, b"{}").error
        assert "not on the public internet" in caller.send(hook.url, {}, b"{}").error
        assert hook.calls == []


class TestASlowReceiver:
    def test_that_drips_its_answer_is_cut_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(post, "TOTAL_S", 0.6)
        stopping = threading.Event()

        def drip(server: socket.socket) -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                for _ in range(100):
                    if stopping.wait(0.1):
                        return
                    try:
                        connection.sendall(b"x: y\r\n")
                    except OSError:
                        return

        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=drip, args=[server], daemon=True)
            thread.start()
            began = time.monotonic()
            answer = Poster(allow_private=True).send(f"http://127.0.0.1:{server.getsockname()[1]}/", {}, b"{}")
            took_s = time.monotonic() - began
            stopping.set()
            thread.join()
        assert answer.error == "No answer within 0.6 s."
        assert took_s < 5.0

    def test_whose_name_takes_too_long_is_not_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        never = threading.Event()
        monkeypatch.setattr(post, "RESOLVE_S", 0.1)
        monkeypatch.setattr(post.socket, "getaddrinfo", lambda *args, **kwargs: never.wait(5.0))
        answer = Poster().send("https://slow.example.org/", {}, b"{}")
        never.set()
        assert "cannot be resolved" in answer.error

"""Signatures as the Standard Webhooks scheme has them."""

from __future__ import annotations

import base64
from uuid import UUID

from marketplace.gateway.webhooks.signing import new_secret, show_secret, signature, signed_headers

SHOWN = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEY = base64.b64decode(SHOWN.removeprefix("whsec_"))


class TestASignature:
    def test_is_the_one_of_the_scheme_s_own_example(self) -> None:
        said = signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', KEY)
        assert said == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

    def test_is_there_for_each_key(self) -> None:
        headers = signed_headers(UUID(int=7), 5, b"{}", (KEY, b"old"))
        assert headers["webhook-id"] == f"msg_{UUID(int=7).hex}"
        assert headers["webhook-timestamp"] == "5"
        name = headers["webhook-id"]
        both = [signature(name, 5, b"{}", KEY), signature(name, 5, b"{}", b"old")]
        assert headers["webhook-signature"].split(" ") == both


class TestASecret:
    def test_is_shown_as_the_libraries_read_it(self) -> None:
        assert show_secret(KEY) == SHOWN
        secret = new_secret()
        assert base64.b64decode(show_secret(secret).removeprefix("whsec_")) == secret
        assert len(secret) == 32

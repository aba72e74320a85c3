"""Stripe's rules of idempotency keys, apart from HTTP."""

from __future__ import annotations

import pytest

from tests.fakes.stripe.clock import Clock
from tests.fakes.stripe.errors import StripeError
from tests.fakes.stripe.idempotency import IdempotencyKeys

PATH = "/v1/transfers"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(clock: Clock) -> IdempotencyKeys:
    return IdempotencyKeys(clock)


def done(keys: IdempotencyKeys, status: int = 200) -> None:
    assert keys.claim("acct_1", "k", PATH, {"amount": "1"}, "req_1") is None
    keys.store("acct_1", "k", status, b"answer")


@pytest.mark.parametrize("status", [200, 400, 402, 500])
def test_any_stored_result_is_replayed(keys: IdempotencyKeys, status: int) -> None:
    done(keys, status)
    entry = keys.claim("acct_1", "k", PATH, {"amount": "1"}, "req_2")
    assert entry is not None
    assert (entry.status, entry.body, entry.request_id) == (status, b"answer", "req_1")


@pytest.mark.parametrize(("path", "params"), [(PATH, {"amount": "2"}), ("/v1/payouts", {"amount": "1"})])
def test_another_body_or_endpoint_is_an_idempotency_error(
    keys: IdempotencyKeys, path: str, params: dict[str, str]
) -> None:
    done(keys)
    with pytest.raises(StripeError) as caught:
        keys.claim("acct_1", "k", path, params, "req_2")
    assert caught.value.status == 400
    assert caught.value.body["error"]["type"] == "idempotency_error"


def test_a_key_in_use_is_a_conflict(keys: IdempotencyKeys) -> None:
    keys.claim("acct_1", "k", PATH, {}, "req_1")
    with pytest.raises(StripeError) as caught:
        keys.claim("acct_1", "k", PATH, {}, "req_2")
    assert caught.value.status == 409
    assert caught.value.body["error"]["code"] == "idempotency_key_in_use"


def test_a_freed_key_was_never_used(keys: IdempotencyKeys) -> None:
    keys.claim("acct_1", "k", PATH, {"amount": "x"}, "req_1")
    keys.free("acct_1", "k")
    assert keys.claim("acct_1", "k", PATH, {"amount": "1"}, "req_2") is None


def test_accounts_have_keys_of_their_own(keys: IdempotencyKeys) -> None:
    done(keys)
    assert keys.claim("acct_2", "k", PATH, {"amount": "2"}, "req_2") is None


def test_a_key_is_forgotten_after_24_hours_and_not_before(keys: IdempotencyKeys, clock: Clock) -> None:
    done(keys)
    clock.advance(24 * 3_600 - 1)
    assert keys.claim("acct_1", "k", PATH, {"amount": "1"}, "req_2") is not None
    clock.advance(1)
    assert keys.claim("acct_1", "k", PATH, {"amount": "2"}, "req_3") is None


def test_a_key_has_at_most_255_characters(keys: IdempotencyKeys) -> None:
    with pytest.raises(StripeError):
        keys.claim("acct_1", "k" * 256, PATH, {}, "req_1")

"""Errors in Stripe's shape: an HTTP status and an `error` object with type, code, message and param."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


class StripeError(Exception):
    """What the server answers instead of an object.

    `saved` tells whether an idempotency key remembers it: Stripe keeps results from the moment when an endpoint began
    to execute, so a parameter that failed validation, a conflict or a rate limit leaves the key free.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        saved: bool = True,
        headers: dict[str, str] | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.saved = saved
        self.headers = headers or {}
        fields: Json = {"code": code, "message": message, "param": param, "type": kind, **details}
        self.body: Json = {"error": {name: value for name, value in fields.items() if value is not None}}
        if code is not None:
            self.body["error"]["doc_url"] = f"https://stripe.com/docs/error-codes/{code.replace('_', '-')}"


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> StripeError:
    """A parameter that fails validation: 400, and the idempotency key stays free."""
    return StripeError(400, "invalid_request_error", message, code=code, param=param, saved=False)


def refused(message: str, *, code: str | None = None, param: str | None = None, **details: Any) -> StripeError:
    """Valid parameters that the state of things forbids: 400, remembered under the idempotency key."""
    return StripeError(400, "invalid_request_error", message, code=code, param=param, **details)


def missing(kind: str, identifier: str, *, param: str = "id") -> StripeError:
    """An object that does not exist, or belongs to another account: 404 for the path's own, 400 for a parameter."""
    status = 404 if param == "id" else 400
    message = f"No such {kind}: '{identifier}'"
    return StripeError(status, "invalid_request_error", message, code="resource_missing", param=param)


def card_error(message: str, *, code: str, decline_code: str | None = None, **details: Any) -> StripeError:
    """The card or its holder said no: 402."""
    return StripeError(402, "card_error", message, code=code, decline_code=decline_code, **details)


def api_error(message: str = "An unknown error occurred.") -> StripeError:
    """Stripe's own failure: 500; the client learns nothing of whether the effect took place."""
    return StripeError(500, "api_error", message, headers={"Stripe-Should-Retry": "false"})


def rate_limited() -> StripeError:
    """429, before anything happened."""
    return StripeError(
        429,
        "invalid_request_error",
        "Request rate limit exceeded. Learn more about rate limits here https://stripe.com/docs/rate-limits.",
        code="rate_limit",
        saved=False,
        headers={"Stripe-Rate-Limited-Reason": "global-rate"},
    )

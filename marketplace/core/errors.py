"""One root for every error that a caller may see. Slices subclass it beside the code that raises it."""

from __future__ import annotations

from typing import Any, ClassVar


class FallowError(Exception):
    """An error with an HTTP status and a stable code, rendered in OpenAI's error shape.

    `message` says what is wrong and what to do about it. `param` names the offending field. `details` are extra
    machine-readable facts placed beside the four standard members.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "api_error"
    retryable: ClassVar[bool] = False
    """Sent as `x-should-retry`: official clients obey it over the status."""

    def __init__(
        self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}
        self.details = details

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer, OpenAI's error object."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        error.update(self.details)
        return {"error": error}


class BadRequest(FallowError):
    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class Unauthenticated(FallowError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class PaymentRequired(FallowError):
    status = 402
    code = "insufficient_balance"
    type = "insufficient_quota"


class Forbidden(FallowError):
    status = 403
    code = "forbidden"
    type = "permission_error"


class NotFound(FallowError):
    status = 404
    code = "not_found"
    type = "invalid_request_error"


class Conflict(FallowError):
    status = 409
    code = "conflict"
    type = "invalid_request_error"


class TooLarge(FallowError):
    status = 413
    code = "request_too_large"
    type = "invalid_request_error"


class RateLimited(FallowError):
    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"
    retryable = True


class Unavailable(FallowError):
    status = 503
    code = "unavailable"
    type = "api_error"
    retryable = True

"""Writing a file so that a reader never finds half of it: beside, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from marketplace.core.errors import FallowError


class NotWritten(FallowError):
    """A file could not be written; nothing of it is left, and what stood there before still does."""

    code = "file_not_written"


@contextmanager
def written(path: Path | str) -> Iterator[Path]:
    """A path beside `path` to write to; at the end it becomes `path`, durably, or it is gone. Raises NotWritten."""
    path = Path(path).absolute()
    if path.exists() and not path.is_file():
        raise NotWritten(f"{path} is not a file that could be replaced.")
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise NotWritten(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        # The folder may be gone or read-only: then nothing of ours is in it either.
        with suppress(OSError):
            partial.unlink(missing_ok=True)

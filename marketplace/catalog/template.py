"""Chat templates: messages become the prompt text that the engine will see. Jinja in a sandbox, with bounds.

A template comes out of a model file, so it is foreign code: it runs without access to Python's objects, may not make
long values by multiplication, and is cut off when its output outgrows the bound. Messages are first brought into the
form that llama.cpp gives its own template engine, so that both render the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from marketplace.core.errors import BadRequest

MAX_TEMPLATE_CHARACTERS: Final = 256 * 1024
MAX_PROMPT_CHARACTERS: Final = 8 * 1024 * 1024
MAX_MESSAGES: Final = 4_096
MAX_REPEATED_CHARACTERS: Final = 1_000_000
"""What one multiplication of a string or list may give."""

_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise on messages that it was not written for."""

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class TemplateError(ValueError):
    """The template itself does not compile or cannot render an ordinary chat: it cannot be sold."""


class UnsupportedMessages(BadRequest):
    """These messages do not fit this model's template: the request's fault. Nothing is charged."""

    code = "unsupported_messages"


class UnsupportedTools(BadRequest):
    """The model's template has no place for tools."""

    code = "unsupported_tools"


class _TooLongError(Exception):
    pass


class _RaisedError(Exception):
    """The template called raise_exception."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a template can do, found out by rendering small chats with it."""

    system: bool
    """False: a system message is put in front of the first user message instead."""
    tools: bool
    typed_content: bool
    """True: it takes content as a list of parts only."""


class ChatTemplate:
    """One compiled template. Safe to share between threads.

    Raises TemplateError on construction if the source does not compile or cannot render a user's "hello".
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", adds_bos: bool = False) -> None:
        if not source.strip():
            raise TemplateError("the model file has no chat template")
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(f"the chat template has more than {MAX_TEMPLATE_CHARACTERS} characters")
        self._bos_token, self._eos_token, self._adds_bos = bos_token, eos_token, adds_bos
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        # Each rendering copies them twice; Jinja's chain of mappings takes longer for that than a small chat.
        self._template.globals = dict(self._template.globals)
        self.capabilities = self._probe()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """The prompt, the assistant's turn opened.

        Raises UnsupportedMessages (roles, order or size that the template refuses) and UnsupportedTools.
        """
        if not messages or len(messages) > MAX_MESSAGES:
            raise UnsupportedMessages(f"A chat has 1 to {MAX_MESSAGES} messages.", param="messages")
        if tools and not self.capabilities.tools:
            raise UnsupportedTools("This model takes no tools.", param="tools")
        shaped = shape(messages, self.capabilities)
        try:
            return self._render(shaped, list(tools) if tools else None)
        except _TooLongError:
            text = f"The prompt has more than {MAX_PROMPT_CHARACTERS} characters."
            raise UnsupportedMessages(text, param="messages") from None
        except _RaisedError as error:
            text = f"This model's chat template refuses these messages: {str(error)[:300]}"
            raise UnsupportedMessages(text, param="messages") from None
        except _RENDER_ERRORS as error:
            text = f"This model's chat template cannot render these messages ({type(error).__name__})."
            raise UnsupportedMessages(text, param="messages") from None

    def _render(self, messages: list[dict[str, Any]], tools: list[Tool] | None) -> str:
        context = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
            "enable_thinking": True,
        }
        pieces, length = [], 0
        for piece in self._template.generate(context):
            length += len(piece)
            if length > MAX_PROMPT_CHARACTERS:
                raise _TooLongError
            pieces.append(piece)
        text = "".join(pieces)
        # Where the tokenizer adds a begin token itself, llama.cpp removes the one that the template wrote.
        return text.removeprefix(self._bos_token) if self._adds_bos and self._bos_token else text

    def _probe(self) -> Capabilities:
        needle = "needle-7c1f"
        typed = False
        if not self._contains([_said("user", needle, typed=False)], None, needle):
            typed = True
            if not self._contains([_said("user", needle, typed=True)], None, needle):
                raise TemplateError("the chat template does not render a user's message")
        user, system = _said("user", "hello", typed=typed), _said("system", needle, typed=typed)
        tool = {"type": "function", "function": {"name": needle, "description": "d", "parameters": {"type": "object"}}}
        return Capabilities(
            system=self._contains([system, user], None, needle),
            tools=self._contains([user], [tool], needle),
            typed_content=typed,
        )

    def _contains(self, messages: list[dict[str, Any]], tools: list[Tool] | None, needle: str) -> bool:
        try:
            return needle in self._render(messages, tools)
        except (_TooLongError, _RaisedError, *_RENDER_ERRORS):
            return False


def _said(role: str, text: str, *, typed: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if typed else text}


def shape(messages: Sequence[Message], capabilities: Capabilities) -> list[dict[str, Any]]:
    """Messages as the template sees them: developers are system, text parts are joined by line ends, and where the
    template knows no system role its text goes in front of the next user message.

    Raises UnsupportedMessages for content that is not text.
    """
    shaped = [_shaped(message, index) for index, message in enumerate(messages)]
    if not capabilities.system:
        shaped = _without_system(shaped)
    if capabilities.typed_content:
        for message in shaped:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return shaped


def _shaped(message: Message, index: int) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise UnsupportedMessages("Each message has a role.", param=f"messages.{index}.role")
    copied = dict(message)
    copied["role"] = "system" if role == "developer" else role
    copied["content"] = _text(message.get("content"), index)
    return copied


def _text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UnsupportedMessages("Content is a string or a list of text parts.", param=f"messages.{index}.content")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            text = "Content parts other than text are not supported."
            raise UnsupportedMessages(text, param=f"messages.{index}.content")
        texts.append(part["text"])
    return "\n".join(texts)


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message["content"] = "\n".join([*waiting, message["content"]])
            waiting = []
        kept.append(message)
    if waiting:
        kept.append({"role": "user", "content": "\n".join(waiting)})
    return kept


_FILLING_METHODS: Final = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
"""Methods of strings that fill up to any width."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also bounds what one operation may give."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def wrap_str_format(self, value: Any) -> None:
        # Jinja would hand out a guarded str.format; it still fills to any width.
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _FILLING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        if operator == "*" and not _small(left, right):
            raise SecurityError("the chat template makes too long a value")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("string formatting is not allowed in a chat template")
        return super().call_binop(context, operator, left, right)


def _small(left: object, right: object) -> bool:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            return len(value) * times <= MAX_REPEATED_CHARACTERS
    return True


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], cache_size=0)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # Fills to a width and repeats without a multiplication.
    for name in ("center", "indent", "wordwrap", "format", "xmlattr", "lipsum"):
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    environment.filters["indent"] = _indent
    return environment


def _to_json(value: object, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _indent(value: str, width: int = 4, first: bool = False) -> str:  # Jinja's own signature
    lines = str(value).split("\n")
    padding = " " * min(int(width), 80)
    return "\n".join(padding + line if line and (first or index) else line for index, line in enumerate(lines))


def _raise_exception(message: object = "") -> NoReturn:
    raise _RaisedError(str(message))


def _strftime_now(format_: str) -> str:
    # The machine's local date, as the engine's own template sees it.
    return datetime.now().astimezone().strftime(str(format_)[:100])

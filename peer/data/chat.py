"""Conversations -> text, by the chat template of a tokenizer, with the places of what its assistant says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_RENDERED = 1 << 24  # characters
BYTE_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_DAY = "01 Jan 2026"  # of templates that name the date: the same text on every machine, and on every day
_MARK = "\ue000"
MAX_LOOPED = 1_000_000  # numbers that the ranges of one rendering yield
MAX_POWER = 64
Message = Mapping[str, str]
Span = tuple[int, int]


class Conversation(str):
    """The messages of a row as canonical JSON: hashed, counted and split like any other document."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """Each with `role` and `content`."""
        return [{"role": role, "content": content} for role, content in json.loads(self)]

    @property
    def text(self) -> str:
        """What is said in it, a paragraph for each message."""
        return "\n\n".join(message["content"] for message in self.messages)


def conversation_or_reason(rows: Sequence[Any]) -> tuple[str, str | None]:
    """(a `Conversation`, None) of a list of {role, content}; otherwise ("", why it is left out)."""
    if not all(isinstance(row, dict) and isinstance(row.get("role"), str) for row in rows):
        return "", "list" if not any(isinstance(row, dict) for row in rows) else "conversations without roles"
    if not all(isinstance(row.get("content"), str) for row in rows):
        return "", "conversations with a message that is no text"
    if not {row["role"] for row in rows} <= ROLES:
        return "", "conversations with an unknown role"
    if not any(row["role"] == "assistant" and row["content"].strip() for row in rows):
        return "", "conversations without an assistant's turn"
    return Conversation(json.dumps([[row["role"], row["content"]] for row in rows], ensure_ascii=False)), None


class ChatTemplate:
    """A chat template, rendered as transformers does, in a sandbox.

    Args:
        source: the Jinja text.
        special: the tokens that it may name, such as `eos_token`.
        control: spellings of control tokens, which no message may hold.
    """

    def __init__(self, source: str, special: Mapping[str, str], control: Sequence[str]) -> None:
        self._template, self._special = _compiled(source), dict(special)
        spelled = "|".join(re.escape(token) for token in sorted(control, key=len, reverse=True))
        self._control = re.compile(spelled or r"(?!)")
        self._turn_end = re.compile(rf"\s*(?:{spelled or '(?!)'})")

    def render(self, messages: Sequence[Message], prompts: bool = False) -> str:
        """The text of a conversation; with `prompts` it ends where an assistant begins to speak.

        Raises:
            ValueError: the template refuses it.
        """
        try:
            pieces, size = [], 0
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=prompts, tools=None, documents=None, range=_ranges(),
                **self._special,
            ):  # fmt: skip
                pieces.append(piece)
                if (size := size + len(piece)) > MAX_RENDERED:
                    raise TemplateError("it makes too much text")
        except Exception as error:  # a stranger's template can raise anything
            raise ValueError(f"refused by the chat template: {error}") from None
        return "".join(pieces)

    def control_in(self, text: str) -> str:
        """The first control token that a text spells; empty if there is none."""
        found = self._control.search(text)
        return found[0] if found else ""

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text, and [start, stop) of each assistant's turn in it, with the control token that ends the turn.

        Raises:
            ValueError: why the conversation is left out.
        """
        if any(self.control_in(message["content"]) for message in messages):
            raise ValueError("conversations with a control token in a message")
        try:
            whole = self.render(messages)
            spans = self._by_marks(messages, whole) or self._by_prefixes(messages, whole)
        except (ValueError, IndexError):
            raise ValueError("conversations that the chat template refuses") from None
        if not spans:
            raise ValueError("conversations that the chat template rewrites")
        return whole, spans

    def _by_marks(self, messages: Sequence[Message], whole: str) -> list[Span]:
        """Found by a mark in the place of each message; none if the template changes what a message says."""
        marked = self.render([{**one, "content": f"{_MARK}{n}{_MARK}"} for n, one in enumerate(messages)])
        first, *pieces = re.split(f"{_MARK}([0-9]+){_MARK}", marked)
        cleaners: tuple[Callable[[str], str], ...] = (str, str.strip)
        for clean in cleaners:
            text, spans = first, []
            for number, literal in zip(pieces[::2], pieces[1::2], strict=True):
                begin, message = len(text), messages[int(number)]
                text += clean(message["content"]) + literal
                if message["role"] == "assistant":
                    end = self._turn_end.match(text, len(text) - len(literal))
                    spans.append((begin, end.end() if end else len(text) - len(literal)))
            if text == whole:
                return spans
        return []

    def _by_prefixes(self, messages: Sequence[Message], whole: str) -> list[Span]:
        """Found by the text up to each turn; none if later messages change it."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self.render(messages[:number], True), self.render(messages[: number + 1])
                if not (whole.startswith(after) and after.startswith(before)):
                    return []
                spans.append((len(before), len(after.rstrip())))
        return spans


class _Generation(Extension):
    """`{% generation %}`, with which some templates mark the assistant's words: what is in it."""

    tags = {"generation"}  # noqa: RUF012 - of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """One in which no multiplication, sum or power makes a value larger than any text that is taken."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raises TemplateError where the result would be too large."""
        sizes = [len(one) if isinstance(one, str | list | tuple) else None for one in (left, right)]
        if operator == "**":
            large = not isinstance(right, int | float) or abs(right) > MAX_POWER or abs(left) > MAX_RENDERED
        elif operator == "*":
            large = any(
                size is not None and isinstance(times, int) and size * times > MAX_RENDERED
                for size, times in zip(sizes, (right, left), strict=True)
            )
        else:
            large = sum(size or 0 for size in sizes) > MAX_RENDERED
        if large:
            raise TemplateError(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)


def _ranges() -> Callable[..., range]:
    """`range`, whose calls in one rendering share MAX_LOOPED."""
    left = MAX_LOOPED

    def bounded(*numbers: int) -> range:
        nonlocal left
        if (left := left - len(range(*numbers))) < 0:
            raise TemplateError("it loops too often")
        return range(*numbers)

    return bounded


@lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _: _DAY
    return environment.from_string(source)


def _json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: object) -> None:
    raise TemplateError(str(message))

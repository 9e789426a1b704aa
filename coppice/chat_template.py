"""A model's chat template: messages in, the text of the prompt out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coppice.errors import InvalidArgument, StartError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str  # system, user, assistant, or what else the template knows
    content: str


class ChatTemplate:
    """One Jinja template, in the sandbox and with the helpers that Hugging Face gives it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template, such as `bos_token`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        helpers = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source, globals={**helpers, **special_tokens})
        except TemplateError as error:
            raise StartError(f"the chat template cannot be compiled: {error}") from None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt up to where the assistant's answer begins. Raises InvalidArgument."""
        if not messages:
            raise InvalidArgument("messages", [], "at least one message")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, tools=None, documents=None
            )
        # The template is the model publisher's program: whatever it raises is about the messages.
        except Exception as error:
            roles = [message.role for message in messages]
            allowed = f"what the model's chat template accepts ({error})"
            raise InvalidArgument("messages", roles, allowed) from None


class _GenerationBlock(Extension):
    """`{% generation %}` marks the answer for training; to a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which a model should not see.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)

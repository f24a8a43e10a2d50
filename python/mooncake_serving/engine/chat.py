"""Chat templates: the Jinja programs that models carry, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncake_kernels.errors import InvalidArgument

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    reply: bool = True,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """Run a chat template with the names and functions that Hugging Face gives it.

    Args:
        template: Jinja source; it runs sandboxed, since it came with a download.
        messages: each with ``role`` and ``content``.
        reply: passed as ``add_generation_prompt``.
        bos_token: passed on.
        eos_token: passed on.

    Raises:
        InvalidArgument: the template is malformed, fails, or refuses the messages, in its own
            words.
    """
    try:
        return _compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=reply,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except Exception as error:  # what a program can raise, and this one came with a download
        raise InvalidArgument(f"render_chat: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's text for training: the text alone."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to the end of the block; what it sets stays in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON plainly; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

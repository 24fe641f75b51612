"""ChatTemplate: validated messages to prompt text, by a model's own jinja template, in jinja's sandbox.

jinja2 is imported at first use: it takes a tenth of a second, and plain generation does not need it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError, InvalidRequest
from quire.text.tokenizer import special_tokens

if TYPE_CHECKING:  # a process that only renders needs no weights library
    from quire.weights.source import Source

MAX_CHARACTERS = 16_000_000  # of rendered text: a limit for templates that loop
_CONTINUE_MARK = "\ue0f0CONTINUE\ue0f1 "  # ends in a space to show whether the template trims


class ChatTemplate:
    """One model's template, or several by name: with tools, the one called `tool_use` if there is one."""

    def __init__(self, template: str | Mapping[str, str], special: Mapping[str, str] | None = None) -> None:
        self._texts = {"default": template} if isinstance(template, str) else dict(template)
        self._special = dict(special or {})
        self._compiled: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs` reach the template as variables (`enable_thinking`, `documents`, …).

        With `continue_final_message` the text ends where the last message's content ends. InvalidRequest
        reports invalid messages, or the template's own complaint.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other: set one to false",
                "continue_final_message",
            )
        checked = checked_messages(messages)
        if continue_final_message:
            checked[-1]["content"] += _CONTINUE_MARK
        variables = {
            **self._special,
            "documents": None,
            **plain(kwargs, "chat_template_kwargs"),
            "messages": checked,
            "tools": plain(tools, "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered("tool_use" if tools and "tool_use" in self._texts else "default", variables)
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template uses tools; otherwise they would be dropped silently."""
        return "tools" in self.text

    @property
    def text(self) -> str:
        """The text of all named templates."""
        return "\n".join(self._texts.values())

    def _rendered(self, name: str, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        pieces, size = [], 0
        try:
            for piece in self._template(name).generate(**variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    break
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", "messages") from error
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template cannot take these messages ({type(error).__name__}: {error}): check their shape",
                "messages",
            ) from error
        if size > MAX_CHARACTERS:
            raise InvalidRequest(
                f"the chat template made more than {MAX_CHARACTERS:,} characters: send shorter messages",
                "messages",
            )
        return "".join(pieces)

    def _template(self, name: str) -> Any:
        if name not in self._compiled:
            from jinja2 import TemplateSyntaxError

            text = self._texts.get(name)
            if text is None:
                known = ", ".join(sorted(self._texts))
                raise ConfigError(
                    f"no chat template is called {name!r} (there are {known}): set --chat-template"
                )
            try:
                self._compiled[name] = _environment().from_string(text)
            except TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template is no valid jinja (line {error.lineno}: {error.message}): "
                    "set --chat-template to another"
                ) from error
        return self._compiled[name]


def load_template(source: "Source", chosen: str | None = None) -> ChatTemplate:
    """The source's template, or `chosen`: a file's path or the template's text itself."""
    return template_from(source.tokenizer_config(), source.name, chosen)


def template_from(config: Mapping[str, Any], name: str, chosen: str | None = None) -> ChatTemplate:
    """As load_template, from the contents of a model's tokenizer_config.json and its name."""
    template: Any = config.get("chat_template") if chosen is None else _chosen_text(chosen)
    if isinstance(template, list):
        named = [
            entry for entry in template if isinstance(entry, Mapping) and {"name", "template"} <= set(entry)
        ]
        template = {str(entry["name"]): str(entry["template"]) for entry in named}
    if not template or not isinstance(template, (str, Mapping)):
        raise InvalidRequest(
            f"{name} has no chat template: give one with --chat-template, or send a plain prompt", "messages"
        )
    return ChatTemplate(template, special_tokens(config))


def _chosen_text(chosen: str) -> str:
    if "{" in chosen or "\n" in chosen:
        return chosen
    try:
        return Path(chosen).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={chosen!r} is no template and no readable file ({error})"
        ) from error


def _cut_at_mark(text: str) -> str:
    bare = _CONTINUE_MARK.rstrip()
    at = text.rfind(bare)
    if at < 0:
        raise InvalidRequest(
            "the chat template drops the last message's content, so it cannot be continued: "
            "set continue_final_message to false",
            "continue_final_message",
        )
    trimmed = not text.startswith(_CONTINUE_MARK, at)
    return text[:at].rstrip() if trimmed else text[:at]


@cache
def _environment() -> Any:
    """jinja's immutable sandbox with the filters and globals that templates for transformers use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """{% generation %} marks assistant text for training; it is transparent here."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


# ---------------------------------------------------------------------- messages


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# The same field in three dialects; the first is usual.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """New, plain messages; InvalidRequest names the path of an invalid value. The input is not modified.

    Content in text parts becomes one string, missing content an empty one, a tool call's arguments in JSON
    become the object that they encode, as templates expect, or an object with their text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise InvalidRequest.at("messages", f"must be a list of messages, not {type(messages).__name__}")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not checked:
        raise InvalidRequest.at("messages", "is empty: send at least one message")
    return checked


def plain(value: Any, path: str) -> Any:
    """A copy made of JSON's own types only: a template must not reach methods of richer objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)  # an enum's member, for instance
    raise InvalidRequest.at(path, f"is a {type(value).__name__}: only JSON values can be used here")


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest.at(
            path, f"must be an object with role and content, not {type(message).__name__}"
        )
    checked = plain(message, path)
    if not isinstance(checked.get("role"), str) or not checked["role"]:
        raise InvalidRequest.at(
            path, f"has role {checked.get('role')!r}: give 'system', 'user', 'assistant' or 'tool'"
        )
    if "content" not in checked and "tool_calls" not in checked:
        raise InvalidRequest.at(path, "has no content: give a string")
    checked["content"] = _text(checked.get("content"), f"{path}.content")
    if checked.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{path}.tool_calls")
    reasoning = next((checked[name] for name in _REASONING if checked.get(name) is not None), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest.at(path, f"is a {type(content).__name__}: give a string or a list of text parts")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise InvalidRequest.at(path, f"has type {kind!r}: only text parts are supported")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest.at(path, "has no text: give {'type': 'text', 'text': '…'}")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest.at(path, "must be a list of objects")
    for index, call in enumerate(calls):
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            function["arguments"] = _parsed(arguments)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest.at(f"{path}[{index}]", "has no function with a name")
    return calls


def _parsed(arguments: str) -> Any:
    """A call's arguments. A limit may have cut them off: templates then get their text under `raw_arguments`."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return {"raw_arguments": arguments}

"""Errors that people see. Each message names the value that was wrong and what to do about it."""

from collections.abc import Mapping
from typing import Any


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError):
    """A setting that cannot work; raised before anything is loaded."""


class ModelError(QuireError):
    """A model that cannot be served: unknown architecture, unsupported variant, bad hyperparameters."""


class WeightsError(QuireError):
    """Weights that cannot be found, read or trusted."""


class TrainingError(QuireError):
    """Training that cannot start or go on: bad data, a loss that is no number, no room for a checkpoint."""


class FieldName(str):
    """The name of a request's field within an error's values: `InvalidRequest.renamed` translates it."""


class InvalidRequest(QuireError):
    """A request that can never be served as asked; `param` names the offending field.

    The message is a template: `{param}` stands for the field's name, `{name}` for each of `values`. An API that has
    other names for the fields translates them with `renamed`; sentences are never rewritten. Without values only
    `{param}` is filled in, so a message may quote a request's text as it is.
    """

    def __init__(self, message: str, param: str | None = None, **values: Any) -> None:
        self.template = message
        self.param = param
        self.values = values
        super().__init__(self._rendered())

    @classmethod
    def at(cls, path: str, problem: str) -> "InvalidRequest":
        """The value at `path`, such as `messages[0].content`, has a problem; `param` is the field that holds it."""
        root = path.split("[")[0].split(".")[0]
        return cls("{path} {problem}", root, path=FieldName(path), problem=problem)

    def renamed(self, names: Mapping[str, str]) -> "InvalidRequest":
        """The same error with its fields called what `names` says."""
        values = {
            key: FieldName(renamed_field(value, names)) if isinstance(value, FieldName) else value
            for key, value in self.values.items()
        }
        param = None if self.param is None else renamed_field(self.param, names)
        return type(self)(self.template, param, **values)

    def _rendered(self) -> str:
        if self.values:
            return self.template.format(param=self.param, **self.values)
        return self.template.replace("{param}", self.param or "")


def renamed_field(field: str, names: Mapping[str, str]) -> str:
    """The field's name under `names`. A key with a leading dot renames a part of a path: `.function.name` of a tool."""
    for part, name in names.items():
        if part.startswith("."):
            field = field.replace(part, name)
    root = field.split(".")[0].split("[")[0]
    return names.get(field) or names.get(root, root) + field[len(root) :]


class NotFound(InvalidRequest):
    """There is no such object, or it belongs to another key."""

    @classmethod
    def of(cls, what: str, object_id: str) -> "NotFound":
        return cls(f"there is no {what} {object_id[:80]!r} of this key: list them to see their ids")


class StorageFull(QuireError):
    """The disk has no room for what a request sends."""


class ContextExceeded(InvalidRequest):
    """The prompt alone fills the context, or a text is longer than an encoder takes."""

    @classmethod
    def of_prompt(cls, num_tokens: int, max_model_len: int, at_least: bool = False) -> "ContextExceeded":
        """`at_least`: the prompt was not tokenized, and may have more tokens."""
        return cls(
            "the prompt has {shown} tokens and the context is {max_model_len}, which must hold "
            "at least one more: shorten the prompt, send truncate_prompt_tokens, or raise max_model_len",
            "prompt",
            shown=f"at least {num_tokens}" if at_least else num_tokens,
            num_tokens=num_tokens,
            max_model_len=max_model_len,
        )

    @classmethod
    def of_text(cls, position: int, num_tokens: int | str, max_model_len: int) -> "ContextExceeded":
        """The same for one of the texts of an encoder."""
        return cls(
            "{param}[{position}] has {shown} tokens and this model takes {longest}: shorten it, "
            "send truncate_prompt_tokens (-1: as many as fit), or split it and send the parts",
            "input",
            position=position,
            shown=num_tokens,
            longest=max_model_len,
        )


class AdapterError(InvalidRequest):
    """An adapter that cannot be found, read or served; only requests that name it are refused."""

    def __init__(self, message: str, param: str | None = "model") -> None:
        super().__init__(message, param)

    def again(self) -> "AdapterError":
        """A copy to raise: one object raised repeatedly would keep every traceback that it passed through."""
        return AdapterError(str(self), self.param)


class QueueFull(QuireError):
    """The bounded queue refuses the request now; the same request may be taken later."""


class EngineDead(QuireError):
    """The engine stopped after a fault that was not a request's own."""


class DeviceMemoryFull(QuireError):
    """A step did not fit the device's memory. Nothing of it counts; smaller steps may fit."""

"""Errors that people see. Each message names the value that was wrong and what to do about it."""


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError):
    """A setting that cannot work; raised before anything is loaded."""


class ModelError(QuireError):
    """A model that cannot be served: unknown architecture, unsupported variant, bad hyperparameters."""


class WeightsError(QuireError):
    """Weights that cannot be found, read or trusted."""


class InvalidRequest(QuireError):
    """A request that can never be served as asked; `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextExceeded(InvalidRequest):
    """The prompt alone fills the context, or a text is longer than an encoder takes."""


class AdapterError(InvalidRequest):
    """An adapter that cannot be found, read or served; only requests that name it are refused."""

    def __init__(self, message: str, param: str | None = "model") -> None:
        super().__init__(message, param)

    def again(self) -> "AdapterError":
        """The same to be raised: one object raised again and again would keep everything that it passed through."""
        return AdapterError(str(self), self.param)


class QueueFull(QuireError):
    """The bounded queue refuses the request now; the same request may be taken later."""


class EngineDead(QuireError):
    """The engine stopped after a fault that was not a request's own."""


class DeviceMemoryFull(QuireError):
    """A step did not fit the device's memory. Nothing of it counts; smaller steps may fit."""

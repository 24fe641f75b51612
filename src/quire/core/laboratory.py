"""The only door to `quire_lab`, the laboratory beside the engine: modules by name, or how to install it."""

import importlib
import importlib.util
from types import ModuleType

from quire.core.errors import ConfigError

PACKAGE = "quire_lab"
INSTALL = "pip install 'quire[lab]'"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def load(module: str, what: str) -> ModuleType:
    """`quire_lab.<module>`, imported now. ConfigError if the laboratory is missing; `what` needs it."""
    if not is_installed():
        raise ConfigError(f"{what} is part of the laboratory, which is not installed: {INSTALL}")
    return importlib.import_module(f"{PACKAGE}.{module}")

"""The only way to `quire_lab`, the optional laboratory package: loads its modules by name."""

import importlib
import importlib.util
from types import ModuleType

from quire.core.errors import ConfigError

PACKAGE = "quire_lab"
INSTALL = "pip install 'quire[lab]'"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def load(module: str, what: str) -> ModuleType:
    """`quire_lab.<module>`, imported on call. ConfigError names `what` needs it if the laboratory is not installed."""
    if not is_installed():
        raise ConfigError(f"{what} is part of the laboratory, which is not installed: {INSTALL}")
    return importlib.import_module(f"{PACKAGE}.{module}")

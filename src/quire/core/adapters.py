"""AdapterConfig: which adapters may be served, and with how much memory. What a step must know to load one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ConfigError
from quire.core.ints import Ints

MEMORIES = ("unified", "separate")
MODES = ("batched", "merge")
CONFIG_FILE = "adapter_config.json"  # what makes a folder an adapter


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters, off unless one is named, a folder of them is, or `enable_lora` says so."""

    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()  # "name=folder" each; a mapping from names to folders is taken as well
    lora_dir: str | None = None  # a folder of adapters, found by their folder's name when asked for
    lora_memory: str = "unified"  # unified | separate
    lora_memory_bytes: int | None = None  # of the separate pool; None: a quarter of the pool
    lora_mode: str = "batched"  # batched | merge
    max_loras: int | None = None  # different adapters in one step; None: as many as sequences
    max_lora_rank: int | None = None  # None: 512
    max_cpu_loras: int | None = None  # adapters kept in host memory; None: only their bytes count
    max_cpu_lora_bytes: int | None = None  # None: a quarter of free host memory, at most 16 GiB

    def __post_init__(self) -> None:
        given = self.lora_modules
        if isinstance(given, Mapping):
            object.__setattr__(self, "lora_modules", tuple(f"{name}={path}" for name, path in given.items()))
        elif isinstance(given, list):
            object.__setattr__(self, "lora_modules", tuple(given))
        self.modules()
        for name, value, allowed in (
            ("lora_memory", self.lora_memory, MEMORIES),
            ("lora_mode", self.lora_mode, MODES),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is not known: choose one of {', '.join(allowed)}")
        for name in (
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
            "max_cpu_lora_bytes",
            "lora_memory_bytes",
        ):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, int) or limit < 1):
                raise ConfigError(f"{name}={limit!r} must be a whole number of at least 1")

    @property
    def enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    def modules(self) -> dict[str, str]:
        """Folders by name."""
        found: dict[str, str] = {}
        for module in self.lora_modules:
            name, equals, path = module.partition("=")
            if not equals or not name or not path:
                raise ConfigError(f"lora_modules: {module!r} is not of the form name=folder")
            if name in found:
                raise ConfigError(f"lora_modules names {name!r} twice: give each adapter a name of its own")
            found[name] = path
        return found

    def check_folders(self) -> None:
        """ConfigError if something that is named is not there. For a first start: one after a fault goes on without."""
        if self.lora_dir is not None and not Path(self.lora_dir).is_dir():
            raise ConfigError(f"lora_dir: there is no folder {self.lora_dir}: make it, or check the path")
        for name, path in self.modules().items():
            if not Path(path).is_dir():
                raise ConfigError(f"adapter {name!r}: there is no folder {path}")
            if not Path(path, CONFIG_FILE).exists():
                raise ConfigError(
                    f"adapter {name!r}: {path} has no {CONFIG_FILE}: give a folder that PEFT saved"
                )


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter comes to pages: its host copy's blocks go into these, in order."""

    key: str
    block_ids: Ints  # [blocks] int32

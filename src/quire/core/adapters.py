"""AdapterConfig: which LoRA adapters are served, with how much memory. AdapterLoad: one load in a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ConfigError
from quire.core.request import Ints
from quire.core.settings import at_least, one_of, setting

MEMORIES = ("unified", "separate")
MODES = ("batched", "merge")
CONFIG_FILE = "adapter_config.json"  # what makes a folder an adapter


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters: enabled by `enable_lora`, `lora_modules` or `lora_dir`."""

    enable_lora: bool = setting(False, "serve LoRA adapters; implied by --lora-modules and --lora-dir")
    lora_modules: tuple[str, ...] = setting(
        (), "adapters as NAME=FOLDER, one or more; a request selects one with `model: NAME`"
    )
    lora_dir: str | None = setting(
        None, "folder of adapters, each named by its folder; adapters loaded at run time must lie in it"
    )
    lora_memory: str = setting(
        "unified",
        "unified: adapters use blocks of the KV pool; separate: they use memory of their own, for comparison",
    )
    lora_memory_bytes: int | None = setting(
        None, "size of that separate memory, taken from the pool (default: a quarter of it)"
    )
    lora_mode: str = setting(
        "batched",
        "batched: any mix in one step; merge: one adapter at a time, merged into the weights, for comparison",
    )
    max_loras: int | None = setting(None, "different adapters in one step (default: as many as sequences)")
    max_lora_rank: int | None = setting(None, "refuse adapters of a higher rank (default: 512)")
    max_cpu_loras: int | None = setting(None, "adapters cached in host memory (default: as many as fit)")
    max_cpu_lora_bytes: int | None = setting(
        None, "host memory for adapters (default: a quarter of free memory, at most 16GiB)"
    )

    def __post_init__(self) -> None:
        given = self.lora_modules
        if isinstance(given, Mapping):  # folders by name, as Python callers write them
            given = tuple(f"{name}={path}" for name, path in given.items())
        object.__setattr__(self, "lora_modules", tuple(given))
        self.modules()
        one_of("lora_memory", self.lora_memory, MEMORIES)
        one_of("lora_mode", self.lora_mode, MODES)
        for name in (
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
            "max_cpu_lora_bytes",
            "lora_memory_bytes",
        ):
            at_least(name, getattr(self, name), 1)

    @property
    def enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    def modules(self) -> dict[str, str]:
        """Folders by name."""
        folders: dict[str, str] = {}
        for module in self.lora_modules:
            name, equals, path = module.partition("=")
            if not equals or not name or not path:
                raise ConfigError(f"lora_modules: {module!r} is not of the form name=folder")
            if name in folders:
                raise ConfigError(f"lora_modules names {name!r} twice: give each adapter a name of its own")
            folders[name] = path
        return folders

    def check_folders(self) -> None:
        """ConfigError if a named folder is missing. At first start only: a restart after a fault goes on without it."""
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
    """Copies an adapter from host memory into blocks of the pool, in order."""

    key: str
    block_ids: Ints  # [blocks] int32

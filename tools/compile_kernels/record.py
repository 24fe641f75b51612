"""Records launches instead of running them: what Triton would compile for each, its types, constants and alignments.

Triton itself binds the arguments and calls a hook before it compiles, to ask whether the kernel is compiled already.
The hook stores the question and answers yes. Tensors are torch's `meta` tensors: they have shapes, types and offsets
and no memory, so that a model of eight billion parameters costs nothing. What a launcher chooses by the chip (the
number of programs) changes grids only, and grids are not part of what is compiled.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import quire.kernels
from quire.kernels import registry

WARP = 32


class AbsentDevice:
    """What Triton asks of a driver before it compiles; a launch would ask for more."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to compile: a kernel with one set of types, constants and options."""

    kernel: str  # "attention/_decode_kernel"
    module: str
    function: str
    case: str  # who launched it first
    words: str  # its constants and options, to be told from its siblings
    data: str  # as Triton's `preload` takes it


@dataclass
class Recorder:
    """Distinct launches in the order they came. `case` says who makes them; it may be set at any time."""

    case: str = ""
    found: dict[tuple[str, str], Variant] = field(default_factory=dict)

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function, data = fn.jit_function, compile["specialization_data"]
        name = kernel_name(function)
        if (name, data) not in self.found:
            module, called = function.fn.__module__, function.fn.__qualname__
            words = _words(function, compile)
            self.found[name, data] = Variant(name, module, called, self.case, words, data)
        return True  # "it is there already": Triton neither compiles nor launches

    @property
    def variants(self) -> list[Variant]:
        return list(self.found.values())


@contextmanager
def recording(arch: int) -> Iterator[Recorder]:
    """Inside, launches are noted, and on the device `meta` the engine's layers choose Triton's kernels."""
    recorder = Recorder()
    triton_for_meta = {
        operation: (("triton", "meta"),)
        for operation, names in registry._ALTERNATIVES.items()
        if ("triton", "cuda") in names
    }
    with ExitStack() as stack:
        driver.set_active(AbsentDevice(arch))  # for good: there is none to go back to
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", recorder))
        stack.enter_context(mock.patch.dict(registry._ALTERNATIVES, triton_for_meta))
        stack.enter_context(mock.patch.object(registry, "can_run", lambda name: name == "triton"))
        yield recorder


def resolve(variant: Variant) -> JITFunction:
    """The kernel of a variant, in whichever process."""
    found: Any = importlib.import_module(variant.module)
    for part in variant.function.split("."):
        found = getattr(found, part)
    return found


def kernel_name(function: JITFunction) -> str:
    """The operation's folder and the kernel's own name; a kernel from elsewhere has its module's."""
    module = function.fn.__module__.removeprefix("quire.kernels.")
    return f"{module.split('.')[0]}/{function.fn.__name__}"


def launched_kernels() -> list[str]:
    """Every kernel in the package that no other kernel calls: each must be launched by a case."""
    functions: dict[str, JITFunction] = {}
    for info in pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels."):
        if info.name.rpartition(".")[2].startswith("triton"):
            for value in vars(importlib.import_module(info.name)).values():
                if isinstance(value, JITFunction):
                    functions[f"{value.fn.__module__}.{value.fn.__name__}"] = value
    called = {id(inner) for function in functions.values() for inner in _called(function)}
    return sorted(kernel_name(function) for function in functions.values() if id(function) not in called)


def _called(function: JITFunction) -> Iterator[JITFunction]:
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Name):
            inner = function.__globals__.get(node.id)
            if isinstance(inner, JITFunction):
                yield inner


def _words(function: JITFunction, compile: dict[str, Any]) -> str:
    """ "*bf16 HEAD_DIM=128 …": the first pointer's type, all constants, and what the launch asked for."""
    names = [parameter.name for parameter in function.params]
    types = [kind for kind in compile["signature"].values() if str(kind).startswith("*")]
    constants = [
        f"{names[path[0]]}={value}" for path, value in compile["constants"].items() if value is not None
    ]
    options = [f"{name}={compile[name]}" for name in ("num_warps", "num_stages")]
    return " ".join([*dict.fromkeys(types), *constants, *options])


def record_all(arch: int, cases: list[Callable[[Recorder], None]]) -> list[Variant]:
    """Every distinct launch of these cases."""
    with recording(arch) as recorder:
        for case in cases:
            case(recorder)
    return recorder.variants

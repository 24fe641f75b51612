"""A model's folder from the Hugging Face hub, through the hub's own library and cache."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import WeightsError

_DESCRIPTION = ("*.json", "*.jinja", "vocab.txt")
_COPIES = ("*/*.safetensors", "onnx/*", "openvino/*", "original/*", "consolidated*")  # of the same weights
_ANSWER_SECONDS = 10.0
_PREFIX = re.compile(r"^(https?://)?(www\.)?(hf\.co|huggingface\.co)/")


class HubName(NamedTuple):
    """`org/repo`, or `org/repo:QUANT` for the GGUF file of a repository with that quantization tag."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def hub_name(text: str) -> HubName:
    """Of a name as users write it: `hf.co/` and `huggingface.co/` in front are dropped, the tag is in upper case."""
    bare = _PREFIX.sub("", text)
    repo, _, quant = bare.partition(":")
    if re.fullmatch(r"[\w.-]+", quant):
        return HubName(repo, quant.upper())
    return HubName(bare if bare == text else bare.rstrip("/"))


def gguf_file(name: HubName, *, revision: str | None = None) -> Path:
    """The file with the tag, downloaded if necessary. WeightsError lists the tags that exist if there is none."""
    assert name.quant is not None, "the name has a tag"
    tag = "".join(f"[{c.lower()}{c}]" if c.isalpha() else c for c in name.quant)
    patterns = [f"*[-._/]{tag}.gguf", f"{tag}.gguf", f"*[-._/]{tag}-*-of-*.gguf"]
    folder = snapshot_folder(name.repo, revision=revision, patterns=patterns)
    files = [path for path in tagged_files(folder, name.quant) if "mmproj" not in path.name.lower()]
    if files:
        return files[0]
    tags: list[str] = []
    with suppress(Exception):  # the listing only improves the message
        from huggingface_hub import list_repo_files

        stems = [file.removesuffix(".gguf") for file in list_repo_files(name.repo) if file.endswith(".gguf")]
        tags = sorted({re.split(r"[-./]", stem)[-1] for stem in stems})
    have = f"it has {', '.join(tags)}" if tags else "check the tag, such as Q4_K_M or Q8_0"
    raise WeightsError(f"{name.repo} has no GGUF file with the tag {name.quant!r}: {have}")


def tagged_files(folder: Path, quant: str) -> list[Path]:
    """GGUF files below a folder that have the tag at the end of their name, before the number of a part."""
    ends = re.compile(rf"(^|[-._]){re.escape(quant)}(-\d+-of-\d+)?\.gguf$", re.IGNORECASE)
    return sorted(path for path in folder.rglob("*.gguf") if ends.search(path.name))


def snapshot_folder(
    model: str,
    *,
    revision: str | None = None,
    with_weights: bool = True,
    patterns: Sequence[str] | None = None,
) -> Path:
    """The local folder of a hub model, downloaded if necessary; the hub library shows its own progress bars.

    `patterns` names the files instead of a description and safetensors.
    `HF_HUB_OFFLINE`, `HF_HOME`, `HF_ENDPOINT` and `HF_TOKEN` work as everywhere else. If no hub answers,
    the cached copy is used. Raises WeightsError with one line otherwise.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise WeightsError(
            f"{model!r} is no folder or file here, and fetching it from the hub needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(patterns or (*_DESCRIPTION, *(("*.safetensors",) if with_weights else ()))),
            ignore_patterns=list(_COPIES),
            etag_timeout=_ANSWER_SECONDS,
        )
    except Exception as error:  # the hub's HTTP library is an implementation detail
        raise WeightsError(_reason(error, model, revision)) from error
    return Path(folder)


def _reason(error: Exception, model: str, revision: str | None) -> str:
    """Why there is no such folder, and what to do."""
    from huggingface_hub import constants, errors

    wanted = f"{model}@{revision}" if revision else model
    if isinstance(error, errors.HFValidationError):
        return f"{model!r} is no folder or file here and no hub id (owner/name): check the path"
    if isinstance(error, errors.GatedRepoError):
        return f"{wanted} is gated: accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{wanted} does not exist on the hub, or needs HF_TOKEN: check the spelling"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r} on the hub: check --revision"
    if not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{wanted} could not be fetched from the hub: {_root(error)}"
    missing = f"{wanted} is no folder or file here and not in the hub's cache, and"
    if constants.is_offline_mode():
        return f"{missing} HF_HUB_OFFLINE is set: unset it once to fetch the model, or give a folder"
    return f"{missing} no hub answers ({_root(error)}): check the path or the network"


def _root(error: BaseException) -> str:
    """The first cause, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line[:160]}"

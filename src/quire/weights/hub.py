"""A model's folder from the Hugging Face hub, through the hub's own library and cache."""

from pathlib import Path

from quire.core.errors import WeightsError

_DESCRIPTION = ("*.json", "*.jinja", "vocab.txt")
_COPIES = ("*/*.safetensors", "onnx/*", "openvino/*", "original/*", "consolidated*")  # of the same weights
_ANSWER_SECONDS = 10.0


def snapshot_folder(model: str, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """The local folder of a hub model, downloaded if necessary; the hub library shows its own progress bars.

    `HF_HUB_OFFLINE`, `HF_HOME`, `HF_ENDPOINT` and `HF_TOKEN` work as everywhere else. If no hub answers,
    the cached copy is used. Raises WeightsError with one line otherwise.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise WeightsError(
            f"{model!r} is no folder or file here, and fetching it from the hub needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    wanted = f"{model}@{revision}" if revision else model
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=[*_DESCRIPTION, *(("*.safetensors",) if with_weights else ())],
            ignore_patterns=list(_COPIES),
            etag_timeout=_ANSWER_SECONDS,
        )
    except errors.HFValidationError as error:
        raise WeightsError(
            f"{model!r} is no folder or file here and no hub id (owner/name): check the path"
        ) from error
    except errors.GatedRepoError as error:
        raise WeightsError(f"{wanted} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise WeightsError(
            f"{wanted} does not exist on the hub, or needs HF_TOKEN: check the spelling"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"{model} has no revision {revision!r} on the hub: check --revision") from error
    except errors.LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            raise WeightsError(
                f"{wanted} is no folder or file here and not in the hub's cache, and HF_HUB_OFFLINE is set: "
                "unset it once to fetch the model, or give a folder"
            ) from error
        raise WeightsError(
            f"{wanted} is no folder or file here and not in the hub's cache, and no hub answers "
            f"({_root(error)}): check the path or the network"
        ) from error
    except Exception as error:  # the hub's HTTP library is an implementation detail
        raise WeightsError(f"{wanted} could not be fetched from the hub: {_root(error)}") from error
    return Path(folder)


def _root(error: BaseException) -> str:
    """The first cause, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line[:160]}"

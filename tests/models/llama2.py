"""A folder as Llama-2's, TinyLlama's and many Mistrals' are: SentencePiece tokens and transformers' largest number."""

import json
from pathlib import Path

from tokenizers import Tokenizer as Inner
from tokenizers import pre_tokenizers, processors

from tests.models.checkpoints import llama, save
from tests.text.conftest import sentence_piece_text

NO_LIMIT = 1000000000000000019884624838656  # int(1e30), as transformers writes it
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def tokenizer_text(metaspace: bool = False) -> str:
    """tokenizer.json with a start token: with Llama-2's normalizer, or in the newer form with a pre-tokenizer."""
    inner = Inner.from_str(sentence_piece_text())
    if metaspace:
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    start = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", start)]
    )
    return inner.to_str()


def write_llama2(folder: Path, metaspace: bool = False) -> Path:
    """A tiny random model, so that it says nothing in particular."""
    text = tokenizer_text(metaspace)
    size = Inner.from_str(text).get_vocab_size()
    save(folder, llama(vocab_size=size, max_position_embeddings=256, num_hidden_layers=2))
    (folder / "tokenizer.json").write_text(text)
    config = {
        "model_max_length": NO_LIMIT,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "LlamaTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

"""Writes docs/models.md from the table of architectures.

Usage: PYTHONPATH=src python tools/models_page.py.
"""

from pathlib import Path
from textwrap import fill

from quire.weights.architectures import KNOWN, TEXT_PARTS, Architecture

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
HEAD = """# Models

<!-- Written by tools/models_page.py from src/quire/weights/architectures.py: change these, then run it. -->

Quire serves the architectures of these tables, from a folder or hub id with safetensors or from a `.gguf` file. The
name in `architectures` of the model's config.json decides. `quire models --known` prints the tables, `--json` for
programs.
"""
PAIRS = """
The prompt is the encoder's input, as the model's tokenizer makes it (`</s>` at its end included). The answer is the
decoder's. It begins with `decoder_start_token_id` and, where generation_config.json has one, `forced_bos_token_id`.

**What works.** Continuous batching, `n`, beams, structured output, penalties, logprobs of answers, preemption by
recomputation and by swap, int8 and the other number formats, and int8 KV work as for decoders.

- **Chat.** These models have no chat template. Without `--chat-template` the prompt is the messages' texts, one
  after the other.
- **Penalties.** `repetition_penalty` counts the decoder's tokens, not the prompt's, as in transformers.
- **Speculation.** `{"method": "ngram"}` looks for the last tokens in the answer and in the encoder's input, so
  answers that copy from the prompt (summaries, rewrites) are drafted from it. A draft model has an encoder of its
  own, which reads each prompt once (t5-small for t5-base). Drafts are chains or trees; trees of T5 on a GPU need
  `--deterministic`.
- **Adapters** add to every matrix of both halves. The encoder and K and V of cross-attention are computed once with
  the request's adapter, and requests of another adapter do not share them. Rows of several adapters and of none run
  in one batch, drafts included.

**Limits.**

- `--max-model-len` bounds the prompt, rounded up to whole blocks, and the answer together. T5's own bound is four
  times `n_positions`, since its distances have no end; BART has `max_position_embeddings` for each of the two.
- An encoder takes its input in one step, so `--max-num-batched-tokens` is at least as long by default, and
  `--max-prompt-chunk` and `--itl-goal` do not cut a prompt.
- Refused, each in one line: `echo`, `prompt_logprobs`, `--pin-prefix`, `--role`, `--cpu-offload-gb`,
  `--weights-memory-gb`; adapters on simulated devices; GGUF files of an encoder alone (`t5encoder`) and of UMT5.

**How it works.**

- **Pages.** K and V of cross-attention are computed once, when the request is admitted, and lie in the first blocks
  of its table. The decoder's own follow in blocks of their own. All samples and beams of a request share the first
  kind, and so do requests with an equal prompt (prefix caching). A prompt that differs in one token shares nothing,
  since what an encoder makes of a token depends on all others. With `--kv-offload-gb` evicted prompts come back
  from host memory or disk, whole or not at all.
- **Kernels.** Scores by distance (T5) are computed by the attention kernels over pages on CPU and GPU. On a GPU the
  encoder runs without a CUDA graph, its attention by torch's fused kernel; decodes run in graphs.
- **Number format.** Take bfloat16 on a GPU: transformers keeps the last matrix of T5's feed-forward in float32 when
  the rest is float16, and Quire does not.
- **GGUF** files of T5 and mT5 do not name the activation of the feed-forward. A gate has GELU, a plain matrix ReLU,
  as in llama.cpp.

**Measured.** On an H200 the flan-t5-xl shape (bfloat16, random weights) answers 64 requests of 512 → 64 tokens in
0.50 s, 14 times as fast as one by one; the floor by the data sheet is 0.24 s
([h200_encoder_decoder.json](../benchmarks/results/h200_encoder_decoder.json), 2026-11-16, the best of three
rounds).
"""
NOTES = """
## What to know

- **Adapters**: every model that generates takes LoRA at each of its matrices but experts, embeddings and output
  head included.
- **Number formats**: every architecture takes each format that its device has, see [Quantization](quantization.md);
  [mixtures](mixtures.md) on a GPU take 16 bits only.
- **Unknown architectures** are refused by name, with the nearest one that is listed. Llama 3.2 Vision is among
  them, since its text layers read images through cross-attention.
- **Damaged models**: a tensor that is missing, has no place in the model that config.json describes, or has another
  shape than it asks for, is named.

### Sliding windows

Attention of layers with a sliding window reads the window alone. KV blocks behind the window are freed: all of them
where every layer has a window, otherwise those of the layers that have one, if at least half do. With a draft model
blocks are kept until the sequence ends. `quire plan` counts the smaller memory.

On an H200 the Gemma-3-4B shape reaches 23,297 output tokens/s on ShareGPT's lengths, 72 % of its roofline
([h200_gemma.json](../benchmarks/results/h200_gemma.json), 2026-11-16, one run).

### Single architectures

- **gpt-oss**: experts in MXFP4 are decoded when they are loaded, and kept in the format of `--quantization` (int8
  on a CPU by default, 16 bits on a GPU), so a checkpoint takes more memory than its file. Token trees on a GPU need
  `--deterministic`.
- **longrope** (Phi-3 and Phi-4-mini with long contexts) has one set of frequencies for short and one for long
  sequences. Keys are rotated once, so the set is chosen at start, as in llama.cpp and vLLM: the short one if
  `--max-model-len` is at most `original_max_position_embeddings`, otherwise the long one.
- **Soft caps and ALiBi** (Gemma 2, BLOOM, Falcon-RW) are computed by the kernels over pages on CPU and GPU. Long
  prompts of these models do not use cuDNN's faster attention. Token trees (`tree_width` above 1) of models with
  ALiBi need a CPU.

### GGUF

- **Left out by llama.cpp's converter**: ALiBi of Falcon, and a base of the rotation other than 10,000 of GPT-NeoX.
  OPT and BART are not architectures of GGUF.
- **gpt-oss** files have experts in MXFP4 or any other type.
- **OLMo 3** is `olmo2` with windows; yarn, for its layers without a window, is the file's.
- **Encoders** (`bert`, which RoBERTa, XLM-R and DistilBERT are too, and `modern-bert`) give vectors. Where the file
  has a classifier's head, they also give classes and scores of pairs (`/v1/classify`, `/score`, `/v1/rerank`).
  Pooling is the file's, and vectors are normalised. Two things that files do not say: a WordPiece vocabulary counts
  as cased if one of its words has capitals, and a head of ModernBERT takes the mean of all tokens. Classifiers of
  BERT itself are refused, since conversion leaves out their pooler. Masked words are not in these files.
"""


def page() -> str:
    """The whole page."""
    generating = {name: known for name, known in KNOWN.items() if known.task == "generate"}
    decoders = {name: known for name, known in generating.items() if not known.encoder_decoder}
    pairs = {name: known for name, known in generating.items() if known.encoder_decoder}
    pair_rows = "\n".join(_row(name, known, windows=False) for name, known in pairs.items())
    encoders = [f"`{name}`" for name, known in KNOWN.items() if known.task == "embed"]
    listed = fill(f"For `/v1/embeddings` and `quire.Embedder`: {', '.join(encoders)}.", 116)
    rows = "\n".join(_row(name, known) for name, known in decoders.items())
    texts = "\n".join(f"| `{name}` | `{text}` |" for name, (_, text) in TEXT_PARTS.items())
    return f"""{HEAD}
## Decoders

| architecture | models | GGUF | sliding windows |
| --- | --- | --- | --- |
{rows}

## Encoder-decoder models

| architecture | models | GGUF |
| --- | --- | --- |
{pair_rows}
{PAIRS}
## Text parts

Of a model that also reads images, only the text part is served; its other tensors are left out.

| checkpoint | served as |
| --- | --- |
{texts}

## Encoders

{listed}
{NOTES}"""


def _row(name: str, known: Architecture, *, windows: bool = True) -> str:
    gguf = f"`{known.gguf}`" if known.gguf else "no"
    row = f"| `{name}` | {known.models} | {gguf} |"
    return f"{row} {'yes' if known.windows else 'no'} |" if windows else row


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

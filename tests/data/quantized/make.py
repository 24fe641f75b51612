"""Makes the tiny quantized checkpoints of this folder with the packages that define their formats.

In an environment of its own, since llmcompressor pins an older hub library:
  pip install torch==2.13.0 llmcompressor==0.14.0.1 bitsandbytes==0.50.2 auto-round==0.15.1 accelerate
  HF_HUB_OFFLINE=1 python tests/data/quantized/make.py [NAME …]
Each folder gets config.json, model.safetensors and expected.safetensors: token ids, and the logits of a float32 model
with the weights as the package itself dequantizes them.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, INNER = 128, 128, 384
TOKENS = torch.tensor([[3, 17, 99, 4, 4, 61, 120, 33, 8, 77, 1, 50]])


def plain_model(dtype=torch.float32, hidden=HIDDEN):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


HERE = Path(__file__).parent
PLAIN = Path(tempfile.mkdtemp()) / "plain"
WORDS = "the and of to in is that for it on as with be at by this are or an from we all not can have was one two new"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def tokenizer():
    """One token per printable character, and a few words to fill the vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127)), "\n", *WORDS.split()][:VOCAB]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    fast.chat_template = TEMPLATE
    return fast


def saved_plain(dtype):
    plain_model(dtype).save_pretrained(PLAIN)
    tokenizer().save_pretrained(PLAIN)
    return transformers.AutoModelForCausalLM.from_pretrained(PLAIN, dtype=dtype)


def logits_of(model):
    with torch.inference_mode():
        return model(TOKENS).logits[0].float().contiguous()


def finish(folder, logits):
    save_file({"tokens": TOKENS[0], "logits": logits}, folder / "expected.safetensors")
    kept = {"config.json", "model.safetensors", "expected.safetensors"}
    if folder.name == "awq":  # a server's test has it
        kept |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for extra in folder.iterdir():
        if extra.name not in kept:
            shutil.rmtree(extra) if extra.is_dir() else extra.unlink()


def dequantized(floats):
    """A plain model with these weights in float32: what the package's own dequantized weights compute."""
    model = plain_model()
    missing = model.load_state_dict({name: tensor.float() for name, tensor in floats.items()}, strict=False)
    assert not missing.unexpected_keys
    assert not missing.missing_keys
    return model


def compressed(folder, scheme, **kwargs):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    model = saved_plain(torch.bfloat16)
    if kwargs:
        from datasets import Dataset

        ids = torch.randint(0, VOCAB, (16, 32), generator=torch.Generator().manual_seed(3)).tolist()
        recipe = GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], **kwargs)
        data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 32] * 16})
        oneshot(
            model=model,
            recipe=recipe,
            dataset=data,
            num_calibration_samples=16,
            max_seq_length=32,
            tokenizer=str(PLAIN),
        )
    else:
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    model.save_pretrained(folder, save_compressed=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
    )
    weights = {
        name: tensor for name, tensor in loaded.state_dict().items() if name.endswith(("weight", "bias"))
    }
    finish(folder, logits_of(dequantized(weights)))


def bnb(folder, **options):
    from bitsandbytes import functional as F

    saved_plain(torch.float16)
    config = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        PLAIN, quantization_config=config, dtype=torch.float16, device_map="cpu"
    )
    model.save_pretrained(folder)
    weights = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        if type(module).__name__ == "Linear4bit":
            state = weight.quant_state
            state.dtype = torch.float32
            weights[name + ".weight"] = F.dequantize_4bit(weight.data, state).float().view(state.shape)
        elif type(module).__name__ == "Linear8bitLt":
            values = weight.data if weight.CB is None else weight.CB
            weights[name + ".weight"] = F.int8_vectorwise_dequant(values, weight.SCB)
        else:
            weights[name + ".weight"] = weight.detach().float()
    finish(folder, logits_of(dequantized(weights)))


def rounded(folder, fmt, **options):
    from auto_round import AutoRound

    model = saved_plain(torch.float16)
    made = AutoRound(
        model,
        transformers.AutoTokenizer.from_pretrained(PLAIN),
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        **options,
    )
    made.quantize_and_save(str(folder), format=fmt)
    inner = next(path.parent for path in folder.rglob("config.json"))
    if inner != folder:
        for path in inner.iterdir():
            shutil.move(path, folder / path.name)
    finish(folder, logits_of(dequantized(word_weights(folder, fmt, options["group_size"]))))


def word_weights(folder, fmt, group):
    """The weights of an AWQ or GPTQ file as auto-round itself dequantizes them, in float32."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    stored = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in stored.items() if name.endswith(".weight")}
    for name in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
        qweight, qzeros, scales = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        if fmt == "auto_awq":
            weight = dequantize_gemm(qweight, qzeros, scales.float(), 4, group).t()
        else:
            module = QuantLinear(4, group, qweight.shape[0] * 8, qweight.shape[1], bias=False)
            module.qweight, module.qzeros, module.scales = qweight, qzeros, scales.float()
            module.dequant_dtype = torch.int32
            weight = module(torch.eye(qweight.shape[0] * 8)).t()
        weights[f"{name}.weight"] = weight.contiguous()
    return weights


MAKERS = {
    "ct-w4a16": lambda f: compressed(f, "W4A16"),
    "ct-w4a16-asym": lambda f: compressed(f, "W4A16_ASYM"),
    "ct-w8a8": lambda f: compressed(f, "W8A8"),
    "ct-fp8-dynamic": lambda f: compressed(f, "FP8_DYNAMIC"),
    "ct-fp8-block": lambda f: compressed(f, "FP8_BLOCK"),
    "ct-w4a16-gptq": lambda f: compressed(f, "W4A16", actorder="weight"),
    "bnb-nf4-nested": lambda f: bnb(
        f, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bnb-nf4": lambda f: bnb(f, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-fp4": lambda f: bnb(f, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": lambda f: bnb(f, load_in_8bit=True),
    "awq": lambda f: rounded(f, "auto_awq", bits=4, group_size=64, sym=False),
    "gptq": lambda f: rounded(f, "auto_gptq", bits=4, group_size=32, sym=True),
    "gptq-asym": lambda f: rounded(f, "auto_gptq", bits=4, group_size=32, sym=False),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        MAKERS[name](HERE / name)
        print(name, sum(path.stat().st_size for path in (HERE / name).iterdir()), "bytes")

"""Loss and gradients of a packed batch are those of transformers with PEFT on the same sequences, one by one."""

import warnings
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError, ModelError
from quire.models.registry import describe
from quire.train.frozen import FrozenFormat, store_nf4
from quire.train.lora import LoraParameters
from quire.train.model import IGNORED, Example, TrainedModel
from quire.train.optimizer import AdamW
from quire.train.settings import ALL
from quire.weights.source import open_source
from tests.models.checkpoints import VARIANTS, save

peft = pytest.importorskip("peft", reason="PEFT is what gradients are compared with")

CPU = torch.device("cpu")
NAMED = ("llama", "llama-tied", "qwen2", "qwen3", "opt", "gpt2")
OTHERS = ("llama-with-biases", "mistral-window", "phi3", "granite", "olmo2", "olmo3", "smollm3", "gemma", "gemma2",
          "gemma3", "starcoder2", "neox", "falcon-7b", "bloom", "gpt2-unscaled-untied")  # fmt: skip
IDS = ([1, 5, 9, 13, 17, 21, 30], [40, 3, 8], [7] * 2)
EXAMPLES = [
    Example(
        tuple(ids),
        (*[IGNORED if at < 1 else ids[at + 1] for at in range(len(ids) - 1)], IGNORED),
    )
    for ids in IDS
]


def trained(folder: Path, store=lambda _: None, recompute: bool = False, **lora) -> TrainedModel:
    source = open_source(folder)
    model = TrainedModel(describe(source.config), FrozenFormat(torch.float32, CPU, store), CPU, 64)
    model.load(source)
    parameters = LoraParameters(rank=4, alpha=8.0, **lora)
    model.adapt(parameters, [ALL], recompute=recompute)
    return model


def give(model: TrainedModel, tensors) -> None:
    """The matrices of PEFT's adapter, by its names."""
    own = model.parameters.tensors()
    assert own.keys() == {name.replace(".default", "") for name in tensors}
    for name, tensor in tensors.items():
        own[name.replace(".default", "")].copy_(tensor)


def theirs(folder: Path, variant: str):
    base = save(folder, VARIANTS[variant]())
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(
            base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, init_lora_weights=False)
        ).eval()


@pytest.mark.parametrize("variant", [*NAMED, *OTHERS])
def test_loss_and_gradients_are_those_of_peft(variant, tmp_path):
    adapted = theirs(tmp_path, variant)
    model = trained(tmp_path, recompute=variant in ("qwen3", "gpt2", "gemma2"))
    named = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    give(model, {name: p.detach() for name, p in named.items()})
    expected = torch.zeros(())
    for example in EXAMPLES:
        logits = adapted(input_ids=torch.tensor([example.token_ids])).logits[0].float()
        expected = expected + torch.nn.functional.cross_entropy(
            logits, torch.tensor(example.labels), ignore_index=IGNORED, reduction="sum"
        )
    expected.backward()
    model.parameters.make_grad()
    loss = model.loss(EXAMPLES)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for pair in model.parameters.pairs.values():
        for which, matrix in (("A", pair.a), ("B", pair.b)):
            name = f"base_model.model.{pair.site.name}.lora_{which}.default.weight"
            scale = named[name].grad.abs().max()
            torch.testing.assert_close(
                matrix.grad, named[name].grad, rtol=1e-4, atol=float(1e-4 * scale + 1e-6)
            )


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "opt", "gpt2"])
def test_a_run_has_the_losses_of_one_with_peft(variant, tmp_path):
    """200 steps of AdamW over the same batches: rounding adds up, and the curves stay within 1 %."""
    adapted = theirs(tmp_path, variant)
    model = trained(tmp_path)
    own = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    give(model, {name: p.detach() for name, p in own.items()})
    optimizer, mine = (
        torch.optim.AdamW(own.values(), lr=1e-3, weight_decay=0.0),
        AdamW(len(model.parameters.flat), CPU),
    )
    grad, drawn = (
        model.parameters.make_grad(),
        torch.randint(97, (200, 9), generator=torch.Generator().manual_seed(5)),
    )
    for step, ids in enumerate(drawn.tolist()):
        example = Example(tuple(ids[:-1]), tuple(ids[1:]))
        loss, logits = model.loss([example]), adapted(input_ids=torch.tensor([ids[:-1]])).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
        tolerance = 1e-3 if step < 40 else 1e-2
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        for one in (loss, expected):
            one.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine.step(model.parameters.flat, grad, 1e-3)
        grad.zero_()


def test_sequences_of_a_packed_batch_do_not_see_each_other(tmp_path):
    theirs(tmp_path, "llama")
    model = trained(tmp_path)
    together = model.losses(EXAMPLES)
    alone = torch.cat([model.losses([example]) for example in EXAMPLES])
    torch.testing.assert_close(together, alone)


def test_qlora_differs_from_lora_by_the_rounding_of_the_base_only(tmp_path):
    config = VARIANTS["llama"]()
    config.hidden_size = config.intermediate_size = 64 * 6
    save(tmp_path, config)
    rounded = trained(tmp_path, store_nf4)
    assert sum(m.kept_bytes for m in rounded.number_format.matrices) < sum(
        m.num_rows * m.num_columns for m in rounded.number_format.matrices
    )  # less than a byte a weight, the head in float32 included
    plain = trained(tmp_path)
    for model in (rounded, plain):
        torch.nn.init.normal_(model.parameters.flat, std=0.05, generator=torch.Generator().manual_seed(1))
    for one, other in zip(rounded.number_format.matrices, plain.number_format.matrices, strict=True):
        other.adopt(one.state())  # the same rounded numbers
    grads = [model.parameters.make_grad() for model in (rounded, plain)]
    losses = [model.loss(EXAMPLES) for model in (rounded, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_a_target_that_names_no_layer_is_refused(tmp_path):
    save(tmp_path, VARIANTS["llama"]())
    source = open_source(tmp_path)
    model = TrainedModel(describe(source.config), FrozenFormat(torch.float32, CPU, lambda _: None), CPU, 64)
    with pytest.raises(
        ConfigError, match="'w_proj' names no linear layer of this model: choose of down_proj"
    ):
        model.adapt(LoraParameters(4, 8.0), ["w_proj"])


@pytest.mark.parametrize("variant", ["mixtral", "opt-350m"])
def test_a_model_without_a_training_forward_is_refused(variant, tmp_path):
    save(tmp_path, VARIANTS[variant]())
    with pytest.raises(ModelError, match="cannot be trained"):
        TrainedModel(
            describe(open_source(tmp_path).config), FrozenFormat(torch.float32, CPU, lambda _: None), CPU, 64
        )

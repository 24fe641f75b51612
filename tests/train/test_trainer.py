"""A run learns, is deterministic, goes on bit for bit after an interruption, and stops with a reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, TrainingError
from quire.train import finetune as training_jobs
from quire.train import trainer as training
from quire.train.finetune import FinetuneJob, finetune, prepare
from quire.train.run_files import Checkpoints, RunFiles, RunLog
from quire.train.settings import FINISHED, STOPPED, TrainSettings

SETTINGS = TrainSettings(
    rank=4, epochs=3, batch_size=4, batch_tokens=64, learning_rate=0.01, checkpoint_steps=4
)


def job(tiny: Path, data: Path, output: Path, **changes) -> FinetuneJob:
    return FinetuneJob(
        data, output, str(tiny), settings=replace(SETTINGS, **changes), device="cpu", num_threads=1
    )


def losses(folder: Path) -> list[float]:
    return [
        event["loss"]
        for event in RunLog(folder / "training" / "events.jsonl").read()
        if event["type"] == "metrics"
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def finished(tiny, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "mine"
    reports = []
    assert finetune(job(tiny, data, folder), reports.append) == FINISHED
    assert [report.step for report in reports] == list(range(1, 16))
    assert [report.step for report in reports if report.validation_loss is not None] == [5, 10, 15]
    return folder


def test_the_loss_falls_and_checkpoints_stay(finished):
    curve = losses(finished)
    assert curve[-1] < 0.8 * curve[0]
    assert Checkpoints(finished / "training" / "checkpoints", 3).steps() == [8, 12, 15]


def test_the_adapter_is_one_that_peft_loads_and_serving_gives_its_tokens(finished, tiny):
    peft = pytest.importorskip("peft", reason="PEFT must load the folder")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, finished).merge_and_unload()
    prompt = [5, 20, 33, 47]
    theirs = merged.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    llm = LLM(
        str(tiny), dtype="float32", quantization="none", lora_modules=(f"mine={finished}",), use_tqdm=False
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (mine,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False, adapter="mine")
    assert list(mine.outputs[0].token_ids) == theirs[0, len(prompt) :].tolist()
    (plain,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    assert mine.outputs[0].token_ids != plain.outputs[0].token_ids


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw8bit", "dropout": 0.1, "recompute": True}])
def test_an_interrupted_run_goes_on_bit_for_bit(changes, tiny, data, finished, tmp_path):
    whole = finished
    if changes:
        whole = tmp_path / "whole"
        assert finetune(job(tiny, data, whole, **changes)) == FINISHED
    steps = []
    assert (
        finetune(job(tiny, data, tmp_path / "cut", **changes), steps.append, stop=lambda: len(steps) == 6)
        == STOPPED
    )
    assert not (tmp_path / "cut" / "adapter_model.safetensors").exists()
    assert finetune(job(tiny, data, tmp_path / "cut", **changes), steps.append) == FINISHED
    assert [report.step for report in steps] == list(range(1, 16))  # none is done twice
    assert losses(tmp_path / "cut") == losses(whole)
    actual, expected = weights(tmp_path / "cut"), weights(whole)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(tiny, data, finished, tmp_path):
    class Killed(Exception):
        pass

    def die(report):
        if report.step == 7:
            raise Killed

    with pytest.raises(Killed):
        finetune(job(tiny, data, tmp_path / "cut"), die)
    steps = []
    assert finetune(job(tiny, data, tmp_path / "cut"), steps.append) == FINISHED
    assert steps[0].step == 5
    assert losses(tmp_path / "cut") == losses(finished)


def test_checkpointed_activations_change_nothing(tiny, data, finished, tmp_path):
    assert finetune(job(tiny, data, tmp_path / "other", recompute=True, batch_tokens=1000)) == FINISHED
    assert losses(tmp_path / "other") == pytest.approx(losses(finished), rel=1e-3)


def test_qlora_ends_near_lora(tiny, data, tmp_path, tmp_path_factory):
    from tests.train.conftest import make_model

    wide = make_model(
        tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128, num_attention_heads=4,
        initializer_range=0.05,
    )  # fmt: skip
    ends = []
    for qlora in (False, True):
        folder = tmp_path / str(qlora)
        assert finetune(job(wide, data, folder, qlora=qlora, epochs=4)) == FINISHED
        ends.append(sum(losses(folder)[-5:]) / 5)
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


def test_a_base_in_4_bits_trains_over_its_own_blocks_and_not_as_plain_lora(data, tmp_path):
    changes = {"epochs": 1, "batch_size": 20, "validation_split": 0.0, "batch_tokens": 1000}
    plain = replace(job(Path(), data, tmp_path / "plain", qlora=False, **changes), model=None)
    with pytest.raises(
        ConfigError,
        match=r"has 5 bits a weight, and plain LoRA needs 8 or more: use --qlora .* full-precision",
    ):
        finetune(plain)
    assert not plain.output.exists()
    auto = replace(plain, output=tmp_path / "auto", settings=replace(plain.settings, qlora=None))
    shown = []
    assert finetune(auto, on_line=shown.append) == FINISHED
    assert "frozen weights in the checkpoint's gguf-q4_1" in shown[1]
    assert "QLoRA is on: SmolLM2-135M-Instruct has 5 bits a weight" in shown[2]
    said = RunFiles(auto.output).log.read()[0]
    assert (said["type"], said["level"], f"qlora     {said['message']}") == ("message", "info", shown[2])
    stage_3 = replace(auto, output=tmp_path / "zero", zero_stage=3, world=2)
    with pytest.raises(ConfigError, match=r"ZeRO stage 3 .* is in 4 bits .*choose --zero-stage 2"):
        prepare(stage_3, torch.device("cpu"))


def test_a_loss_that_is_no_number_stops_with_the_last_good_checkpoint(tiny, data, tmp_path, monkeypatch):
    own = training.Trainer._backward

    def broken(self, items, weight):
        loss, right = own(self, items, weight)
        return (loss * float("nan") if self.step == 6 else loss), right

    monkeypatch.setattr(training.Trainer, "_backward", broken)
    with pytest.raises(
        TrainingError, match=r"the loss is nan .* in step 7 of 15: lower --learning-rate.*step-000004$"
    ):
        finetune(job(tiny, data, tmp_path / "mine"))
    assert all(
        t.isfinite().all()
        for t in weights(tmp_path / "mine" / "training" / "checkpoints" / "step-000004").values()
    )


def test_a_full_disk_stops_with_the_last_good_checkpoint(tiny, data, tmp_path, monkeypatch):
    written = []
    own = training.save_adapter

    def full(folder, *rest):
        written.append(folder)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        own(folder, *rest)

    monkeypatch.setattr(training, "save_adapter", full)
    with pytest.raises(TrainingError, match=r"step 8 cannot be written .*No space left.*step-000004$"):
        finetune(job(tiny, data, tmp_path / "mine"))
    kept = [path.name for path in (tmp_path / "mine" / "training" / "checkpoints").iterdir()]
    assert kept == ["step-000004"]


def test_a_full_disk_at_the_log_stops_with_the_last_good_checkpoint(tiny, data, tmp_path, monkeypatch):
    own = RunLog.add

    def full(self, event):
        if event.get("step", 0) > 5:
            raise OSError(28, "No space left on device")
        own(self, event)

    monkeypatch.setattr(RunLog, "add", full)
    with pytest.raises(TrainingError, match=r"the log cannot be written .*No space left.*step-000004$"):
        finetune(job(tiny, data, tmp_path / "mine"))


def test_a_full_disk_at_the_adapter_leaves_no_half_of_it(tiny, data, finished, tmp_path, monkeypatch):
    own = training.save_file

    def full(tensors, path):
        if path.parent == tmp_path / "mine":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        own(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_file", full)
        with pytest.raises(TrainingError, match=r"the adapter cannot be written .*No space.*step-000015$"):
            finetune(job(tiny, data, tmp_path / "mine"))
    assert finetune(job(tiny, data, tmp_path / "mine")) == FINISHED
    actual, expected = weights(tmp_path / "mine"), weights(finished)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_folder_of_another_run_is_refused(tiny, data, finished, tmp_path):
    with pytest.raises(ConfigError, match="holds a finished adapter"):
        finetune(job(tiny, data, finished))
    steps = []
    finetune(job(tiny, data, tmp_path / "mine"), steps.append, stop=lambda: len(steps) == 2)
    with pytest.raises(ConfigError, match="holds a run with other settings or data"):
        finetune(job(tiny, data, tmp_path / "mine", seed=1))
    again = replace(job(tiny, data, tmp_path / "mine", seed=1), overwrite=True)
    assert finetune(again) == FINISHED


def test_dpo_learns_to_prefer(tiny, tmp_path):
    def line(letter: str) -> dict:
        return {
            "input": {"messages": [{"role": "user", "content": letter}]},
            "preferred_output": [{"role": "assistant", "content": "yes"}],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }

    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line(letter)) + "\n" for letter in "abcdefghijklmnop"))
    steps = []
    changes = {"method": "dpo", "validation_split": 0.0, "epochs": 4}
    assert finetune(job(tiny, path, tmp_path / "mine", **changes), steps.append) == FINISHED
    assert steps[0].loss == pytest.approx(0.6931, abs=1e-3)  # B is zero: both models agree
    assert steps[-1].accuracy == 1.0
    assert steps[-1].loss < 0.5


def test_settings_that_cannot_work_are_refused():
    for name, value in (
        ("rank", 0),
        ("epochs", 51),
        ("dropout", 1.0),
        ("method", "ppo"),
        ("learning_rate", -1.0),
    ):
        with pytest.raises(ConfigError, match=name):
            TrainSettings.of(**{name: value})
    with pytest.raises(ConfigError, match="'lr' is no setting"):
        TrainSettings.of(lr=1)
    auto = TrainSettings.of(epochs="auto", batch_size="auto").resolved(500, 135_000_000, on_gpu=False)
    assert (auto.batch_size, auto.epochs, auto.learning_rate, auto.alpha) == (16, 5, 5e-4, 32.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_with_what_to_give(tiny, data, tmp_path):
    with pytest.raises(ConfigError, match="device='cuda' was asked for, but PyTorch sees no GPU here"):
        finetune(replace(job(tiny, data, tmp_path / "out"), device="cuda"))


@pytest.mark.parametrize(("given", "changes"), [("cuda:1", {}), ("cuda", {"rank": 1, "world": 2})])
def test_kernels_are_launched_on_the_gpu_of_the_run(given, changes, tiny, data, tmp_path, monkeypatch):
    class Done(Exception):
        pass

    def done(*_):
        raise Done

    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(training_jobs, "start_ranks", lambda *_: None)
    monkeypatch.setattr(training_jobs, "prepare", done)
    with pytest.raises(Done):
        finetune(replace(job(tiny, data, tmp_path / "out"), device=given, **changes))
    assert chosen == [torch.device("cuda:1")]


def test_more_ranks_than_gpus_are_refused(tiny, data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--ranks 2 need a GPU each, and PyTorch sees 1: lower it"):
        finetune(replace(job(tiny, data, tmp_path / "out"), device="cuda", world=2))

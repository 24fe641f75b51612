"""Adapters over HTTP: chosen by `model`, listed under their base, loaded and unloaded by operators."""

import json
import os
import signal
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import save_file

from tests.server.running import ADMIN_KEY, MODEL

OPERATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}


def write_adapter(folder: Path, seed: int, **changes: object) -> Path:
    """A strong random adapter for the built-in model's q projections."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn(4, 576, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(576, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def adapted(start_server, tmp_path):
    one = write_adapter(tmp_path / "apart" / "one", 1)
    for seed, name in enumerate(("lazy", "spare"), start=2):
        write_adapter(tmp_path / "many" / name, seed)
    write_adapter(tmp_path / "many" / "dora", 9, use_dora=True)
    return start_server("--lora-modules", f"one={one}", "--lora-dir", str(tmp_path / "many"))


def _answer(server, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["text"]


def test_adapters_over_http(adapted):
    _choosing(adapted)
    _loading(adapted)
    _refusing(adapted)
    _surviving(adapted)


def _choosing(server):
    listed = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    assert {MODEL, "one", "lazy", "spare"} <= set(listed)
    assert listed["one"]["parent"] == MODEL
    assert "parent" not in listed[MODEL]
    assert server.get("/v1/models/lazy").json()["parent"] == MODEL
    answers = {name: _answer(server, name) for name in (MODEL, "one", "lazy")}
    assert len(set(answers.values())) == 3
    assert {name: _answer(server, name) for name in answers} == answers
    assert server.chat_error(404, model="nobody")["code"] == "model_not_found"
    server.wait_metric(2, "lora_loads_total")
    assert server.metric("pool_blocks_lora") > 0
    server.wait_metric(0.5, "lora_hit_rate")
    assert "quire_lora_requests_info{" in server.get("/metrics").text


def _loading(server):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert server.error(load, 401, json={"lora_name": "new", "lora_path": "spare"})
    for path in ("spare", "lazy"):  # again, under the same name
        response = server.post(load, json={"lora_name": "new", "lora_path": path}, headers=OPERATOR)
        assert response.status_code == 200, response.text
    assert _answer(server, "new") == _answer(server, "lazy")
    assert server.post(unload, json={"lora_name": "new"}, headers=OPERATOR).status_code == 200
    assert server.chat_error(404, model="new")["param"] == "model"
    assert server.error(unload, 400, json={"lora_name": "new"}, headers=OPERATOR)["param"] == "lora_name"
    _deleting(server)


def _deleting(server):
    body = {"lora_name": "org/new", "lora_path": "spare"}
    assert server.post("/v1/load_lora_adapter", json=body, headers=OPERATOR).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        server.client().models.delete("org/new")
    operator = server.client(api_key=ADMIN_KEY)
    assert operator.models.delete("org/new").deleted
    for name, kind in (("org/new", openai.NotFoundError), (MODEL, openai.BadRequestError)):
        with pytest.raises(kind) as refused:
            operator.models.delete(name)
        assert refused.value.param == "model"
    assert _answer(server, MODEL)


def _refusing(server):
    load = "/v1/load_lora_adapter"
    for path, reason in (
        ("../apart/one", "outside"),
        ("/etc", "outside"),
        ("nothing", "no folder"),
        ("dora", "DoRA"),
    ):
        error = server.error(load, 400, json={"lora_name": "bad", "lora_path": path}, headers=OPERATOR)
        assert reason in error["message"]
    taken = server.error(load, 400, json={"lora_name": MODEL, "lora_path": "spare"}, headers=OPERATOR)
    assert "model itself" in taken["message"]
    error = server.chat_error(400, model="dora")
    assert "DoRA" in error["message"]
    assert _answer(server, "one")
    server.wait_idle()


def _surviving(server):
    """A new engine knows what operators loaded into the one before."""
    response = server.post(
        "/v1/load_lora_adapter", json={"lora_name": "kept", "lora_path": "lazy"}, headers=OPERATOR
    )
    assert response.status_code == 200
    before = _answer(server, "kept")
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_metric(1, "engine_restarts_total")
    server.wait_status("/ready", 200)
    assert _answer(server, "kept") == before

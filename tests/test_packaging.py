"""Dockerfile and deploy/kubernetes.yaml: what they name exists here, and their numbers fit together."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import quire
from quire.cli import serve
from quire.cli.parser import Parser
from quire.core.config import EngineConfig
from quire.server.app import create_app
from quire.server.service import Service
from quire.server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTIONS = re.compile("FROM|ARG|RUN|USER|WORKDIR|COPY|ENV|VOLUME|EXPOSE|HEALTHCHECK|ENTRYPOINT")


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """(instruction, its arguments), with lines joined and comments out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in documents}


@pytest.fixture(scope="module")
def paths() -> set[str]:
    app = create_app(Service.of(EngineConfig(), ServerSettings()))
    return set(app.openapi()["paths"])


def settings(words: list[str]) -> ServerSettings:
    parser = Parser(prog="quire serve")
    serve.add_arguments(parser)
    return serve.server_settings(parser.parse(words))


def entry(dockerfile: list[tuple[str, str]]) -> list[str]:
    words = json.loads(dict(dockerfile)["ENTRYPOINT"])
    assert words[:2] == ["quire", "serve"]
    return words[2:]


def test_the_image_is_made_of_known_instructions_and_files_that_are_there(
    dockerfile: list[tuple[str, str]],
):
    assert all(INSTRUCTIONS.fullmatch(name) for name, _ in dockerfile)
    shown = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in dockerfile:
        if name == "COPY":
            *sources, _target = [word for word in shlex.split(rest) if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists()
                assert f"!{source}" in shown
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [rest for name, rest in dockerfile if name == "RUN" and rest.startswith("make ")]
    assert [line.split()[1] in targets for line in made] == [True]
    assert int(dict(dockerfile)["USER"]) > 0


def test_the_image_serves_and_is_asked_for_its_health_on_a_real_path(
    dockerfile: list[tuple[str, str]], paths: set[str]
):
    found = settings(entry(dockerfile))
    exposed = dict(dockerfile)["EXPOSE"]
    assert (found.host, str(found.port)) == ("0.0.0.0", exposed)
    port, path = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", dict(dockerfile)["HEALTHCHECK"])[0]
    assert port == exposed
    assert path in paths


def test_the_deployment_probes_real_paths_and_outlasts_the_shutdown(
    dockerfile: list[tuple[str, str]], objects: dict[str, Any], paths: set[str]
):
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == f"quire:{quire.__version__}"
    found = settings([*entry(dockerfile), *container["args"]])
    assert container["ports"][0]["containerPort"] == found.port
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= found.shutdown_timeout + sleep + 10
    named = {one["name"] for one in container["env"]}
    assert named == {"QUIRE_API_KEY", "QUIRE_ADMIN_KEY"}
    assert all("secretKeyRef" in one["valueFrom"] for one in container["env"])
    assert str(pod["securityContext"]["runAsUser"]) == dict(dockerfile)["USER"]


def test_the_deployments_parts_find_each_other(dockerfile: list[tuple[str, str]], objects: dict[str, Any]):
    spec = objects["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    pod = spec["template"]["spec"]
    claims = {one["name"]: one.get("persistentVolumeClaim") for one in pod["volumes"]}
    assert claims["cache"] == {"claimName": objects["PersistentVolumeClaim"]["metadata"]["name"]}
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == set(claims)
    assert mounts["cache"] == dict(dockerfile)["VOLUME"]

"""Dockerfile, manifests, Helm chart and compose file: what they name exists here, and their numbers fit together."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import quire
from quire.cli import serve
from quire.cli.flags import engine_settings
from quire.cli.main import main
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


def test_deployments_that_are_planned_serve_exactly_their_models(
    dockerfile: list[tuple[str, str]], paths: set[str], tmp_path: Path
):
    fleet = tmp_path / "fleet.yaml"
    models = "{name: chat, model: org/a, slice: 3g.40gb, settings: {quantization: int4}}, {name: b, slice: 1g.10gb}"
    fleet.write_text(f"card: a100-80g\nmodels: [{models}]")
    assert main(["plan", "--fleet", str(fleet), "--write", str(tmp_path)]) == 0
    documents = list(yaml.safe_load_all((tmp_path / "deployments.yaml").read_text()))
    asked = {}
    for one in documents:
        check_shape(one)
        container = one["spec"]["template"]["spec"]["containers"][0]
        assert f"docker build -t {container['image']} " in (ROOT / "Dockerfile").read_text()
        parser = Parser(prog="quire serve")
        serve.add_arguments(parser)
        arguments = parser.parse([*entry(dockerfile), *container["args"]])
        assert (arguments.more_models, arguments.models) == ([], None)
        found = serve.server_settings(arguments)
        asked[found.served_names] = engine_settings(arguments)
        assert (found.host, found.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
        for name, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
            assert container[f"{name}Probe"]["httpGet"] == {"path": path, "port": found.port}
            assert path in paths
    assert asked == {("b",): {"model": "b"}, ("chat",): {"model": "org/a", "quantization": "int4"}}


# The Helm chart


CHART = ROOT / "deploy" / "helm" / "quire"
EVERYTHING = {
    "model": "org/name",
    "keysSecret": "keys",
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "gpu": {"count": 1, "resource": "nvidia.com/mig-1g.18gb"},
    "cache": {"storageClass": "fast"},
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
NOTHING = {"args": [], "cache": {"enabled": False}, "image": {"tag": "1.2"}}
VARIANTS: dict[str, dict[str, Any]] = {"default": {}, "nothing": NOTHING, "everything": EVERYTHING}


def rendered(template: str, context: dict[str, Any]) -> str:
    """The part of Helm's template language that the chart uses; any other action is an error."""

    def term(words: list[str], piped: Any = None) -> Any:
        match words:
            case ["toYaml", path]:
                return yaml.safe_dump(term([path])).rstrip("\n")
            case ["add", left, right]:
                return term([left]) + term([right])
            case ["div", left, right]:
                return term([left]) // term([right])
            case ["not", path]:
                return not term([path])
            case ["quote"]:
                return json.dumps(str(piped))
            case ["default", path]:
                return piped or term([path])
            case ["nindent", width]:
                return "".join(f"\n{' ' * int(width)}{line}" for line in piped.splitlines())
            case [number] if number.isdigit():
                return int(number)
            case [path] if re.fullmatch(r"(\.\w+)+", path):
                value: Any = context
                for key in path[1:].split("."):
                    value = value[key]
                return value
        raise ValueError(f"the renderer of this test does not know {words}")

    first, *rest = re.split(r"(?:\s*\{\{-|\{\{)\s*(.*?)\s*\}\}", template)
    text, shown = [first], [True]
    for action, literal in zip(rest[::2], rest[1::2], strict=True):
        if action.startswith("if "):
            shown.append(shown[-1] and bool(term(action.split()[1:])))
        elif action == "end":
            shown.pop()
        elif shown[-1]:
            value: Any = None
            for words in action.split(" | "):
                value = term(words.split(), value)
            text.append(str(value))
        if shown[-1]:
            text.append(literal)
    assert shown == [True], "an `if` without its `end`"
    return "".join(text)


def chart(changes: dict[str, Any]) -> dict[str, Any]:
    """The chart's objects by kind, as `helm template test` would print them."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    context = {
        "Release": {"Name": "test"},
        "Chart": {"AppVersion": about["appVersion"]},
        "Values": values,
    }
    texts = [rendered(path.read_text(), context) for path in sorted((CHART / "templates").iterdir())]
    return {one["kind"]: one for one in map(yaml.safe_load, texts) if one is not None}


def as_schema(shape: Any) -> dict[str, Any]:
    """A JSON schema of a shape in tests/data/kubernetes_shapes.yaml."""
    quantity = {"type": "string", "pattern": r"^[0-9.]+(m|[kMGTPE]i?)?$"}
    named = {
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
        "port": {"type": ["integer", "string"]},
        "quantity": quantity,
        "quantities": {"type": "object", "additionalProperties": {"anyOf": [quantity, {"type": "integer"}]}},
    }
    match shape:
        case str():
            return named.get(shape, {"type": shape})
        case [one]:
            return {"type": "array", "items": as_schema(one)}
        case [*words] | {"enum": [*words]}:
            return {"enum": words}
    properties = {key.rstrip("!"): as_schema(value) for key, value in shape.items()}
    required = [key[:-1] for key in shape if key.endswith("!")]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def check_shape(one: dict[str, Any]) -> None:
    kinds = yaml.safe_load((ROOT / "tests" / "data" / "kubernetes_shapes.yaml").read_text())["kinds"]
    shape = {"apiVersion!": "string", "kind!": "string", **kinds[f"{one['apiVersion']} {one['kind']}"]}
    jsonschema.validate(one, as_schema(shape))


@pytest.mark.parametrize("changes", VARIANTS, ids=VARIANTS)
def test_the_charts_objects_have_fields_that_kubernetes_knows(changes: str):
    objects = chart(VARIANTS[changes])
    for one in objects.values():
        check_shape(one)
    container = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    container["livenesProbe"] = container.pop("livenessProbe")
    with pytest.raises(jsonschema.ValidationError, match="livenesProbe"):
        check_shape(objects["StatefulSet"])


def test_the_plain_manifests_have_fields_that_kubernetes_knows(objects: dict[str, Any]):
    for one in objects.values():
        check_shape(one)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu": {"count": "one"}}, "'one' is not of type 'integer'"),
        ({"gpu": {"resource": "mig-1g.18gb"}}, "does not match"),
        ({"autoscaling": {"queueDepth": 0}}, "0 is less than the minimum"),
        ({"replica": 2}, "'replica' was unexpected"),
        ({"args": "--seed 1"}, "is not of type 'array'"),
    ],
)
def test_the_charts_schema_refuses_bad_values(values: dict[str, Any], message: str):
    with pytest.raises(jsonschema.ValidationError, match=message):
        chart(values)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_charts_pods_probe_real_paths_with_flags_that_exist(
    changes: dict[str, Any], dockerfile: list[tuple[str, str]], paths: set[str]
):
    objects = chart(changes)
    spec = objects["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    found = settings([*entry(dockerfile), *container["args"]])
    assert container["ports"][0]["containerPort"] == found.port
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= found.shutdown_timeout + sleep + 10
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"]
    volumes = [one["name"] for one in pod["volumes"]]
    volumes += [one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ())]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert sorted(volumes) == sorted(mounts)
    assert mounts["cache"] == dict(dockerfile)["VOLUME"]


def test_the_chart_has_what_its_values_ask_for():
    objects = chart({})
    assert set(objects) == {"StatefulSet", "Service"}
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"quire:{quire.__version__}"
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert objects["StatefulSet"]["spec"]["replicas"] == 1
    assert "env" not in pod["containers"][0]

    objects = chart(EVERYTHING)
    spec = objects["StatefulSet"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert container["args"][0] == "org/name"
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/mig-1g.18gb": 1}
    assert [one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"]] == ["keys", "keys"]
    assert spec["template"]["spec"]["tolerations"] == EVERYTHING["tolerations"]
    assert spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"
    assert "replicas" not in spec  # the autoscaler's
    scaler = objects["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["kind"] == "StatefulSet"
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "quire_num_requests_waiting"
    assert scaler["metrics"][0]["pods"]["target"]["averageValue"] == "8"
    monitor = objects["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == objects["Service"]["metadata"]["labels"]
    assert monitor["endpoints"][0]["port"] == objects["Service"]["spec"]["ports"][0]["name"]


# The compose file


def test_the_compose_files_services_find_each_other(dockerfile: list[tuple[str, str]]):
    folder = ROOT / "deploy"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            assert (folder / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert target.startswith("/")
    assert services["quire"]["image"] == f"quire:{quire.__version__}"
    found = settings([*entry(dockerfile), *services["quire"]["command"]])
    assert int(services["quire"]["stop_grace_period"].removesuffix("s")) > found.shutdown_timeout
    address = f"quire:{found.port}"
    assert services["open-webui"]["environment"]["OPENAI_API_BASE_URL"] == f"http://{address}/v1"
    prometheus = yaml.safe_load((folder / "prometheus" / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == [address]
    assert all((folder / "prometheus" / name).exists() for name in prometheus["rule_files"])
    provisioning = folder / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0].split(':')[1]}"
    provider = yaml.safe_load((provisioning / "dashboards" / "quire.yaml").read_text())["providers"][0]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/quire.json" in mounted

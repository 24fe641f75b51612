"""MIG layouts, packing, the files that apply a plan, and `quire plan --mig` and `--fleet`."""

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.main import main
from quire.core.errors import ConfigError
from quire.fleet import manifests
from quire.fleet.mig import (
    CARDS,
    COMPUTE_SLICES,
    MEMORY_SLICES,
    check_layout,
    find_card,
    fits,
    layouts,
    multiset,
    place,
    placements,
    without_double,
)
from quire.fleet.packing import Demand, lower_bound, moved, pack
from quire.fleet.plan_file import read_fleet

A100 = CARDS["a100-80g"]


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_layouts_are_all_maximal_ones(card) -> None:
    assert len(layouts(without_double(card))) == 19
    assert len(layouts(card.profiles)) == 78
    for layout in layouts(card.profiles):
        taken = [index for placement in layout for index in placement.slices]
        assert len(taken) == len(set(taken))
        assert max(taken) < MEMORY_SLICES
        assert sum(placement.profile.compute for placement in layout) <= COMPUTE_SLICES
        assert not any(fits(layout, more) for more in placements(card.profiles))
        assert all(placement.start in placement.profile.starts for placement in layout)


@given(st.lists(st.sampled_from(A100.profiles), min_size=1, max_size=8))
def test_slices_are_placed_exactly_where_a_maximal_layout_has_them(profiles) -> None:
    wanted = Counter(profile.name for profile in profiles)
    possible = any(wanted <= multiset(layout) for layout in layouts(A100.profiles))
    layout = place(profiles)
    if possible:
        assert layout is not None
    if layout is not None:
        assert multiset(layout) == wanted


def test_a_layout_that_cannot_be_placed_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"4 × 3g.40gb cannot be placed on one a100-80g: the nearest layout is"
    ):
        check_layout(A100, Counter({"3g.40gb": 4}))
    with pytest.raises(ConfigError, match=r"has no slice '5g\.40gb': choose one of"):
        check_layout(A100, Counter({"5g.40gb": 1}))
    assert find_card("A100 80GB") is A100
    assert find_card("NVIDIA H200") is CARDS["h200"]
    with pytest.raises(ConfigError, match="no GPU with MIG that is known"):
        find_card("v100")


def test_packing_is_at_most_one_gpu_above_what_is_needed() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        weights = [chance.random() for _ in A100.profiles]
        drawn = chance.choices(A100.profiles, weights, k=chance.randint(1, 40))
        demands = [Demand(f"m{index}", profile) for index, profile in enumerate(drawn)]
        began = time.perf_counter()
        gpus = pack(demands, A100)
        assert time.perf_counter() - began < 1
        assert Counter(d for gpu in gpus for d in gpu.demands) == Counter(demands)
        assert all(place([d.profile for d in gpu.demands]) for gpu in gpus)
        assert len(gpus) <= lower_bound(demands) + 1  # and the optimum is not below the bound


def test_a_new_plan_moves_few_slices() -> None:
    small, large = A100.profile("1g.10gb"), A100.profile("3g.40gb")
    demands = [Demand(f"s{i}", small) for i in range(9)] + [Demand(f"l{i}", large) for i in range(3)]
    before = pack(demands, A100)
    after = pack([*demands, Demand("new", small)], A100, before)
    assert moved(before, after) == 1
    assert moved(before, pack(demands[:-1], A100, before)) == 0


def test_files_of_a_plan_go_through_the_planner_again(tmp_path: Path) -> None:
    demands = [Demand("chat", A100.profile("3g.40gb")), Demand("embed", A100.profile("1g.10gb"))] * 2
    gpus = pack(demands, A100)
    nodes = [manifests.Node("a", 1), manifests.Node("b", 2)]
    models = {"chat": ["org/chat", "--quantization", "int4"], "embed": ["org/embed"]}
    manifests.write(tmp_path, gpus, nodes, models, "openshift")
    parted = manifests.read_mig_parted((tmp_path / "mig-parted.yaml").read_text(), A100)
    planned = [counts for config in parted.values() for counts in config if counts]
    assert sorted(map(str, planned)) == sorted(
        str(Counter(dict(sorted(multiset(g.layout).items())))) for g in gpus
    )
    entries = yaml.safe_load((tmp_path / "mig-parted.yaml").read_text())["mig-configs"]["quire-b"]
    assert [entry["mig-enabled"] for entry in entries] == sorted(entry["mig-enabled"] for entry in entries)
    config_map = yaml.safe_load((tmp_path / "configmap.yaml").read_text())
    assert list(config_map["data"]) == ["config.yaml"]
    assert config_map["metadata"]["namespace"] == "nvidia-gpu-operator"
    assert yaml.safe_load(config_map["data"]["config.yaml"])["version"] == "v1"
    chat, _ = yaml.safe_load_all((tmp_path / "deployments.yaml").read_text())
    container = chat["spec"]["template"]["spec"]["containers"][0]
    assert chat["spec"]["replicas"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    assert container["args"][:4] == ["serve", "org/chat", "--quantization", "int4"]
    assert "oc label node a nvidia.com/mig.config=quire-a" in (tmp_path / "apply.sh").read_text()
    with pytest.raises(ConfigError, match="the plan needs 2 GPUs and the nodes have 1: add 1"):
        manifests.write(tmp_path, gpus, nodes[:1], models, "kubernetes")
    with pytest.raises(ConfigError, match="version v1 are read, and this one has 'v2'"):
        manifests.read_mig_parted("version: v2", A100)


def test_plan_shows_slices_and_chooses_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mig", "h200", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layouts"]) == 78
    short = ["--prompt-tokens", "64", "--output-tokens", "16"]
    assert main(["plan", "opt-1.3b", "--mig", "a100-80g", "--users", "2", "--json", *short]) == 0
    assert json.loads(capsys.readouterr().out)["slice"] == "1g.10gb"
    assert main(["plan", "llama-70b", "--mig", "a100-80g", "--users", "1", *short]) != 0
    assert "no slice of a100-80g holds the model" in capsys.readouterr().err
    assert (
        main(["plan", "opt-1.3b", "--mig", "a100-80g", "--users", "1", "--slo-per-token", "1us", *short]) != 0
    )
    assert "--slo-per-token is '1us'" in capsys.readouterr().err
    assert (
        main(["plan", "opt-13b", "--mig", "a100-80g", "--users", "2", "--slo-per-token", "1ms", *short]) != 0
    )
    assert "the whole GPU takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: a, users: 0}", "users is 0"),
        ("{name: a, rate: .inf}", "rate is inf"),
        ("{name: a, rate: 0}", "rate is 0"),
        ("{name: a, colour: red}", "'colour' is not a field"),
        ("{users: 1}", "give at least `name`"),
        ("{name: a, slo_per_token: fast}", "slo_per_token is 'fast'"),
        ("{name: a}, {name: a}", "'a' is given twice"),
    ],
)
def test_a_fleet_file_is_refused_by_field(tmp_path: Path, model: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"card: a100-80g\nmodels: [{model}]")
    with pytest.raises(ConfigError, match=message):
        read_fleet(path)


def test_a_fleet_is_packed_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "card: a100-80g\nprompt_tokens: 64\noutput_tokens: 16\nmodels:\n"
        "- {name: small, model: opt-1.3b, users: 2}\n- {name: large, model: opt-13b, users: 2}\n"
        "- {name: given, model: org/x, slice: 3g.40gb, replicas: 2}\n"
    )
    assert main(["plan", "--fleet", str(path), "--json"]) == 0
    gpus = json.loads(capsys.readouterr().out)["gpus"]
    assert Counter(s["model"] for gpu in gpus for s in gpu["slices"]) == {"small": 1, "large": 1, "given": 2}
    assert len(gpus) == 2


def test_the_example_fleet_has_54_models() -> None:
    fleet = read_fleet(Path(__file__).parents[2] / "examples/fleet.yaml")
    assert len(fleet.models) == 54

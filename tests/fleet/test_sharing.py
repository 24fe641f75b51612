"""MIG layouts, packing, and `quire plan --mig` and `--fleet`."""

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.main import main
from quire.cli.plan_sharing import demands_of
from quire.core.errors import ConfigError
from quire.fleet import manifests, nvml
from quire.fleet.mig import (
    CARDS,
    COMPUTE_SLICES,
    MEMORY_SLICES,
    Profile,
    check_layout,
    find_card,
    fits,
    layouts,
    multiset,
    place,
    placements,
    without_double,
)
from quire.fleet.packing import Demand, _placeable, lower_bound, moved, pack
from quire.fleet.plan_file import FleetModel, read_fleet
from quire_lab.measure import slices
from quire_lab.simulate.devices import find_device

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


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_a_slice_has_the_memory_that_is_simulated(card) -> None:
    for profile in card.profiles:
        simulated = find_device(f"simulated:{card.name}-{profile.name}").memory_bytes
        whole = profile.compute == COMPUTE_SLICES  # of which CUDA gives a little less than NVML
        assert profile.megabytes << 20 == pytest.approx(simulated, rel=0.005 if whole else 0)


@given(st.lists(st.sampled_from(A100.profiles), min_size=1, max_size=8))
def test_slices_are_placed_exactly_where_a_maximal_layout_has_them(profiles) -> None:
    wanted = Counter(profile.name for profile in profiles)
    possible = any(wanted <= multiset(layout) for layout in layouts(A100.profiles))
    layout = place(profiles)
    assert (layout is not None) == possible
    if layout is not None:
        assert multiset(layout) == wanted
        taken = [index for placement in layout for index in placement.slices]
        assert len(taken) == len(set(taken))
        assert max(taken) < MEMORY_SLICES
        assert sum(profile.compute for profile in profiles) <= COMPUTE_SLICES


def test_a_layout_that_cannot_be_placed_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"4 × 3g.40gb cannot be placed on one a100-80g: the nearest layout is"
    ):
        check_layout(A100, Counter({"3g.40gb": 4}))
    with pytest.raises(ConfigError, match=r"has no slice '5g\.40gb': choose one of"):
        check_layout(A100, Counter({"5g.40gb": 1}))


def test_a_gpu_is_known_by_its_own_name_and_nvmls() -> None:
    names = {
        "a100-40g": "NVIDIA A100-SXM4-40GB|NVIDIA A100-PCIE-40GB|a100 40g",
        "a100-80g": "NVIDIA A100-SXM4-80GB|NVIDIA A100 80GB PCIe|A100 80GB|a100-80g",
        "h100": "NVIDIA H100 80GB HBM3|h100-80gb|H100|H100-SXM5-80GB",
        "h200": "NVIDIA H200|NVIDIA H200 NVL|h200-141gb",
    }
    assert {
        name: {find_card(title).name for title in titles.split("|")} for name, titles in names.items()
    } == {name: {name} for name in names}
    for other in (
        "v100",
        "a100",
        "A100-SXM-64GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
    ):
        with pytest.raises(
            ConfigError, match=r"is not among the GPUs with MIG that are known: a100-40g, .*h200$"
        ):
            find_card(other)


def test_packing_is_at_most_one_gpu_above_what_is_needed() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        weights = [chance.random() for _ in A100.profiles]
        drawn = chance.choices(A100.profiles, weights, k=chance.randint(1, 40))
        demands = [Demand(f"m{index}", profile) for index, profile in enumerate(drawn)]
        began = time.thread_time()
        gpus = pack(demands, A100)
        assert time.thread_time() - began < 1
        assert Counter(d for gpu in gpus for d in gpu.demands) == Counter(demands)
        assert all(place([d.profile for d in gpu.demands]) for gpu in gpus)
        assert len(gpus) <= lower_bound(demands) + 1  # and the optimum is not below the bound


def test_a_large_fleet_is_packed_in_seconds() -> None:
    drawn = random.Random(1).choices(A100.profiles, k=400)
    demands = [Demand(f"m{index}", profile) for index, profile in enumerate(drawn)]
    began = time.thread_time()
    gpus = pack(demands, A100)
    assert time.thread_time() - began < 8  # 26 where each round tries to empty every GPU
    assert len(gpus) <= lower_bound(demands) + 2


def fewest_gpus(profiles) -> int:
    """Exact, by branch and bound: the largest slice left goes to each GPU of other content, or to a new one."""
    order = sorted(profiles, key=lambda p: (-p.memory, -p.compute))
    memory_left = [sum(p.memory for p in order[at:]) for at in range(len(order) + 1)]
    compute_left = [sum(p.compute for p in order[at:]) for at in range(len(order) + 1)]
    best = len(order)
    seen: set = set()

    def search(at: int, gpus: tuple[tuple, ...]) -> None:
        nonlocal best
        free = sum(MEMORY_SLICES - sum(p.memory for p in gpu) for gpu in gpus)
        free_compute = sum(COMPUTE_SLICES - sum(p.compute for p in gpu) for gpu in gpus)
        more = max(-(-(memory_left[at] - free) // 8), -(-(compute_left[at] - free_compute) // 7), 0)
        if len(gpus) + more >= best or (at, gpus) in seen:
            return
        seen.add((at, gpus))
        if at == len(order):
            best = len(gpus)
            return
        for gpu in dict.fromkeys(gpus):
            if _placeable((*gpu, order[at])):
                rest = list(gpus)
                rest.remove(gpu)
                search(at + 1, tuple(sorted((*rest, (*gpu, order[at])), key=str)))
        search(at + 1, tuple(sorted((*gpus, (order[at],)), key=str)))

    search(0, ())
    return best


def test_packing_is_at_most_one_gpu_above_the_exact_optimum() -> None:
    above = 0
    for seed in range(200):
        chance = random.Random(1000 + seed)
        weights = [chance.random() ** 2 for _ in A100.profiles[:-1]]  # a whole GPU is packed by itself
        drawn = chance.choices(A100.profiles[:-1], weights, k=chance.randint(1, 14))
        demands = [Demand(f"m{index}", profile) for index, profile in enumerate(drawn)]
        optimum = fewest_gpus(drawn)
        assert lower_bound(demands) <= optimum <= len(pack(demands, A100)) <= optimum + 1
        above += len(pack(demands, A100)) > optimum
    assert above <= 10


def test_a_new_plan_moves_few_slices() -> None:
    small, large = A100.profile("1g.10gb"), A100.profile("3g.40gb")
    demands = [Demand(f"s{i}", small) for i in range(9)] + [Demand(f"l{i}", large) for i in range(3)]
    before = pack(demands, A100)
    after = pack([*demands, Demand("new", small)], A100, before)
    assert moved(before, after) == 1
    assert moved(before, pack(demands[:-1], A100, before)) == 0


@given(st.integers(0, 2**32), st.booleans())
def test_removed_models_make_no_other_slice_new(seed: int, through_file: bool) -> None:
    chance = random.Random(seed)
    drawn = chance.choices(A100.profiles, k=chance.randint(1, 25))
    demands = [Demand(f"m{index}", profile) for index, profile in enumerate(drawn)]
    before = pack(demands, A100)
    nodes = [manifests.Node(f"n{index}", 2) for index in range(len(before) // 2 + 1)]
    for _ in range(3):
        demands = [demand for demand in demands if chance.random() < 0.6]
        if through_file:
            text = manifests.dump(manifests.mig_parted(manifests.on_nodes(before, nodes)))
            before = manifests.packed_before(text, A100, demands, nodes)
        after = pack(demands, A100, before)
        assert Counter(d for gpu in after for d in gpu.demands) == Counter(demands)
        assert moved(before, after) == 0
        assert len(after) == len(before)
        before = after


def test_a_gpu_whose_models_are_gone_keeps_its_place(tmp_path: Path, capsys) -> None:
    fleet, folder = tmp_path / "fleet.yaml", tmp_path / "files"
    models = [
        "- {name: a, model: org/a, slice: 7g.80gb}",
        "- {name: b, model: org/b, slice: 3g.40gb, replicas: 3}",
    ]
    models += ["- {name: c, model: org/c, slice: 2g.20gb, replicas: 2}"]
    plan = ["plan", "--fleet", str(fleet), "--write", str(folder)]
    fleet.write_text("\n".join(["card: a100-80g", "models:", *models]))
    assert main(plan) == 0
    fleet.write_text("\n".join(["card: a100-80g", "models:", *models[1:]]))
    old = yaml.safe_load((folder / "mig-parted.yaml").read_text())["mig-configs"]["quire-NODE"]
    assert main([*plan, "--before", str(folder / "mig-parted.yaml")]) == 0
    said = capsys.readouterr().out
    assert "0 of 5 slices are new; mig-parted makes all slices of 1 changed GPU again: 0\n" in said
    assert "2 models, 5 slices: 2 × a100-80g instead of 3 with one model each" in said
    new = yaml.safe_load((folder / "mig-parted.yaml").read_text())["mig-configs"]["quire-NODE"]
    assert old[0] == {"devices": [0], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    assert new == [{"devices": [0], "mig-enabled": False}, *old[1:]]


def test_too_few_nodes_are_said_before_a_plan(tmp_path: Path, capsys) -> None:
    fleet, before = tmp_path / "fleet.yaml", tmp_path / "mig-parted.yaml"
    nodes = "nodes: [{name: n, gpus: 2}]"
    models = [f"{{name: m{index}, slice: 3g.40gb}}" for index in range(5)]
    plan = ["plan", "--fleet", str(fleet)]
    fleet.write_text(f"card: a100-80g\n{nodes}\nmodels: [{', '.join(models)}]")
    assert main(plan) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "the plan needs 3 GPUs and the nodes have 2: add 1\n" in said.err
    in_use = [f"{{devices: [{index}], mig-enabled: true, mig-devices: {{1g.10gb: 4}}}}" for index in range(2)]
    before.write_text(f"version: v1\nmig-configs: {{quire-n: [{', '.join(in_use)}]}}")
    small = [f"{{name: s{index}, slice: 1g.10gb}}" for index in range(8)]
    fleet.write_text(f"card: a100-80g\n{nodes}\nmodels: [{', '.join([*small, '{name: l, slice: 4g.40gb}'])}]")
    assert main([*plan, "--before", str(before)]) == 2
    assert "needs 3 GPUs and the nodes have 2: add 1, or plan without --before\n" in capsys.readouterr().err
    assert main(plan) == 0


def test_files_that_cannot_be_written_are_said(tmp_path: Path, capsys) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("card: h100\nmodels: [{name: a, slice: 1g.10gb}]")
    for folder in (fleet, fleet / "below"):
        assert main(["plan", "--fleet", str(fleet), "--write", str(folder)]) == 2
        assert f"--write {folder}: " in (said := capsys.readouterr().err)
        assert said.endswith(": name a folder that can be written\n")


def test_planning_again_keeps_the_slices_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet, folder = tmp_path / "fleet.yaml", tmp_path / "files"
    models = [f"- {{name: m{i}, model: org/m{i}, slice: 1g.10gb}}" for i in range(9)]
    models += [f"- {{name: l{i}, model: org/l{i}, slice: 3g.40gb}}" for i in range(3)]
    fleet.write_text("\n".join(["card: a100-80g", "models:", *models]))
    assert main(["plan", "--fleet", str(fleet), "--write", str(folder)]) == 0
    before = ["--before", str(folder / "mig-parted.yaml")]
    fleet.write_text("\n".join(["card: a100-80g", "models:", *models[1:], models[0].replace("m0", "other")]))
    assert main(["plan", "--fleet", str(fleet), *before]) == 0
    assert (
        "0 of 12 slices are new; mig-parted makes all slices of 0 changed GPUs again: none"
        in capsys.readouterr().out
    )
    fleet.write_text(
        "\n".join(["card: a100-80g", "models:", *models, "- {name: n, model: org/n, slice: 2g.20gb}"])
    )
    assert main(["plan", "--fleet", str(fleet), *before]) == 0
    assert (
        "1 of 13 slices are new; mig-parted makes all slices of 1 changed GPU again: "
        in capsys.readouterr().out
    )
    assert main(["plan", "--fleet", str(fleet), *before, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["new_slices"] == 1
    (index,) = record["changed_gpus"]
    assert "2g.20gb" in record["gpus"][index]["layout"]
    assert main(["plan", "--fleet", str(fleet), "--before", str(tmp_path / "none")]) != 0
    assert "none: [Errno 2] No such file" in capsys.readouterr().err


def test_planning_again_drains_only_nodes_whose_slices_change(tmp_path: Path) -> None:
    nodes = "nodes: [{name: n1, gpus: 1}, {name: n2, gpus: 2}, {name: n3, gpus: 1}]"
    models = [f"- {{name: m{i}, model: org/m{i}, slice: 4g.40gb}}" for i in range(2)]
    more = "- {name: n, model: org/n, slice: 7g.80gb}"
    fleet, drained = tmp_path / "fleet.yaml", []
    for number, lines in enumerate(([], [], [more], [more])):
        fleet.write_text("\n".join(["card: a100-80g", nodes, "models:", *models, *lines]))
        words = ["plan", "--fleet", str(fleet), "--write", str(tmp_path / f"{number}")]
        before = ["--before", str(tmp_path / f"{number - 1}" / "mig-parted.yaml")]
        assert main([*words, *(before if number else [])]) == 0
        script = (tmp_path / f"{number}" / "apply.sh").read_text()
        drained.append([line for line in script.splitlines() if " drain " in line or " wait " in line])
        assert script.endswith("kubectl apply -f deployments.yaml\n")
    assert [line.partition(" --")[0] for lines in drained for line in lines] == [
        "kubectl drain n1 n2", "kubectl wait node n1 n2", "kubectl drain n2", "kubectl wait node n2",
    ]  # fmt: skip


FAKE_NVML = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned version, id, p2p, slices, instances, sms, copy, dec, enc, jpeg, ofa;
                 unsigned long long megabytes; char name[96]; } Info;
typedef struct { unsigned start, size; } Place;
static const struct { const char *name; unsigned slices, sms, mb, size, count, starts[7]; } table[] = {
  {"MIG 1g.18gb", 1, 16, 16384, 1, 7, {0,1,2,3,4,5,6}}, {"MIG 1g.18gb+me", 1, 16, 16384, 1, 7, {0,1,2,3,4,5,6}},
  {"MIG 1g.35gb", 1, 26, 33280, 2, 4, {0,2,4,6}}, {"MIG 2g.35gb", 2, 32, 33280, 2, 3, {0,2,4}},
  {"MIG 3g.71gb", 3, 60, 71424, 4, 2, {0,4}}, {"MIG 4g.71gb", 4, 64, 71424, 4, 1, {0}},
  {"MIG 7g.141gb", 7, 132, 143360, 8, 1, {0}}};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)7; return i ? 2 : 0; }
int nvmlDeviceGetName(void *d, char *name, unsigned n) { snprintf(name, n, "NVIDIA H200"); return d != (void *)7; }
int nvmlDeviceGetGpuInstanceProfileInfoV(void *d, unsigned kind, Info *info) {
  if (HAS_MIG == 0 || kind >= 7 || info->version != (sizeof(Info) | 2u << 24)) return 3;
  info->id = kind + 40; info->slices = table[kind].slices; info->sms = table[kind].sms;
  info->megabytes = table[kind].mb; strcpy(info->name, table[kind].name); return 0; }
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *d, unsigned id, Place *out, unsigned *count) {
  *count = table[id - 40].count;
  for (unsigned i = 0; i < *count; i++) out[i] = (Place){table[id - 40].starts[i], table[id - 40].size};
  return 0; }
"""


def fake_nvml(folder: Path, has_mig: int = 1) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a stand-in of NVML")
    (folder / "nvml.c").write_text(FAKE_NVML)
    library = folder / "libnvidia-ml.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        f"-DHAS_MIG={has_mig}",
        "-o",
        str(library),
        str(folder / "nvml.c"),
    ]
    subprocess.run(command, check=True)
    return str(library)


def test_the_card_that_is_here_is_read_from_nvml(tmp_path: Path, monkeypatch, capsys) -> None:
    """The stand-in has the table that an H200 gave with MIG off."""
    title, found = nvml.read_card(library=fake_nvml(tmp_path))
    assert title == "NVIDIA H200"
    assert [(p.name, p.num_sms, p.megabytes) for p in found][1:3] == [
        ("1g.35gb", 26, 33280),
        ("2g.35gb", 32, 33280),
    ]
    assert nvml.differences(CARDS["h200"], found) == []
    fewer = (*found[:3], replace(found[3], starts=(0,), num_sms=48), *found[5:])
    assert nvml.differences(CARDS["h200"], fewer) == [
        "3g.71gb: starts (0, 4), by NVML (0,)", "3g.71gb: SMs 60, by NVML 48", "4g.71gb: not in NVML's table"
    ]  # fmt: skip
    less = (replace(found[0], megabytes=18432), *found[1:])
    assert nvml.differences(CARDS["h200"], less) == ["1g.18gb: megabytes 16384, by NVML 18432"]
    monkeypatch.setattr(nvml, "read_card", lambda: (title, found))
    assert main(["plan", "--mig", "auto", "--json"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["card"] == "h200"
    assert "its 6 slices are those of the table" in written.err


def test_the_table_of_an_h200_is_what_nvml_gave_of_one() -> None:
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200_gpu_sharing.json").read_text())
    (row,) = (row for row in rows if row["mode"] == "mig")
    found = tuple(Profile(**{**s, "starts": tuple(s["starts"])}) for s in row["slices"])
    assert nvml.differences(find_card(row["card"]), found) == []
    for s in row["slices"]:  # and simulated slices are of that size
        device = find_device(f"simulated:h200-{s['name']}")
        whole = find_device("simulated:h200")
        assert device.rates.flops == pytest.approx(whole.rates.flops * s["num_sms"] / 132)
        assert device.memory_bytes == min(whole.memory_bytes, s["megabytes"] << 20)


def test_a_machine_or_a_card_without_mig_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs NVIDIA.s driver, and it is not here .*as in --mig h100"):
        nvml.read_card(library=str(tmp_path / "none.so"))
    library = fake_nvml(tmp_path, has_mig=0)
    with pytest.raises(ConfigError, match="NVIDIA H200 has no MIG: name a GPU that has"):
        nvml.read_card(library=library)
    with pytest.raises(ConfigError, match="finds no GPU 1"):
        nvml.read_card(1, library)


def test_plan_shows_slices_and_chooses_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mig", "h200", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layouts"]) == 78
    short = ["--prompt-tokens", "64", "--output-tokens", "16"]
    assert main(["plan", "opt-1.3b", "--mig", "a100-80g", "--users", "2", "--json", *short]) == 0
    assert json.loads(capsys.readouterr().out)["slice"] == "1g.10gb"
    assert main(["plan", "llama-70b", "--mig", "a100-80g", "--users", "1", *short]) != 0
    refused = capsys.readouterr().err
    assert "no slice of a100-80g is large enough: the weights take 141.1 GB" in refused
    assert "--quantization int4 fits in 7g.80gb (" in refused  # slices cannot be joined, whole GPUs can
    assert "2 whole GPUs with --tensor-parallel-size 2 (" in refused
    assert "2xa100-80g-7g" not in refused
    assert (
        main(["plan", "opt-1.3b", "--mig", "a100-80g", "--users", "1", "--slo-per-token", "1us", *short]) != 0
    )
    assert "--slo-per-token is '1us'" in capsys.readouterr().err
    assert (
        main(["plan", "opt-13b", "--mig", "a100-80g", "--users", "2", "--slo-per-token", "1ms", *short]) != 0
    )
    assert "the whole GPU takes" in capsys.readouterr().err


def test_a_slice_whose_pool_is_too_small_for_a_request_is_passed_over() -> None:
    slo = slices.Slo(0.05, 100.0, 20_000, 16)
    passed = slices.latency({"model": "llama-3.1-8b"}, A100, A100.profile("1g.20gb"), 1, slo)
    assert passed.why.startswith("the request may need 1251 blocks of 16 tokens and the whole pool has ")
    chosen = slices.smallest({"model": "llama-3.1-8b"}, A100, slo, 1)
    assert chosen.profile == "3g.40gb"
    for setting, said in (
        ({"kv_cache_memory_bytes": 1}, "cannot hold one block"),
        ({"max_model_len": 9_999}, "2048 positions"),
    ):
        with pytest.raises(ConfigError, match=said):  # no slice is too small for such a setting
            slices.latency({"model": "opt-125m", **setting}, A100, A100.profiles[0], 1, slices.Slo())


@pytest.mark.parametrize(("settings", "said"), [
    ({"max_model_len": 600}, "prompt_tokens=512 leave room for 88 of output_tokens=128 in a context of 600"),
    ({"cpu_offload_gb": 4.0}, "a simulated device holds all weights: leave out cpu_offload_gb"),
    ({"quantization": "fp8"}, "A100 80 GB, 1g.10gb: quantization='fp8' needs a GPU with float8 matrix units"),
    ({"speculative_config": {"method": "ngram"}}, "leave out speculative_config"),
])  # fmt: skip
def test_what_a_slice_does_not_serve_so_is_refused(settings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slices.smallest({"model": "opt-125m", **settings}, A100, slices.Slo(), 1)


def test_a_fleet_model_may_have_settings_that_are_lists(tmp_path: Path, capsys) -> None:
    path = tmp_path / "fleet.yaml"
    settings = "{max_lora_rank: 8, lora_modules: [a=x]}"
    path.write_text(f"card: a100-80g\nmodels: [{{name: a, model: opt-125m, settings: {settings}}}]")
    assert main(["plan", "--fleet", str(path)]) == 0
    assert "1g.10gb a" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "ranks"), [("opt-30b", False), ("llama-70b", True)])
def test_whole_gpus_are_named_for_a_model_that_ranks_can_hold(model: str, ranks: bool) -> None:
    card = CARDS["a100-40g"]
    with pytest.raises(ConfigError, match=r"no slice of a100-40g is large enough") as refused:
        slices.smallest({"model": model, "quantization": "none"}, card, slices.Slo(), 1)
    assert ("--tensor-parallel-size" in str(refused.value)) == ranks


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


def test_a_kind_of_gpu_that_is_too_small_is_left_out(tmp_path: Path, capsys) -> None:
    path = tmp_path / "fleet.yaml"
    models = "models: [{name: a, model: org/a, slice: 3g.40gb}, {name: b, model: org/b, slice: 1g.10gb}]"
    path.write_text(f"cards: [a100-40g, a100-80g, h100]\n{models}")
    assert main(["plan", "--fleet", str(path)]) == 0
    written = capsys.readouterr()
    assert written.out.endswith("\na100-80g needs the fewest GPUs: 1\n")
    assert "left out: a100-40g: a100-40g has no slice '3g.40gb': choose one of" in written.err
    assert written.err.count("\n") == 1
    path.write_text(f"cards: [a100-40g, h200]\n{models}")
    assert main(["plan", "--fleet", str(path), "--json"]) == 2
    refused = capsys.readouterr().err
    assert "a100-40g: a100-40g has no slice" in refused
    assert "; h200: h200 has no slice '3g.40gb'" in refused


def test_one_model_on_one_gpu_is_not_counted_by_its_slices(tmp_path: Path, capsys) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("card: a100-80g\nmodels: [{name: a, slice: 1g.10gb, replicas: 7}]")
    assert main(["plan", "--fleet", str(path)]) == 0
    assert "1 model, 7 slices: 1 × a100-80g instead of 1 with one model each" in capsys.readouterr().out


@pytest.mark.parametrize(("cards", "said"), [
    ("card: h100\ncards: [h100, h200]", "`card` and `cards` are given: leave one of them out"),
    ("cards: [h100, a100-80g, H100]", "cards has h100, a100-80g, h100: give each kind once"),
])  # fmt: skip
def test_kinds_of_gpus_are_given_once(cards: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"{cards}\nmodels: [{{name: a, slice: 1g.10gb}}]")
    with pytest.raises(ConfigError, match=said):
        read_fleet(path)


def test_a_fleet_file_without_a_card_is_told_the_field(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("models: [{name: a, slice: 1g.10gb}]")
    with pytest.raises(
        ConfigError, match=r"the field `card` of the file is missing.*: give one of the GPUs with MIG"
    ):
        read_fleet(path)


def test_slices_are_not_joined() -> None:
    with pytest.raises(ConfigError, match=r"slices cannot be joined.*simulated:2xa100-80g$"):
        find_device("simulated:2xa100-80g-3g.40gb")


@pytest.mark.parametrize(("users", "given", "most", "replicas"), [
    (500, 1, 100, 5), (500, 3, 100, 5), (500, 6, 100, 6), (500, 1, 500, 1), (3, 1, 1, 3), (640, 1, 10, 64),
    (5_000, 1, 512, 10), (32_768, 1, 512, 64), (50_000, 100, 512, 100),
])  # fmt: skip
def test_replicas_are_as_few_as_meet_the_slo(monkeypatch, users, given, most, replicas) -> None:
    tried = []

    def smallest(settings, card, slo, count):
        tried.append(count)
        if count > most:
            raise slices.SloMissed("too many users")
        return slices.SliceLatency("7g.80gb", count, 0.01, 1.0)

    monkeypatch.setattr(slices, "smallest", smallest)
    model = FleetModel("a", "a", users, {}, {}, slice=None, replicas=given)
    assert demands_of(model, A100) == [Demand("a", A100.profile("7g.80gb"))] * replicas
    assert len(tried) <= 13  # two for each doubling up to 64
    assert max(tried) <= slices.MAX_USERS  # more are not simulated on one slice


def test_no_replica_is_tried_of_a_model_that_no_slice_holds(monkeypatch) -> None:
    tried = []

    def smallest(settings, card, slo, count):
        tried.append(count)
        raise ConfigError("it is large")

    monkeypatch.setattr(slices, "smallest", smallest)
    with pytest.raises(ConfigError, match=r"^a: it is large$"):
        demands_of(FleetModel("a", "a", 500, {}, {}, slice=None, replicas=1), A100)
    assert tried == [500]


def test_more_users_than_replicas_are_simulated_for_are_refused_at_once(tmp_path: Path, capsys) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("card: a100-80g\nmodels: [{name: a, model: opt-125m, rate: 5000}]")
    assert main(["plan", "--fleet", str(path)]) == 2
    assert "a: 50,000 users at once are more than 64 replicas of 512 users: give" in capsys.readouterr().err
    assert main(["plan", "opt-125m", "--mig", "a100-80g", "--users", "5000"]) == 2
    assert "--users is 5000: give a whole number from 1 to 512" in capsys.readouterr().err


def test_the_example_fleet_has_54_models() -> None:
    fleet = read_fleet(Path(__file__).parents[2] / "examples/fleet.yaml")
    assert len(fleet.models) == 54

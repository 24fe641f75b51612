"""Flags, files of flags, and the settings that they become."""

import json
import shlex
import sys
from dataclasses import asdict, fields

import pytest

from quire.cli.flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_settings,
    parse_gigabytes,
    sampling_from,
)
from quire.cli.parser import Collect, Parser, parse_bytes
from quire.core.config import EngineConfig, option_owners, setting_groups
from quire.core.errors import ConfigError, InvalidRequest
from quire.core.sampling import SamplingParams

# One valid value per setting that differs from its default.
OTHER = {
    "model": "some/model",
    "tokenizer": "other",
    "dtype": "bfloat16",
    "quantization": "none",
    "load_format": "dummy",
    "max_model_len": 77,
    "revision": "main",
    "chat_template": "{{ x }}",
    "seed": 5,
    "served_model_name": "name",
    "block_size": 1,  # which goes with a reservation
    "reservation": "pow2",
    "num_blocks": 9,
    "kv_cache_memory_bytes": 12345,
    "gpu_memory_utilization": 0.5,
    "kv_cache_dtype": "float16",
    "enable_prefix_caching": False,
    "share": False,
    "pin_prefix": ("system.txt", "shots.json"),
    "cpu_offload_gb": 1.5,
    "weights_memory_gb": 2.5,
    "weights_offload_dir": "layers",
    "swap_space": 0.5,
    "kv_offload_gb": 0.25,
    "kv_offload_dir": "kept",
    "role": "prefill",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "max_queue_requests": 10,
    "max_queue_tokens": 1000,
    "steps_in_flight": 0,
    "schedule": "shortest",
    "preset": "ft",
    "batching": "static",
    "batch_size": 2,
    "batch_window_ms": 5.5,
    "max_prompt_chunk": 33,
    "itl_goal": "25",
    "preemption_mode": "swap",
    "admit_after": "completed",
    "device": "cpu",
    "num_threads": 2,
    "sm_share": 0.5,
    "enforce_eager": True,
    "deterministic": True,
    "speculative_config": '{"method": "ngram"}',
    "enable_lora": True,
    "lora_modules": ("one=a/b", "two=c"),
    "lora_dir": "adapters",
    "lora_memory": "separate",
    "lora_memory_bytes": 5000,
    "lora_mode": "merge",
    "max_loras": 4,
    "max_lora_rank": 64,
    "max_cpu_loras": 8,
    "max_cpu_lora_bytes": 12345,
    "fully_sharded_loras": True,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "distributed_executor_backend": "ray",
}


def parser() -> Parser:
    made = Parser(prog="quire test")
    add_engine_flags(made)
    return made


def settings(*words: str) -> dict:
    return engine_settings(parser().parse(words))


def as_words(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        return [word for one in value for word in (flag, one)]
    return [flag, str(value)]


def test_every_setting_has_a_flag_a_help_text_and_a_case_here():
    assert set(OTHER) == set(option_owners())
    for settings_of_part in setting_groups().values():
        for field in settings_of_part:
            assert len(field.metadata["help"]) > 10, field.name


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_flag_becomes_its_setting(name):
    expected = OTHER[name]
    expected = list(expected) if isinstance(expected, tuple) else expected
    assert settings(*as_words(name, OTHER[name])) == {name: expected}


def test_all_flags_together_make_the_config():
    together = {
        **OTHER,
        "role": "both",
    }  # the other roles need the prefix cache, which a reservation excludes
    words = [word for name, value in together.items() for word in as_words(name, value)]
    assert asdict(EngineConfig.of(**settings(*words))) == asdict(EngineConfig.of(**together))


def test_without_flags_nothing_is_set():
    assert settings() == {}
    assert EngineConfig.of(**settings()) == EngineConfig()


def test_the_model_may_be_named_either_way_but_not_twice():
    assert (
        settings("one") == settings("--model", "one") == settings("one", "--model", "one") == {"model": "one"}
    )
    with pytest.raises(ConfigError, match="two models are named, 'one' and --model 'two'"):
        settings("one", "--model", "two")


def test_the_short_flag_of_quantization():
    assert settings("-q", "int8") == {"quantization": "int8"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512M", 512 << 20),
        ("1.5k", 1536),
        ("2GB", 2 * 10**9),
        ("1024", 1024),
        ("1e9", 10**9),
        ("3 MiB", 3 << 20),
    ],
)
def test_sizes_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


def test_a_cards_memory_is_in_gigabytes_unless_it_says_otherwise():
    assert parse_gigabytes("80") == 80 * 10**9
    assert parse_gigabytes("80GiB") == 80 << 30


# files

FILES = {
    "flags.yaml": "# note\nblock-size: 32\nenable_prefix_caching: false\ndtype: float32\nkv-cache-memory-bytes: 2GiB",
    "flags.json": json.dumps(
        {
            "block-size": 32,
            "enable_prefix_caching": False,
            "dtype": "float32",
            "kv-cache-memory-bytes": "2GiB",
        }
    ),
}


@pytest.mark.parametrize(
    ("name", "without_yaml"), [("flags.yaml", False), ("flags.json", False), ("flags.json", True)]
)
def test_a_file_of_flags(tmp_path, monkeypatch, name, without_yaml):
    if without_yaml:
        monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / name
    path.write_text(FILES[name])
    expected = {
        "block_size": 32,
        "enable_prefix_caching": False,
        "dtype": "float32",
        "kv_cache_memory_bytes": 2 << 30,
    }
    assert settings("--config", str(path)) == expected
    assert settings("--block-size", "8", f"--config={path}", "--enable-prefix-caching") == {
        **expected,
        "block_size": 8,
        "enable_prefix_caching": True,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("blok-size: 32", "'blok-size' is no flag of quire test: did you mean --block-size?"),
        ("num_gpu_blocks_override: 3", "is no flag of quire test: use --num-blocks"),
        ("block-size: many", "block-size: invalid int value: 'many'"),
        ("block-size: [1, 2]", r"block-size is \[1, 2\]: write one number or text"),
        ("enforce-eager: 3", "enforce-eager is 3: write true or false"),
        ("- a\n- b", "must be a mapping from flags to values, not list"),
        ("{broken", "is no valid JSON"),
        ("a: [", "is no valid YAML"),
        ("[" * 5000, "is no valid YAML .maximum recursion depth exceeded"),
        ('{"a": ' + "[" * 5000, "is no valid JSON .maximum recursion depth exceeded"),
    ],
)
def test_a_wrong_file_of_flags_names_what_is_wrong(tmp_path, text, expected):
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        settings("--config", str(path))


def test_flags_of_groups_and_sub_commands_can_stand_in_a_file(tmp_path):
    made = Parser(prog="quire test")
    kind = made.add_subparsers(dest="kind").add_parser("fast")
    kind.add_config_flag()
    kind.group("logs").add_argument("--log-format", choices=("text", "json"))
    kind.exclusive().add_argument("--show", action="store_true")
    path = tmp_path / "flags.json"
    path.write_text('{"log_format": "json", "show": true}')
    arguments = made.parse(["fast", "--config", str(path)])
    assert (arguments.kind, arguments.log_format, arguments.show) == ("fast", "json", True)
    path.write_text('{"log_format": "xml"}')
    with pytest.raises(ConfigError, match=r"log_format: invalid choice: 'xml' \(choose from text, json\)"):
        made.parse(["fast", "--config", str(path)])


def test_what_a_flag_takes_as_json_is_a_mapping_in_a_file(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("speculative-config: {method: ngram}")
    assert json.loads(settings("--config", str(path))["speculative_config"]) == {"method": "ngram"}


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        settings("--config", "nowhere.yaml")


def test_lines_that_are_no_yaml_are_named(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("a: 1\n  b: 2")
    with pytest.raises(ConfigError, match=r"is no valid YAML .*line 2"):
        settings("--config", str(path))


def test_repeated_flags_replace_those_of_a_file(tmp_path):
    path = tmp_path / "flags.json"
    path.write_text('{"stop": ["a", "b"]}')
    made = Parser()
    made.add_config_flag()
    made.add_argument("--stop", action=Collect)
    assert made.parse(["--config", str(path)]).stop == ("a", "b")
    assert made.parse(["--config", str(path), "--stop", "c", "--stop", "d"]).stop == ["c", "d"]


# sampling

WORDS = """--max-tokens 9 --temperature 0.5 --top-k 3 --stop a --stop b --stop-token-id 7 --ignore-eos --n 2
--no-skip-special-tokens --logprobs 4 --bad-word no --seed 1"""
NOT_FLAGS = {"bad_words_token_ids", "allowed_token_ids", "structured"}  # structured_flags.py has the last


def sampling(*words: str, default: SamplingParams | None = None) -> SamplingParams:
    made = Parser()
    add_sampling_flags(made)
    return sampling_from(made.parse(words), default or SamplingParams())


def test_sampling_flags_become_parameters_over_the_models_own():
    found = sampling(
        *shlex.split(WORDS),
        "--logit-bias",
        '{"3": -1}',
        default=SamplingParams(top_p=0.7, temperature=0.1),
    )
    assert found == SamplingParams(
        max_tokens=9, temperature=0.5, top_k=3, stop=("a", "b"), stop_token_ids=(7,), ignore_eos=True, n=2,
        skip_special_tokens=False, logprobs=4, bad_words=("no",), seed=1, logit_bias={3: -1.0}, top_p=0.7,
    )  # fmt: skip


def test_every_sampling_parameter_has_a_flag():
    made = Parser()
    add_sampling_flags(made)
    names = {action.dest for action in made._actions}
    assert {field.name for field in fields(SamplingParams)} - NOT_FLAGS <= names


def test_contradictory_sampling_is_refused():
    with pytest.raises(InvalidRequest, match="n=2 with temperature=0"):
        sampling("--n", "2", "--temperature", "0")


def test_ranks_have_the_short_flags_that_people_know():
    assert settings("-tp", "2", "-pp", "3") == {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}

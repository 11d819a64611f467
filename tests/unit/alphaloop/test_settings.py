from __future__ import annotations

import codecs
import math
import re
import tomllib
from pathlib import Path

import pytest

from alphaloop.contract import settings_reference
from alphaloop.errors import ConfigError
from alphaloop.settings import (
    Settings,
    TaskSettings,
    TasksFile,
    find_configs,
    load_settings,
)
from alphaloop.settings.load import PLAIN_ENV
from alphaloop.settings.processes import RESERVED
from alphaloop.settings.section import Section

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A folder with the least that settings need."""
    (tmp_path / "tasks.toml").write_text('[tasks.code]\ndescription = "Code"\n', encoding="utf-8")
    return tmp_path


def add(configs: Path, name: str, text: str) -> Path:
    (configs / f"{name}.toml").write_text(text, encoding="utf-8")
    return configs


def test_the_repositorys_own_configs_load_and_name_only_what_exists() -> None:
    settings = load_settings(CONFIGS)
    assert settings.tasks["code"].description
    assert load_settings(CONFIGS, profile="local").kafka.session_timeout_ms == 6000


def test_the_files_say_the_defaults() -> None:
    # Whoever deletes a line must get what the line said.
    said, default = load_settings(CONFIGS), Settings()
    assert said.worker == default.worker
    assert said.policy == default.policy
    assert said.scheduler == default.scheduler
    assert said.models == default.models


def test_files_then_profile_then_overrides_then_environment(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(configs, "worker", "[worker]\nbatch_size = 2\nlease_s = 7\nmax_attempts = 5\nmax_step_s = 99\n")
    add(configs, "near", "[worker]\nlease_s = 8\nmax_attempts = 6\nmax_step_s = 98\n")
    monkeypatch.setenv("ALPHALOOP_WORKER__MAX_STEP_S", "96")
    settings = load_settings(configs, profile="near", overrides={"worker": {"max_attempts": 7, "max_step_s": 97}})
    worker = settings.worker
    assert (worker.batch_size, worker.lease_s, worker.max_attempts, worker.max_step_s) == (2, 8.0, 7, 96.0)


@pytest.mark.parametrize(
    ("variable", "value", "path"),
    [
        ("KAFKA_BOOTSTRAP_SERVERS", "a:1,b:2", "kafka.bootstrap_servers"),
        ("KAFKA_HOME", "/opt/kafka", "embedded.kafka_home"),
        ("ALPHALOOP_MODELS__TARGET__SOURCE", "/models/x", "models.target.source"),
        ("ALPHALOOP_DATA_DIR", "/data", "data_dir"),
        ("ALPHALOOP_TASKS__CODE__DESCRIPTION", "other", "tasks.code.description"),
    ],
)
def test_the_environment_reaches_every_depth(
    configs: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, path: str
) -> None:
    monkeypatch.setenv(variable, value)
    node: object = load_settings(configs)
    for part in path.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert str(node) == value


@pytest.mark.parametrize(
    ("name", "text", "said", "hint"),
    [
        ("worker", "[worker]\nbatchsize = 2\n", "worker.batchsize", "batch_size"),
        ("worker", "[wroker]\nbatch_size = 2\n", "wroker", "worker"),
        ("models", "[models.target]\nsourcee = 'x'\n", "models.target.sourcee", "source"),
        (
            "models",
            "[models.drafters.lookup]\nnum_branchs = 2\n",
            "models.drafters.lookup.num_branchs:",
            "num_branches",
        ),
        ("models", "[models.drafters.s]\nmethod='draft_model'\nsourc='x'\n", "models.drafters.s.sourc:", "source"),
        ("models", "[models.drafters.s]\nmethod='draft_model'\n", "models.drafters.s.source", "configs explains"),
        ("models", "[models.drafters.s]\nmethod='draft'\n", "models.drafters.s: Expected method", "configs explains"),
        ("models", "[models.drafters.s]\nmethod='layer_skip'\n", "models.drafters.s.skip_layers", "configs explains"),
        ("tasks", "[tasks.code]\nmax_token = 2\n", "tasks.code.max_token", "max_tokens"),
        ("worker", "[worker]\nbatch_size = 0\n", "worker.batch_size", "configs explains"),
        ("worker", "[worker]\nbatch_size = 'two'\n", "worker.batch_size", "configs explains"),
        ("tasks", "[tasks.'Bad Name']\n", "Bad Name", ""),
        ("worker", "batch_size 2", "worker.toml: expected TOML", ""),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_a_hint(configs: Path, name: str, text: str, said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(add(configs, name, text))
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALPHALOOP_WROKER__BATCH_SIZE", "2"),
        ("ALPHALOOP_WORKER__BATCHSIZE", "2"),
        ("ALPHALOOP_WORKER__BATCH_SIZE", "two"),
        ("ALPHALOOP_KAFKA__RETRY_DELAYS_S", "1,4"),
        ("ALPHALOOP_WORKER", "{not json"),
    ],
)
def test_a_wrong_variable_is_refused(configs: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError):
        load_settings(configs)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_no_setting_is_infinite(value: float) -> None:
    """Such as `interval_s = inf` for never, of which no time can be reckoned."""
    tried = 0
    for section, found in Settings.model_fields.items():
        if isinstance(default := found.default, Section):
            for name, field in type(default).model_fields.items():
                if field.annotation in (float, float | None):
                    with pytest.raises(ConfigError, match=rf"{section}\.{name}: .*finite number"):
                        load_settings(overrides={section: {name: value}})
                    tried += 1
    assert tried > 10


def test_a_file_that_cannot_be_read_is_named_and_a_byte_order_mark_is_passed_over(configs: Path) -> None:
    file = configs / "scheduler.toml"
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/self/mem")  # root, too, reads nothing there
    with pytest.raises(ConfigError, match=r"scheduler\.toml: expected TOML, found: .*error"):
        load_settings(configs)
    file.unlink()
    file.mkdir()  # as Docker makes one where the file to be mounted is missing
    with pytest.raises(ConfigError, match=r"scheduler\.toml: expected TOML, found: .*Is a directory"):
        load_settings(configs)
    file.rmdir()
    file.write_bytes(codecs.BOM_UTF8 + b"[scheduler]\ninterval_s = 4321\n")
    assert load_settings(configs).scheduler.interval_s == 4321


def test_a_missing_folder_or_profile_is_named(configs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_settings(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="staging"):
        load_settings(configs, profile="staging")


def test_secrets_are_never_shown(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("ALPHALOOP_KAFKA__SASL_PASSWORD", "hunter2")
    settings = load_settings(configs)
    assert settings.postgres.url.get_secret_value().startswith("postgresql://u:hunter2@")
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump_json()}"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_property_that_promises_rest_on_is_refused_with_the_reason(configs: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^kafka\.extra\.{re.escape(name)}: ") as caught:
        load_settings(configs, overrides={"kafka": {"extra": {name: "1", "sasl.password": "hunter2"}}})
    assert RESERVED[name] in caught.value.message
    assert "hunter2" not in str(caught.value)


def test_tasks_are_read_again_under_their_profile_and_environment_and_what_is_wrong_changes_nothing(
    configs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(configs, "local", "[tasks.sql]\nweight = 2.0\n")
    monkeypatch.setenv("ALPHALOOP_TASKS__CODE__MAX_TOKENS", "7")
    file, start = TasksFile(configs, "local"), load_settings(configs, profile="local")
    assert file.applied_to(start) is start
    bound = 'default_model = "a"\n[tasks.code]\nmax_tokens = 8\n[tasks.sql]\nmodel = "b"\n'
    path = add(configs, "tasks", bound) / "tasks.toml"
    newest = file.newest(start.bindings)
    assert (newest.tasks["code"].max_tokens, newest.tasks["sql"].weight) == (7, 2.0)
    assert (newest.target_of("code"), newest.target_of("sql")) == ("a", "b")
    assert file.applied_to(start).bindings == newest
    for breaks in (lambda: path.write_text("[tasks", encoding="utf-8"), path.unlink):
        breaks()
        assert file.newest(start.bindings) is newest
    add(configs, "tasks", "[tasks.code]\n")
    gone = file.newest(start.bindings)
    assert (gone.default_model, gone.target_of("sql")) == ("a", "a"), "no worker may begin to read everything"
    assert [getattr(one, "action", "") for one in caplog.records if one.levelname != "INFO"] == [
        *("tasks_unreadable", "tasks_unreadable", "default_model_gone")
    ]


def test_a_task_with_a_model_needs_a_target_for_all_other_tasks(configs: Path) -> None:
    add(configs, "tasks", '[tasks.sql]\nmodel = "b"\n')
    with pytest.raises(
        ConfigError, match=r"^default_model: Expected the target of all other tasks.*\[tasks\.sql\]"
    ) as caught:
        load_settings(configs)
    assert "models.target.name" in (caught.value.hint or "")
    add(configs, "tasks", 'default_model = "a"\n[tasks.sql]\nmodel = "b"\n')
    assert load_settings(configs).bindings.targets == ("a", "b")


def test_the_checkouts_configs_are_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_configs(None) == CONFIGS


def test_the_reference_names_every_setting_of_every_file() -> None:
    page = settings_reference()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    for file in CONFIGS.glob("*.toml"):
        for section in tomllib.loads(file.read_text(encoding="utf-8")).values():
            leaves = {name for name, value in section.items() if not isinstance(value, dict)}
            assert leaves <= rows, file
    assert {"bootstrap_servers", "sasl_password", "min_probability", "probe_prompts", "kafka_home", "data_dir"} <= rows
    assert "number of slots: sequences that run at once" in page
    assert " | unset | unset: an embedded broker is started or found |" in page


def models_of(**endpoints: dict[str, object]) -> dict[str, object]:
    """Of servers at these endpoints."""
    known = {name: {"kind": "vllm", "url": "http://localhost:8000", **found} for name, found in endpoints.items()}
    return {"target": {"engine": "server"}, "endpoints": known}


ENDPOINT = '[models.endpoints.plain]\nkind = "vllm"\nurl = "http://gpu-1:8000/v1"\n'


def test_a_generation_config_is_only_taken_of_a_model_that_is_here(configs: Path) -> None:
    target = "[models.target]\nuse_generation_config = true\n"
    assert load_settings(add(configs, "models", target)).models.target.use_generation_config
    with pytest.raises(ConfigError, match=r"only with target.engine own.*set temperature, top_p … in \[tasks.NAME\]"):
        load_settings(add(configs, "models", f'{target}engine = "server"\n{ENDPOINT}'))


def test_an_endpoint_has_a_name_and_its_key_may_come_from_a_variable(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(configs, "models", ENDPOINT)
    monkeypatch.setenv("ALPHALOOP_MODELS__ENDPOINTS__PLAIN__API_KEY", "hunter2")
    settings = load_settings(configs)
    found = settings.models.endpoints["plain"]
    assert (found.kind, found.url, found.model) == ("vllm", "http://gpu-1:8000/v1", None)
    assert found.api_key.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'kind = "vlm"',
            "models.endpoints.plain.kind: Input should be 'vllm', 'sglang', 'llama_cpp', 'tensorrt_llm' or 'openai'",
        ),
        ('url = "gpu-1:8000"', "models.endpoints.plain.url: Value error, expected http:// or https:// and a host"),
        ('url = "http://me:hunter2@gpu"', "models.endpoints.plain.url: Value error, expected no name or password"),
        ('api_key = "hunter2 "', "models.endpoints.plain.api_key: Value error, expected printable ASCII"),
        ("api_key = 7", "models.endpoints.plain.api_key: Input should be a valid string"),
        ("answer_s = 0", "models.endpoints.plain.answer_s: Input should be greater than 0; found 0"),
        ("anser_s = 5", "models.endpoints.plain.anser_s: no such setting\nhint: did you mean answer_s"),
    ],
)
def test_a_wrong_endpoint_is_refused_with_its_path_and_without_its_secrets(configs: Path, line: str, said: str) -> None:
    name = line.split(" ")[0]
    kept = "".join(f"{other}\n" for other in ENDPOINT.splitlines() if not other.startswith(f"{name} ="))
    add(configs, "models", f"{kept}{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(configs)
    assert str(caught.value).startswith(said)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "given", "said"),
    [
        ("postgres", {"url": ["hunter2"]}, r"postgres\.url"),
        ("models", models_of(plain={"api_key": "hunter2", "drafter": "ngram"}), "found kind = 'vllm'"),
    ],
)
def test_a_value_or_a_table_that_is_wrong_as_a_whole_is_not_shown(section: str, given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings(overrides={section: given})
    assert "hunter2" not in str(caught.value)


_FIXED = {"drafter": "lookup", "num_draft_tokens": 4}


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        ({}, r"expected \[models\.endpoints\.NAME\]"),
        ({"one": {"drafter": "ngram"}}, "expected drafter and num_draft_tokens together"),
        ({"one": {"num_draft_tokens": 4}}, "expected drafter and num_draft_tokens together"),
        ({"one": {"switches_drafts": True}}, "expected switches_drafts only with kind"),
        (
            {"one": {**_FIXED, "switches_drafts": True, "metrics_url": "http://gpu/metrics"}},
            "expected switches_drafts without metrics_url",
        ),
        ({"one": {**_FIXED, "kind": "sglang", "switches_drafts": True}}, "expected switches_drafts only with kind"),
        ({"one": {**_FIXED, "varies_drafts": True}}, "expected varies_drafts only with kind"),
        ({"one": {"kind": "sglang", "varies_drafts": True}}, "expected varies_drafts only with kind"),
        (
            {"one": {**_FIXED, "kind": "sglang", "varies_drafts": True, "metrics_url": "http://gpu/metrics"}},
            "expected varies_drafts without metrics_url",
        ),
        (
            {"one": {**_FIXED, "kind": "sglang"}, "two": {**_FIXED, "kind": "sglang", "varies_drafts": True}},
            "expected varies_drafts at all endpoints of the drafter lookup or at none, found it at two and not at one",
        ),
        (
            {"one": _FIXED, "two": {**_FIXED, "num_draft_tokens": 8}},
            "expected one num_draft_tokens of the drafter lookup, found 4 at one and 8 at two",
        ),
        ({"one": {**_FIXED, "lookup_drafter": "ours"}}, "expected lookup_drafter only with switches_drafts = true"),
        (
            {"one": {**_FIXED, "switches_drafts": True, "lookup_drafter": "lookup"}},
            "and another name than the drafter's",
        ),
        (
            {
                "one": {**_FIXED, "drafter": "a", "switches_drafts": True, "lookup_drafter": "lookup"},
                "two": {**_FIXED, "num_draft_tokens": 8},
            },
            "expected one num_draft_tokens of the drafter lookup, found 4 at one and 8 at two",
        ),
        ({"one": {"metrics_url": "http://gpu/metrics"}}, "expected metrics_url with a drafter or a reserve only"),
        (
            {"one": _FIXED, "two": {**_FIXED, "metrics_url": "http://gpu/metrics"}},
            "expected metrics_url at all endpoints of the drafter lookup or at none, found it at two and not at one",
        ),
    ],
)
def test_servers_that_contradict_each_other_are_refused(endpoints: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(overrides={"models": models_of(**endpoints)})


@pytest.mark.parametrize(
    ("others", "num_vanilla", "num_drafting", "least_k"),
    [({}, 1, 1, 1), ({"plain": {}}, 2, 1, 1), ({"fixed": _FIXED}, 1, 2, 4)],
)
def test_an_endpoint_that_switches_drafts_is_one_of_either_route_and_has_every_length(
    others: dict[str, dict[str, object]], num_vanilla: int, num_drafting: int, least_k: int
) -> None:
    """But a drafter has the lengths that all its endpoints can follow."""
    models = load_settings(overrides={"models": models_of(both={**_FIXED, "switches_drafts": True}, **others)}).models
    drafter = models.drafter_state("lookup", "r1")
    assert (drafter.num_endpoints, drafter.num_vanilla_endpoints) == (num_drafting, num_vanilla)
    assert (drafter.num_places, drafter.num_vanilla_places) == (16 * num_drafting, 16 * num_vanilla)
    assert (drafter.least_draft_tokens, drafter.max_draft_tokens) == (least_k, 4)


def test_look_up_beside_a_drafter_is_a_drafter_of_its_own_there() -> None:
    both = {**_FIXED, "drafter": "small", "switches_drafts": True, "lookup_drafter": "lookup"}
    models = load_settings(overrides={"models": models_of(both=both, other={**both, "lookup_drafter": None})}).models
    assert models.drafter_names == ("small", "lookup")
    found = {name: models.drafter_state(name, "r1") for name in models.drafter_names}
    assert {name: state.num_endpoints for name, state in found.items()} == {"small": 2, "lookup": 1}
    assert {(state.least_draft_tokens, state.max_draft_tokens) for state in found.values()} == {(1, 4)}
    with pytest.raises(KeyError):
        models.drafter_state("ngram", "r1")


@pytest.mark.parametrize("section", [None, *Settings.model_fields])
def test_an_empty_variable_is_unset(section: str | None, configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLAIN_ENV:
        monkeypatch.delenv(name, raising=False)
    expected = load_settings(configs)
    names = [f"ALPHALOOP_{section}"] if section else [*PLAIN_ENV, "ALPHALOOP_CONFIGS", "ALPHALOOP_PROFILE"]
    model = Settings.model_fields[section].annotation if section else None
    names += [f"ALPHALOOP_{section}__{field}" for field in getattr(model, "model_fields", ())]
    for name in names:
        monkeypatch.setenv(name.upper(), "")
    assert load_settings(configs) == expected


def read_task(configs: Path, settings: str) -> TaskSettings:
    return load_settings(add(configs, "tasks", f"[tasks.code]\n{settings}\n")).tasks["code"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ('vanilla_patterns = ["a*", ""]', r"tasks\.code\.vanilla_patterns\.1: .*at least 1 character"),
        (f'vanilla_patterns = ["{"a" * 501}"]', r"tasks\.code\.vanilla_patterns\.0: .*at most 500 characters"),
        (f"vanilla_patterns = {['a'] * 101}", r"tasks\.code\.vanilla_patterns: .*at most 100 items"),
        ('vanilla_patterns = "a*"', r"tasks\.code\.vanilla_patterns: .*tuple"),
        ("weight = 0.0", r"tasks\.code\.weight: .*greater than or equal to 0\.01; found 0\.0"),
        ("weight = -1", r"tasks\.code\.weight: .*greater than or equal to 0\.01; found -1"),
        ("weight = 1e3", r"tasks\.code\.weight: .*less than or equal to 100; found 1000"),
        ("weight = nan", r"tasks\.code\.weight: .*found nan"),
        ('weight = "heavy"', r"tasks\.code\.weight: .*valid number.*; found 'heavy'"),
        ("target_time_per_token_ms = 0", r"tasks\.code\.target_time_per_token_ms: .*greater than 0"),
        ("target_time_to_first_token_ms = -1.0", r"tasks\.code\.target_time_to_first_token_ms: .*greater than 0"),
        (
            "target_time_per_token_ms = 50\ntarget_time_to_first_token_ms = 900",
            r"tasks\.code: Expected one target, target_time_per_token_ms or target_time_to_first_token_ms",
        ),
    ],
)
def test_a_wrong_setting_of_a_task_is_named_with_what_is_wrong(configs: Path, settings: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        read_task(configs, settings)
    assert raised.value.hint
    assert len(raised.value.message) < 400


def test_a_target_may_stand_alone(configs: Path) -> None:
    by_token, by_first = "target_time_per_token_ms = 50", "target_time_to_first_token_ms = 900"
    assert read_task(configs, by_token) != read_task(configs, by_first)

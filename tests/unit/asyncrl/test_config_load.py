"""Configuration: what a user may write, and what they are told when it is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.explain import explain
from asyncrl.config.keys import all_keys
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.methods import GaeConfig
from asyncrl.config.rules import REQUIRES
from asyncrl.errors import UserError

ROOT = Path(__file__).parents[3]
MINIMAL = """\
run_dir: runs/x
model: {path: some/model}
data:
  train_files: [a.parquet]
reward:
  functions:
    - {function: exact_match}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


# --- what is accepted -----------------------------------------------------------------------------


def test_yaml_1_2_exponents_are_numbers_and_words_and_dates_are_text(tmp_path: Path) -> None:
    text = MINIMAL.replace("[a.parquet]", "[no, 2024-01-01, on]")
    text += "alignment: {rows: 0}\n"
    text += "rollout: {engine: scripted, engine_args: {a: no, b: 12:30, c: 0o7}}\nlearner: {optim: {lr: 1e-6}}\n"
    data = load_config(write(tmp_path, text), ["critic.optim.lr=1E-6"])
    assert data.data.train_files == ("no", "2024-01-01", "on")
    assert data.rollout.engine_args == {"a": "no", "b": "12:30", "c": "0o7"}
    assert data.learner.optim.lr == data.critic.optim.lr == 1e-6


def test_a_partial_section_keeps_the_defaults_around_it(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "critic: {optim: {weight_decay: 0.5}}\nlearner:\n"))
    assert (config.model.path, config.batch.group_size, config.learner.optim.lr) == ("some/model", 8, 1e-6)
    assert (config.critic.optim.lr, config.critic.optim.weight_decay) == (1e-5, 0.5)
    assert config.learner.max_staleness == 2


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("batch.group_size=16", lambda c: c.batch.group_size, 16),
        ("learner.optim.betas=[0.8, 0.9]", lambda c: c.learner.optim.betas, (0.8, 0.9)),
        ("data.train_files=a.jsonl,b.jsonl", lambda c: c.data.train_files, ("a.jsonl", "b.jsonl")),
        ("data.train_files.1=b.parquet", lambda c: c.data.train_files, ("a.parquet", "b.parquet")),
        ("run_dir=123", lambda c: c.run_dir, "123"),
        ("data.system_prompt=Say: yes, #1", lambda c: c.data.system_prompt, "Say: yes, #1"),
        ("data.train_files+=b.parquet", lambda c: c.data.train_files, ("a.parquet", "b.parquet")),
        ("data.train_files+=[a.parquet, b.parquet]", lambda c: c.data.train_files, ("a.parquet", "b.parquet")),
        ("algorithm.selections += m2po", lambda c: c.algorithm.selections, ("m2po",)),
        ("reward.functions.0.weight=2", lambda c: c.reward.functions[0].weight, 2.0),
        ("reward.functions.0.kwargs.deep.er=1e-3", lambda c: c.reward.functions[0].kwargs, {"deep": {"er": 0.001}}),
    ],
)
def test_overrides_take_the_type_of_their_key(minimal: Path, override: str, get: Any, value: Any) -> None:
    got = get(load_config(minimal, [override]))
    assert got == value
    assert type(got) is type(value)


def test_dumped_configuration_loads_back_equal(minimal: Path, tmp_path: Path) -> None:
    config = load_config(
        minimal,
        [
            "run_dir=no",
            "data.system_prompt=two\nlines: {x} # not a comment",
            "data.val_files=[yes, '1.0', null.jsonl]",
            "rollout.engine=scripted",
            "alignment.rows=0",
            "rollout.engine_args={a: 1e-7, b: [true, 'off', ~], c: {d: '0x1f'}}",
            "learner.optim.lr=1e-12",
        ],
    )
    text = dump_config(config)
    assert load_config(write(tmp_path, text)) == config
    assert yaml.safe_load(text)["batch"]["group_size"] == 8, "plain PyYAML reads it, too"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("batch.group_sise", ": did you mean batch.group_size?"),
        ("batch.max_staleness", ": did you mean learner.max_staleness?"),
        ("worker.actor.optim.lr", ": did you mean learner.optim.lr?"),
        ("reward.functions.0.wieght", ": did you mean reward.functions.N.weight?"),
        ("num_generations", ". docs/migration.md has other frameworks' names"),
        ("algorithm.kl_coef", ": did you mean algorithm.kl_loss_coef or algorithm.kl_reward_coef?"),
        *(
            (
                f"{section}learning_rate",
                f": did you mean {found}.lr or {found}.vision_tower_lr or {found}.connector_lr?",
            )
            for section, found in (
                ("", "learner.optim"),
                ("learner.", "learner.optim"),
                ("critic.", "critic.optim"),
                ("trainer.", "learner.optim"),
            )
        ),
        ("trainer.data_order", ": did you mean trainer.seed?"),
        ("evaluation.initial_policy", ": did you mean evaluation.before_training?"),
        ("algorithm.clip_high", ": did you mean algorithm.clip_ratio_high?"),
        ("rollout.hf.dtype", ": rollout.engine=hf has no section of its own, only rollout.engine_args"),
        ("algorithm.top_entrop", ": did you mean algorithm.top_entropy or algorithm.top_entropy.fraction?"),
        (
            "environment.tools",
            ": an environment's own settings stand in environment.config, such as environment.config.functions",
        ),
        ("algorithm.gae.lambda", ": algorithm.gae exists only with algorithm.adv_estimator=gae (it is grpo)"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_meant(minimal: Path, key: str, said: str) -> None:
    assert f"unknown key {key}{said} [override {key}=4]" in refusal(minimal, f"{key}=4")


def test_keys_of_chosen_methods_are_suggested_first(minimal: Path) -> None:
    clip = "unknown key algorithm.clip_ratio: did you mean algorithm.clip_ratio_c or algorithm.clip_ratio_low or"
    assert f"{clip} algorithm.clip_ratio_high?" in refusal(minimal, "algorithm.clip_ratio=0.2")
    chosen = refusal(
        minimal, "algorithm.top_entropy.share=1", "algorithm.selections+=top_entropy", "algorithm.fracton=1"
    )
    assert "unknown key algorithm.fracton: did you mean algorithm.top_entropy.fraction?" in chosen


def test_a_section_of_what_is_not_chosen_is_refused_with_what_to_type(minimal: Path) -> None:
    only = "algorithm.top_entropy exists only with algorithm.selections+=top_entropy (it is empty). Set that, or leave"
    assert only in refusal(minimal, "algorithm.top_entropy.fraction=0.5")
    load_config(minimal, ["algorithm.top_entropy.fraction=0.5", "algorithm.selections+=top_entropy"])


def test_all_problems_come_at_once_with_their_places(tmp_path: Path) -> None:
    text = """\
run_dir: runs/x
model: {}
data:
  train_files: [a.parquet]
  shuffel: true
batch:
  group_size: many
"""
    path = write(tmp_path, text)
    first, *problems = refusal(path, "rollout.n=4", "learner.optim.lr=-1").splitlines()
    assert "5 problems" in first
    assert sorted(problems) == [
        f"- batch.group_size is 'many': expected whole number > 0 [{path} line 7]",
        "- learner.optim.lr is -1: expected number > 0 [override learner.optim.lr=-1]",
        f"- model.path is missing. Add it to {path}, or give model.path=VALUE",
        f"- unknown key data.shuffel: did you mean data.shuffle? [{path} line 5]",
        "- unknown key rollout.n. docs/migration.md has other frameworks' names [override rollout.n=4]",
    ]


def test_numbers_that_do_not_fit_each_other(minimal: Path) -> None:
    message = refusal(minimal, "batch.group_size=1", "algorithm.updates_per_batch=3", "batch.tokens_per_microbatch=100")
    assert "batch.group_size is 1: grpo needs at least 2" in message
    assert "must be a multiple of algorithm.updates_per_batch (3)" in message
    assert "over batch.tokens_per_microbatch = 100" in message
    assert load_config(minimal, ["reinforce_plus_plus", "batch.group_size=1"]).batch.group_size == 1


def test_settings_that_need_each_other_are_keys_of_the_core(minimal: Path) -> None:
    conditions = [condition for has, needs, _ in REQUIRES for condition in (has, needs)]
    assert {re.split("[=>]", condition)[0] for condition in conditions} <= all_keys().keys()
    said = refusal(minimal, "reference.reset_optimizer=true")
    assert "reference.reset_optimizer is true and reference.reset_every_steps is 0: the optimiser is reset" in said
    assert "Raise reference.reset_every_steps, or change reference.reset_optimizer" in said


def test_a_trajectory_that_loses_its_old_tokens_is_not_judged_as_a_whole(minimal: Path) -> None:
    stale, kind = "learner.on_stale=mask", "algorithm.correction.kind=sequence_tis"
    message = refusal(minimal, stale, kind, "algorithm.correction.masks=[{kind: veto}, {kind: dppo_tv}]")
    assert "computed from all of them: algorithm.correction.kind sequence_tis, the veto mask. Set" in message
    message = refusal(minimal, stale, "algorithm.policy_loss=gspo")
    assert "computed from all of them: algorithm.policy_loss gspo. Set learner.on_stale=drop or wait" in message
    for fine in (
        (stale, "algorithm.correction.masks=[{kind: dppo_tv}]"),
        (stale, "algorithm.policy_loss=cispo"),
        ("learner.on_stale=drop", kind),
        ("learner.on_stale=drop", "algorithm.policy_loss=gspo"),
    ):
        load_config(minimal, fine)


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("batch: {group_size: true}", "batch.group_size is True: expected whole number > 0"),
        ("batch: 8", "batch is 8: expected a mapping with keys of prompts_per_step"),
        ("learner: {optim: {lr: .nan}}", "learner.optim.lr is nan: expected number > 0"),
        ("learner: {optim: {betas: [0.9]}}", "learner.optim.betas"),
        ("data.shuffle: true", "dots are for overrides"),
        ("learner: {engine: fsdp}", "learner.engine is 'fsdp', and there are torch, fsdp2"),
        ("batch:\n  group_size: 4\n  group_size: 8", "group_size is given twice, first in line 9"),
        ("batch:\n\tgroup_size: 8", "never tabs"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, addition: str, expected: str) -> None:
    assert expected in refusal(write(tmp_path, MINIMAL + addition + "\n"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch.group_size", "has no `=`"),
        ("batch.group_size=", "batch.group_size is empty"),
        ("reward.functions.5.weight=1", "there is no such key or item"),
        ("run_dir.x=1", "there is no such key or item"),
        ("batch.group_size+=4", "batch.group_size is no list, and nothing can be added to it"),
    ],
)
def test_wrong_overrides_are_named(minimal: Path, override: str, expected: str) -> None:
    assert expected in refusal(minimal, override)


def test_a_missing_file_names_similar_ones(minimal: Path) -> None:
    assert "did you mean" in refusal(minimal.with_name("run.yml"))
    assert "does not exist, only" in refusal(minimal.parent / "no" / "run.yaml")


# --- what is explained ----------------------------------------------------------------------------


def test_a_dry_run_explains_the_derived_numbers(minimal: Path) -> None:
    overrides = "batch.prompts_per_step=16 batch.group_size=4 learner.max_staleness=3 algorithm.updates_per_batch=2"
    config = load_config(minimal, [*overrides.split(), "data.max_response_length=100", "trainer.total_epochs=3"])
    batches = explain(config, num_rows=100).partition("# Batches\n")[2]
    figures = [re.split(r"  +", line)[1] for line in batches.splitlines()]
    assert figures == ["16", "4", "8192", "64", "2", "8", "64", "6400", "6.25", "19", "38"]
    assert config.total_steps(100) == 19


def test_a_dry_run_shows_what_differs_from_the_defaults_and_all_of_it_on_demand(minimal: Path) -> None:
    config = load_config(minimal, ["gspo", "batch.group_size=4", "rollout.temperature=1.0", "data.on_bad_row=stop"])
    changed, whole = (explain(config, 100, whole=whole).partition("# Algorithm")[0] for whole in (False, True))
    assert "on_bad_row: stop" in changed
    assert "group_size: 4" in changed
    assert "policy_loss: gspo" in changed
    assert "--all" in changed.splitlines()[0]
    assert "temperature" not in changed, "it is the default"
    assert len(changed.splitlines()) < 40 < 200 < len(whole.splitlines())
    written = minimal.with_name("changed.yaml")
    written.write_text(changed)
    assert load_config(written) == config


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("asyncrl.config.load, asyncrl.config.explain, protocol", "torch transformers vllm datasets pyarrow"),
        ("asyncrl.rewards.worker", "torch numpy pydantic asyncio transformers datasets"),
    ],
)
def test_light_modules_load_nothing_heavy(modules: str, heavy: str) -> None:
    code = f"import sys, {modules}; print({set(heavy.split())} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_method_named_by_an_override_brings_its_defaults(minimal: Path, tmp_path: Path) -> None:
    """Also in place of what a run's own file says, where every key is written out."""
    gspo = load_config(minimal, ["algorithm.policy_loss=gspo"]).algorithm
    assert (gspo.clip_ratio_low, gspo.loss_agg_mode) == (3e-4, "seq-mean-token-mean")
    whole = tmp_path / "whole.yaml"
    whole.write_text(dump_config(load_config(minimal)))
    assert load_config(whole, ["algorithm.policy_loss=gspo"]).algorithm == gspo
    assert (
        load_config(whole, ["algorithm.policy_loss=gspo", "algorithm.clip_ratio_low=0.1"]).algorithm.clip_ratio_low
        == 0.1
    )
    whole.write_text(dump_config(load_config(minimal, ["algorithm.adv_estimator=dr_grpo"])))
    assert load_config(whole).algorithm.loss_agg_mode == "seq-mean-token-sum-norm"
    assert load_config(whole, ["algorithm.adv_estimator=grpo"]).algorithm == load_config(minimal).algorithm


# --- overlays -------------------------------------------------------------------------------------


def test_an_overlay_is_a_few_keys_over_a_file_in_the_order_of_the_command_line(minimal: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(
        "algorithm: {policy_loss: gspo, adv_estimator: gae, gae: {lam: 0.5}}\nlearner:\n"
        "rollout: {engine_args: {a: {b: 1}}}\n"
    )
    words = ["algorithm.gae.critic_lam=0.9", str(overlay), "rollout.engine=scripted", "alignment.rows=0"]
    config = load_config(minimal, words)
    gae = config.algorithm.settings_of(GaeConfig)
    assert (gae.lam, gae.critic_lam) == (0.5, 0.9), "sections are not replaced"
    assert config.algorithm.clip_ratio_low == 3e-4, "a method that it names brings its defaults"
    assert config.rollout.engine_args == {"a": {"b": 1}}
    whole = write(tmp_path, dump_config(load_config(minimal)))
    assert load_config(whole, ["rloo", "algorithm.norm_adv_by_std=false"]).algorithm.adv_estimator == "rloo"
    algorithm = load_config(whole, [*words[1:], "grpo"]).algorithm
    assert (algorithm.policy_loss, algorithm.model_extra) == ("ppo", {}), "the last word counts"
    with pytest.raises(UserError, match=r"algorithm.gae exists only with .*=gae \(it is grpo\)"):
        load_config(whole, [*words, "grpo"])


def test_an_overlay_adds_to_a_list_what_is_not_there(minimal: Path, tmp_path: Path) -> None:
    once = load_config(minimal, ["dapo"])
    assert [part.function for part in once.reward.functions] == ["exact_match", "soft_overlong"]
    assert once.reward.accuracy_component == "exact_match"
    own = "reward.functions+={function: soft_overlong, weight: 0.5, kwargs: {buffer: 64}}"
    assert load_config(minimal, [own, "dapo"]).reward.functions[1].weight == 0.5
    whole = write(tmp_path, dump_config(once))
    assert load_config(whole, ["dapo"]) == once


def test_the_word_of_a_plug_ins_command_is_told_from_an_overlay(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.config.load.installed", lambda group: {"watch": None} if group == "commands" else {})
    assert "'watch' is a command, and begins a line of its own: asyncrl watch --help" in refusal(minimal, "watch")


def test_an_overlay_that_is_wrong_is_named_with_its_line(minimal: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("batch: {group_size: many}\ndata:\n  shuffel: true\nrun_dir: {a: 1}\n")
    said = refusal(minimal, str(overlay))
    assert f"batch.group_size is 'many': expected whole number > 0 [{overlay} line 1]" in said
    assert f"unknown key data.shuffel: did you mean data.shuffle? [{overlay} line 3]" in said
    assert "no configuration file none.yaml" in refusal(minimal, "none.yaml")
    assert "or the name of an algorithm or a task. Did you mean 'rloo'?" in refusal(minimal, "rlo")
    assert "Did you mean rollout.engine=scripted?" in refusal(minimal, "scripted")
    assert "Did you mean learner.engine=fsdp2?" in refusal(minimal, "fsdp2")

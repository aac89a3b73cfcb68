"""`asyncrl import-config`: what is in the table is translated, everything else is listed and ends with exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.cli import main
from asyncrl.config.keys import all_keys
from asyncrl.errors import UserError
from asyncrl_plugins.import_config.command import read_and_translate
from asyncrl_plugins.import_config.table import FRAMEWORKS, Given, Row, table_of, translate

EXPORTED = Path(__file__).parent / "exported"
FILES = {"verl": "verl.yaml", "easyr1": "easyr1.yaml", "rllava": "rllava.yaml", "trl": "trl.json"}
EXPECTED: dict[str, dict[str, Any]] = {
    "verl": {
        "algorithm.policy_loss": "gmpo",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.entropy_agg_mode": "token-mean",
        "algorithm.clip_ratio_high": 0.28,
        "algorithm.clip_ratio_c": None,  # geo_mean has no dual clip
        "algorithm.correction.kind": "none",
        "algorithm.updates_per_batch": 2,
        "batch.prompts_per_step": 512,
        "batch.group_size": 16,
        "data.on_bad_row": "skip",
        "data.train_files": ["/data/train.parquet"],
        "evaluation.every_steps": 0,
        "rollout.top_k": 0,
        "rollout.engine_args.gpu_memory_utilization": 0.5,
        "run_dir": "checkpoints/verl_examples/gsm8k",
        "trainer.save_limit": None,  # null there
    },
    "easyr1": {
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "batch.prompts_per_step": 512,
        "model.lora.target_modules": ["q_proj", "v_proj"],
        "model.min_pixels": 262144,
        "run_dir": "checkpoints/charts",
        "algorithm.clip_ratio_high": 0.3,  # a default of theirs
        "algorithm.kl_loss_coef": 0.01,  # by use_kl_loss
        "algorithm.kl_reward_coef": None,
        "algorithm.updates_per_batch": 4,
        "trainer.save_limit": None,  # -1 has no counterpart
    },
    "rllava": {
        "batch.prompts_per_step": 16,
        "batch.group_size": 5,
        "rollout.engine_args.gpu_memory_utilization": 0.4,
        "trainer.max_steps": 100,
        "trainer.save_limit": 3,
        "model.lora.rank": 8,  # by use_peft
        "algorithm.kl_loss_coef": 0.01,  # a default of theirs
        "learner.optim.lr_warmup_steps": 20,  # 0.05 of 100 learner steps, of 4 updates each
    },
    "trl": {
        "algorithm.adv_estimator": "lite_ppo",
        "algorithm.policy_loss": "cispo",
        "algorithm.clip_ratio_high": 4.0,  # a bound of the ratio there
        "algorithm.correction.kind": "sequence_mis",
        "learner.optim.lr_scheduler_type": "constant",
        "model.dtype": "bfloat16",
        "rollout.engine": "vllm",
        "trainer.max_steps": None,
        "trainer.total_epochs": 3,
    },
}
NOT_TRANSLATED = {
    "verl": {"critic.cliprange_value", "data.reward_fn_key", "custom_reward_function.path"},
    "easyr1": {"data.an_invention_of_mine", "worker.actor.ppo_epochs", "trainer.save_limit"},
    "rllava": {"actor.model.lora_dropout", "reward.reward_function"},
    "trl": {"an_invention_of_mine", "per_device_train_batch_size", "reward_funcs", "max_steps"},
}


def leaves(section: dict[str, Any], prefix: str = "") -> set[str]:
    return {
        name
        for key, value in section.items()
        if value is not None and value != {}
        for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"})
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_exported_configuration_is_translated_or_listed(framework: str) -> None:
    done = read_and_translate(EXPORTED / FILES[framework])
    assert done.table.framework == framework
    assert {key: done.settings.get(key) for key in EXPECTED[framework]} == EXPECTED[framework]
    listed = [key.key for part in (done.translated, done.left_out, done.not_translated) for key in part]
    assert sorted(listed) == sorted(leaves(yaml.safe_load((EXPORTED / FILES[framework]).read_text())))
    assert {key.key for key in done.not_translated} >= NOT_TRANSLATED[framework]
    assert all(key.note for key in done.left_out + done.not_translated)


def test_settings_of_a_method_that_is_not_chosen_are_left_out() -> None:
    for estimator, lam in (("gae", 0.9), ("grpo", None)):
        done = translate({"algorithm": {"adv_estimator": estimator, "lam": 0.9}}, table_of("rllava"))
        assert done.settings.get("algorithm.gae.critic_lam") == lam
        assert [key.note for key in done.left_out] == ["setting of a method that is not chosen"] * (lam is None)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_translation_says_what_it_lacks_and_replaces_no_file(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = EXPORTED / FILES[framework], tmp_path / "ours.yaml"
    assert main(["import-config", str(source), "-o", str(out)]) == 2
    printed = capsys.readouterr().out
    assert "NOT TRANSLATED" in printed
    assert "learner.max_staleness=0" in printed
    assert main(["import-config", str(source), "-o", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_configuration_of_table_keys_alone_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "theirs.json"
    source.write_text('{"worker": {"rollout": {"n": 4, "top_k": 20}}, "trainer": {"nnodes": 1, "max_steps": null}}')
    assert main(["import-config", str(source)]) == 0
    said = capsys.readouterr()
    ours = yaml.safe_load(said.out)
    assert (ours["batch"]["group_size"], ours["rollout"]["top_k"]) == (4, 20)
    assert ours["algorithm"]["clip_ratio_high"] == 0.3
    assert "worker.actor.clip_ratio_high: 0.3 -> algorithm.clip_ratio_high=0.3" in said.err.partition("leaves out")[2]
    assert "NOT TRANSLATED" not in said.err


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"trainer": {"project_name": "${name}"}}, "print the resolved configuration"),
        ({"algorithm": {"adv_estimator": "invented"}}, "gpg scales"),
        ({"algorithm": {"use_pf_ppo": True}}, "PF-PPO"),
        ({"actor_rollout_ref": {"rollout": {"n": 4, "invented": 1}}}, "not in the table"),
        (
            {
                "actor_rollout_ref": {
                    "actor": {"optim": {"warmup_style": "constant", "lr_scheduler_type": "cosine"}},
                }
            },
            "gives learner.optim.lr_scheduler_type another value: constant",
        ),
    ],
)
def test_what_is_not_translated_says_why(theirs: dict[str, Any], said: str) -> None:
    [key] = translate(theirs, table_of("verl")).not_translated
    assert said in key.note


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "PK\0\3: 1", "not valid YAML"),
        ("a.yaml", "- 1", "holds no configuration"),
        ("run.sh", "data.train_batch_size=8", "is a script, which is not read"),
        (
            "run",
            'set -x\nDATA=(\n    data.train_files=a\n)\npython3 -m verl.trainer.main_ppo "${DATA[@]}"',
            "bash .*run --cfg job",
        ),
        ("run.yaml", "#!/bin/bash\nworker: 1", "is a script"),
        ("run.txt", "worker: 1\ntorchrun --nproc_per_node 8 train.py config=a.yaml", "of TRL that of --config"),
        ("a.yaml", "only text", "holds no configuration"),
        ("a.yaml", "model: {path: m}", "its top-level keys are model"),
    ],
)
def test_other_files_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_and_translate(tmp_path / name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_of_a_table_are_values_of_the_schema(framework: str) -> None:
    table = table_of(framework)
    for key, row in ((key, row) for key, rows in table.names.items() for row in rows):
        given = [row.settings(theirs, Given({}, {})) for theirs in row.values or ()]
        for name, value in {(n, str(v)) for one in (*given, row.besides) for n, v in (one or {}).items()}:
            kind = all_keys()[name].type_text
            assert not kind.startswith("one of ") or value in kind, (key, name, value)


def test_a_row_keeps_its_rules() -> None:
    row, nothing = Row(("rollout.top_k",), replace={"-1": 0}, excluded=(-2,)), Given({}, {})
    assert row.settings(-1, nothing) == {"rollout.top_k": 0}
    assert row.settings(5, nothing) == {"rollout.top_k": 5}
    assert row.settings(-2, nothing) is None

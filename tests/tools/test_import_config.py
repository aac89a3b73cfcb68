"""`asyncrl import-config`: every key of another framework's configuration gets an answer, and the result loads."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml

from asyncrl.cli import main
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.keys import all_keys
from asyncrl.config.load import load_config
from asyncrl.environments.interface import Start
from asyncrl.environments.play import open_environment, play
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import load_reward
from asyncrl.tools.import_config.derived_rules import Verdict
from asyncrl.tools.import_config.foreign_config import read_foreign_config
from asyncrl.tools.import_config.hybrid_rules import gate
from asyncrl.tools.import_config.names import NAMES
from asyncrl.tools.import_config.rules import RULES, THEIR_DEFAULTS
from asyncrl.tools.import_config.translation import Import, translate
from asyncrl.tools.import_config.write import as_yaml
from tests.rigs.tiny import ROOT

HERE = ROOT / "tests" / "rigs"
IMPORTED = HERE / "imported"
BATCH_REWARD = """
def compute_score(rows, bonus=0.0):
    assert isinstance(rows, list)
    right = [row["response"] == row["ground_truth"] for row in rows]
    return [{"overall": float(is_right) + bonus, "accuracy": float(is_right)} for is_right in right]
"""


def verdicts(done: Import) -> dict[str, Verdict]:
    return {line.key: line.outcome.verdict for line in done.lines}


def imported(path: Path) -> Import:
    return translate(read_foreign_config(path))


@pytest.mark.parametrize("name", ["rllava.yaml", "easyr1.yaml"])
def test_every_key_has_an_answer(name: str) -> None:
    theirs = read_foreign_config(IMPORTED / name)
    done = translate(theirs)
    assert len(theirs.values) > 50
    assert {theirs.spelled(key) for key in theirs.values} <= {line.key for line in done.lines}
    silent = [line.key for line in done.lines if not line.outcome.settings and not line.outcome.text]
    assert silent == [], "what becomes no setting says why"
    unknown = [key for key, verdict in verdicts(done).items() if verdict == "unknown"]
    assert unknown == (["data.an_invention_of_mine"] if name == "easyr1.yaml" else [])


EXPECTED = {
    "rllava.yaml": {
        "batch.prompts_per_step": 16,
        "batch.group_size": 5,
        "model.min_pixels": 3136,
        "model.max_pixels": 4194304,
        "batch.tokens_per_microbatch": 2 * (512 + 256),
        "algorithm.updates_per_batch": 4,
        "learner.optim.lr_warmup_steps": 5 * 4,  # 5 % of 100 batches, four optimiser steps each
        "learner.max_staleness": 0,
        "model.lora.rank": 8,
        "algorithm.kl_loss_coef": 0.01,  # their default
        "algorithm.kl_estimator": None,  # their low_var_kl is k3, as here
        "rollout.engine_args.gpu_memory_utilization": 0.4,
        "trainer.save_freq": 0,
        "telemetry.trackers": ["tensorboard"],
        "run_dir": "runs/qwen2_vl_2b",
    },
    "easyr1.yaml": {
        "data.train_files": ["acme/charts@train"],
        "batch.tokens_per_microbatch": 4 * 1536,
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.clip_ratio_high": 0.3,
        "model.dtype": "bfloat16",  # their default, which no key says
        "algorithm.kl_loss_coef": 0.01,
        "algorithm.filters": ["zero_variance"],  # online_filtering
        "algorithm.filter_low": 0.01,
        "model.lora.target_modules": ["q_proj", "v_proj"],
        "rollout.top_k": 0,
        "rollout.tensor_parallel_size": 2,
        "run_dir": "checkpoints/charts",
    },
    "rllava.sh": {  # with its variables and the file that it names
        "batch.prompts_per_step": 32,
        "algorithm.updates_per_batch": 4,
        "algorithm.clip_ratio_high": 0.28,
        "model.path": "models/qwen",
        "model.lora.rank": None,
        "run_dir": "runs/shapes_grpo",
        "data.prompt_key": "problem",  # from the YAML file
    },
}
MISSING = {
    "easyr1.yaml": "learner.optim.lr_warmup_steps: 0.1 x",
    "rllava.sh": "data.train_files: it is ${DATA_ROOT}/shapes@train",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_keeps_its_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = imported(IMPORTED / name)
    assert {key: done.settings.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    assert name not in MISSING or any(missing.startswith(MISSING[name]) for missing in done.missing)
    without = {"easyr1.yaml": "worker.ref.fsdp.enable_full_shard", "rllava.sh": "--nproc_per_node"}
    assert verdicts(done)[without.get(name, "actor.fsdp.use_orig_params")] == "no counterpart"


ALGORITHMS = {
    "algorithm: {adv_estimator: gae, gamma: 0.9, lam: 0.95}\ntrainer: {critic_warmup: 3}\n"
    "critic: {cliprange_value: 0.2, optim: {lr: 1e-4}, model: {model_path: scorer}}": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 0.9,
        "algorithm.gae.lam": 0.95,
        "algorithm.gae.critic_lam": 0.95,
        "critic.warmup_steps": 3,
        "critic.clip_range": 0.2,
        "critic.optim.lr": 1e-4,
        "critic.path": "scorer",
    },
    "algorithm: {adv_estimator: gpg}\nactor: {policy_loss: {loss_mode: gpg}}": {
        "algorithm.adv_estimator": "gpg",
        "algorithm.gpg_valid": "nonzero_score",  # theirs, and not the paper's
    },
    "algorithm: {adv_estimator: rloo}\ncritic: {optim: {lr: 1e-4}}": {
        "algorithm.adv_estimator": "rloo",
        "critic.optim.lr": None,
    },
    "actor: {policy_loss: {loss_mode: geo_mean}, loss_agg_mode: seq-mean-token-sum}": {
        "algorithm.policy_loss": "gmpo",
        "algorithm.loss_agg_mode": "seq-mean-token-sum",
        "algorithm.clip_ratio_low": 0.2,  # their default, and not the paper's
    },
    "actor: {policy_loss: {loss_mode: clip-cov, clip_cov_ratio: 0.1, kl_cov_ratio: 0.2, clip_cov_lb: 0.5}}": {
        "algorithm.policy_loss": "clip_cov",
        "algorithm.covariance.fraction": 0.1,
        "algorithm.covariance.lower": 0.5,
    },
}


@pytest.mark.parametrize("given", ALGORITHMS)
def test_algorithms_are_called_what_they_are_here(given: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(f"{given}\nrollout: {{n: 4}}")
    done = imported(tmp_path / "theirs.yaml")
    assert {key: done.settings.get(key) for key in ALGORITHMS[given]} == ALGORITHMS[given]
    assert "unknown" not in verdicts(done).values()


OF_TRL = {
    "loss_type: grpo\nimportance_sampling_level: sequence\nepsilon: 3e-4\nepsilon_high: 4e-4": {
        "algorithm.policy_loss": "gspo",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.clip_ratio_high": 4e-4,
        "algorithm.clip_ratio_c": 1e9,  # no dual clip without delta
        "algorithm.correction.kind": "none",  # without vLLM
        "learner.optim.lr_scheduler_type": "linear",  # their default
        "batch.prompts_per_step": 1,
    },
    "loss_type: cispo\nepsilon_high: 5.0\nscale_rewards: batch\nuse_vllm: true\nper_device_train_batch_size: 4\n"
    "gradient_accumulation_steps: 4\nsteps_per_generation: 8\ntop_entropy_quantile: 0.2\n"
    "mask_truncated_completions: true\n"
    "off_policy_mask_threshold: 0.5\nreward_funcs: [json.tool.main]\nreward_weights: [2.0]": {
        "algorithm.policy_loss": "cispo",
        "algorithm.clip_ratio_low": 1.0,
        "algorithm.clip_ratio_high": 4.0,
        "algorithm.adv_estimator": "lite_ppo",
        "algorithm.selections": ["overlong", "top_entropy"],
        "algorithm.top_entropy_fraction": 0.2,
        "algorithm.correction.kind": "sequence_mis",
        "algorithm.correction.upper": 3.0,
        "algorithm.correction.masks": [{"kind": "opsm", "threshold": 0.5}],
        "batch.prompts_per_step": 4,
        "algorithm.updates_per_batch": 2,
        "rollout.engine": "vllm",
        "reward.functions": [{"function": "json.tool:main", "weight": 2.0}],
    },
    "loss_type: dr_grpo\nscale_rewards: none\nbeta: 0.04\nuse_vllm: true\ndelta: 4.0\nnum_iterations: 1\n"
    "vllm_importance_sampling_mode: token_truncate": {
        "algorithm.policy_loss": "ppo",
        "algorithm.norm_adv_by_std": False,
        "algorithm.clip_ratio_high": 0.2,
        "algorithm.clip_ratio_c": 4.0,
        "algorithm.correction.kind": "token_tis",
        "algorithm.correction.cap": 3.0,
        "algorithm.kl_loss_coef": 0.04,
        "algorithm.kl_estimator": "k3_unbiased",
    },
}


@pytest.mark.parametrize("given", OF_TRL)
def test_trls_names_and_defaults_mean_here_what_they_mean_there(given: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(f"model_name_or_path: org/model\ndataset_name: org/rows\n{given}\n")
    done = imported(tmp_path / "theirs.yaml")
    assert done.theirs.framework == "TRL"
    assert {key: done.settings.get(key) for key in OF_TRL[given]} == OF_TRL[given]
    assert done.settings["data.train_files"] == ["org/rows@train"]
    assert "unknown" not in verdicts(done).values()
    written = tmp_path / "ours.yaml"
    written.write_text(as_yaml(done))
    missing = [] if "reward.functions" in done.settings else ["reward.functions=[{function: exact_match}]"]
    load_config(written, [*missing, "run_dir=x"])


@pytest.mark.parametrize(
    ("algorithm", "actor", "ours", "gone"),
    [
        (
            {"prefix_strategy": "random", "min_prefix_ratio": 1.0, "max_prefix_ratio": 1.0, "n_prefix": 2},
            {"off_policy_reshape": "p_div_p_0.3", "on_policy_reshape": "no_reshape", "loss_mode": "luffy"},
            {
                "demonstrations.rows": 2,
                "luffy_gamma": 0.3,
                "norm_adv_by_std": True,  # their defaults, where LUFFY's are others here
                "loss_agg_mode": "token-mean",
                "entropy_coeff": 0.0,
            },
            [],
        ),
        (
            {"hint_steps": 80, "prefix_strategy": "random", "norm_adv_by_std_in_grpo": False},
            {"loss_mode": "uft", "sft_loss_coef": 0.01},
            {"demonstrations.hints.steps": 80, "demonstrations.hints.segments": 5, "uft_coef": 0.01},
            [],
        ),
        ({}, {"loss_mode": "uft"}, {"uft_coef": 1.0}, []),  # their default, and not the paper's
        (
            {"unify_strategy": "switch", "switch_gate": 2, "success_reward_threshold": 0.9},
            {"loss_mode": "hpt", "sft_loss_coef": 0.05, "loss_agg_mode": "seq-mean-token-mean"},
            {
                "demonstrations.rows": 1,
                "hpt.coef": 0.05,
                "hpt.gate": 2.5 / 7,
                "success_score": 0.9,
                "loss_agg_mode": "seq-mean-token-mean",
            },
            [],
        ),
        ({"n_prefix": 1}, {"loss_mode": "srft", "srft_type": "paper"}, {"demonstrations.rows": 1}, []),
        ({"hint_steps": 0, "unify_strategy": "none"}, {"loss_mode": "vanilla", "sft_loss_coef": 1.0}, {}, []),
        ({"n_prefix": -1}, {"loss_mode": "luffy"}, {}, ["algorithm.n_prefix"]),
        ({"min_prefix_ratio": 0.2}, {"loss_mode": "luffy"}, {}, ["algorithm.min_prefix_ratio"]),
        ({"unify_strategy": "soft"}, {"loss_mode": "hpt"}, {}, ["algorithm.unify_strategy"]),
        ({}, {"loss_mode": "luffy", "off_policy_reshape": "pow"}, {}, ["actor.off_policy_reshape"]),
        ({}, {"loss_mode": "srft", "srft_type": "exp"}, {}, ["actor.srft_type"]),
        ({}, {"loss_mode": "sft"}, {}, ["actor.policy_loss.loss_mode"]),
        ({"an_invention_of_mine": 3}, {}, {}, ["algorithm.an_invention_of_mine"]),
    ],
)
def test_losses_of_demonstrations_are_the_built_in_ones(
    algorithm: dict, actor: dict, ours: dict, gone: list[str], tmp_path: Path
) -> None:
    mode = {"policy_loss": {"loss_mode": actor.pop("loss_mode")}} if actor else {}
    theirs = {"algorithm": {"gamma": 1.0} | algorithm, "actor": actor | mode | {"model": {"model_path": "org/model"}}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs | {"rollout": {"n": 8}}))
    done = imported(tmp_path / "theirs.yaml")
    assert [line.key for line in done.lost] == gone
    assert "unknown" not in verdicts(done).values()
    assert {key: done.settings.get(f"algorithm.{key}") for key in ours} == ours
    if not gone:
        (tmp_path / "ours.yaml").write_text(as_yaml(done))
        given = ["reward.functions=[{function: exact_match}]", "data.train_files=[rows.jsonl]"]
        config = load_config(tmp_path / "ours.yaml", given).algorithm
        assert config.policy_loss == done.settings["algorithm.policy_loss"]


def test_more_than_the_gate_there_is_more_than_the_gate_here() -> None:
    """A gate of 2 of 7: two right rows are not enough and three are, in the floating point of the selection."""
    for sampled in range(2, 20):
        for right in range(1, sampled):
            [share] = gate(right, {"rollout.n": sampled + 1}).settings.values()
            assert not right > share * sampled
            assert right + 1 > share * sampled


CORRECTIONS = {
    "{rollout_is: token}": {"kind": "token_tis", "cap": 2.0},
    "{rollout_is: sequence, rollout_is_threshold: 5.0, rollout_rs: seq_mean_k1, rollout_rs_threshold: '0.8_1.6'}": {
        "kind": "sequence_tis",
        "cap": 5.0,
        "masks": [{"kind": "geometric", "lower": 0.625, "upper": 1.25}],  # theirs bound the inverse ratio
    },
    "{rollout_is: token, rollout_is_threshold: 4.0, rollout_rs: token_k1, rollout_rs_threshold: 4.0}": {
        "kind": "token_mis",
        "lower": 0.25,
        "upper": 4.0,
    },
    "{rollout_is: null, rollout_rs: 'seq_sum_k1,seq_mean_k1', rollout_rs_threshold: '2.0,0.5_1.25'}": {
        "kind": "none",
        "masks": [
            {"kind": "sequence", "lower": 0.5, "upper": 2.0},
            {"kind": "geometric", "lower": 0.8, "upper": 2.0},
        ],
    },
    "{bypass_mode: true, rollout_is: token, rollout_is_batch_normalize: false, loss_type: ppo_clip}": {"kind": "none"},
}
LOST_CORRECTIONS = {
    "{rollout_is: token, rollout_is_batch_normalize: true}": "rollout_is_batch_normalize",
    "{rollout_is: segment}": "rollout_is",
    "{rollout_rs: seq_max_k2, rollout_rs_threshold: 1.5}": "rollout_rs",
    "{rollout_rs: token_k1, rollout_rs_threshold: 1.5}": "rollout_rs",
    "{rollout_is: token, rollout_rs: token_k1, rollout_rs_threshold: 3.0}": "rollout_rs",
    "{rollout_is: token, rollout_rs: seq_sum_k1}": "rollout_rs",
    "{bypass_mode: true, loss_type: reinforce}": "bypass_mode",
    "{rollout_token_veto_threshold: 1e-4}": "rollout_token_veto_threshold",
}


@pytest.mark.parametrize("given", [*CORRECTIONS, *LOST_CORRECTIONS])
def test_a_rollout_correction_of_verl_is_a_correction_here_or_lost(given: str, tmp_path: Path) -> None:
    section = {"rollout_correction": yaml.safe_load(given), "adv_estimator": "grpo", "_target_": "a.B"}
    model = {"actor_rollout_ref": {"model": {"path": "org/model"}, "rollout": {"n": 4}}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(model | {"algorithm": section}))
    done = imported(tmp_path / "theirs.yaml")
    lost = [line.key.rpartition(".")[2] for line in done.lost]
    assert lost == ([LOST_CORRECTIONS[given]] if given in LOST_CORRECTIONS else [])
    if given in LOST_CORRECTIONS:
        return
    found = {key: value for key, value in done.settings.items() if key.startswith("algorithm.correction.")}
    assert found == {f"algorithm.correction.{key}": value for key, value in CORRECTIONS[given].items()}
    assert done.settings.get("algorithm.proximal") == ("behaviour" if "bypass" in given else None)
    (tmp_path / "ours.yaml").write_text(as_yaml(done))
    load_config(tmp_path / "ours.yaml", ["reward.functions=[{function: exact_match}]", "data.train_files=[r.jsonl]"])


def test_a_suggestion_is_of_the_same_section(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(
        "data: {truncation: error, max_promt_length: 3}\nactor: {weight_decoy: 1}\nrollout: {n: 4}"
    )
    texts = {line.key: line.outcome.text for line in imported(tmp_path / "theirs.yaml").lines}
    assert "never cut" in texts["data.truncation"]
    assert texts["data.max_promt_length"] == "did you mean data.max_prompt_length?"
    assert texts["actor.weight_decoy"] == "nothing of this name is known"


def test_a_script_of_verl_is_read_by_the_names_that_rllava_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("score.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info):\n    return {'score': 0.5}\n"
    )
    Path("run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo data.train_files=rows.parquet \\\n"
        "  data.train_batch_size=64 actor_rollout_ref.model.path=model actor_rollout_ref.rollout.n=4 \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \\\n"
        "  algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc \\\n"
        "  actor_rollout_ref.actor.clip_ratio_high=0.4 actor_rollout_ref.actor.fsdp_config.param_offload=true \\\n"
        "  custom_reward_function.path=score.py custom_reward_function.name=f trainer.test_freq=5 \\\n"
        "  reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=128 \\\n"
        '  reward_model.overlong_buffer.penalty_factor=0.5 "$@"\n'
    )
    done = imported(Path("run.sh"))
    expected = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.policy_loss": "gmpo",
        "algorithm.clip_ratio_high": 0.4,
        "algorithm.clip_ratio_low": 0.2,
        "algorithm.updates_per_batch": 4,
        "algorithm.filters": ["zero_variance"],
        "algorithm.filter_component": "accuracy",
        "batch.group_size": 4,
        "model.path": "model",
        "evaluation.every_steps": 5,
    }
    assert {key: done.settings.get(key) for key in expected} == expected
    penalty = {"function": "soft_overlong", "weight": 0.5, "kwargs": {"buffer": 128}}
    assert done.settings["reward.functions"][1:] == [penalty]
    assert verdicts(done)["actor_rollout_ref.actor.fsdp_config.param_offload"] == "no counterpart"
    assert not done.lost
    assert main(["import-config", "run.sh", "-o", "ours.yaml"]) == 0, capsys.readouterr()
    assert load_reward("ours_reward.py:overall")(RewardSample(completion="four")) == 0.5
    assert "soft_overlong" in Path("ours.yaml").read_text()


def test_every_name_in_the_table_is_a_setting_of_ours() -> None:
    for name in (name for names in NAMES.values() for name in names):
        key, _, value = name.ours.partition(" ")
        sections = yaml.safe_load(f"{{{key}: {value or 3}}}")
        for part in reversed(key.split(".")[:-1]):
            sections = {part: {key.rpartition(".")[2]: sections.popitem()[1]}}
        AlgorithmConfig.model_validate(sections)


LOSSES = {
    "algorithm: {adv_estimator: invented}": "algorithm.adv_estimator=invented",
    "worker: {actor: {loss_type: invented}}": "worker.actor.loss_type=invented",
    "worker: {actor: {ppo_epochs: 2}}": "worker.actor.ppo_epochs=2",
    "algorithm: {use_pf_ppo: true, pf_ppo: {weight_pow: 2.0}}": "algorithm.use_pf_ppo=true",
    "worker: {actor: {fsdp: {mp_param_dtype: fp8}}}": "worker.actor.fsdp.mp_param_dtype=fp8",
    "worker: {rollout: {dtype: float16}}": "worker.rollout.dtype=float16",
    "worker: {rollout: {max_turns: 3}}": "worker.rollout.max_turns=3",
    "worker: {rollout: {multi_turn: {enable: true}}}": "worker.rollout.multi_turn.enable=true",
    "worker: {reward: {model: {enable: true}}}": "worker.reward.model.enable=true",
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"use_kl_loss": True, "kl_coef": 0.02, "kl_penalty": "mse"}, {"kl_loss_coef": 0.02, "kl_estimator": "k2"}),
        ({"use_kl_loss": True, "kl_coef": 0.02, "kl_penalty": "kl"}, {"kl_loss_coef": 0.02, "kl_estimator": "k1+"}),
        ({}, {"kl_reward_coef": 0.001}),  # their default, with their k1
        (
            {"kl_type": "adaptive", "kl_target": 0.2, "kl_penalty": "low_var_kl"},
            {"kl_reward_coef": 0.001, "kl_estimator": "k3", "kl_control.kind": "adaptive", "kl_control.target": 0.2},
        ),
        ({"use_kl_loss": True, "kl_type": "adaptive"}, {"kl_loss_coef": 0.001, "kl_estimator": "k1+"}),
    ],
)
def test_a_kl_is_where_it_was_with_its_estimate(theirs: dict, ours: dict, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"algorithm": theirs, "worker": {"rollout": {"n": 4}}}))
    settings = imported(tmp_path / "theirs.yaml").settings
    found = {key.removeprefix("algorithm."): value for key, value in settings.items() if key.startswith("algorithm.kl")}
    assert found == ours


@pytest.mark.parametrize("given", LOSSES)
def test_a_lost_algorithm_role_or_precision_is_an_error(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    theirs = yaml.safe_load(
        "data: {train_files: a.jsonl}\nalgorithm: {disable_kl: true}\n"
        "worker: {actor: {model: {model_path: model}}, rollout: {n: 4}, reward: {reward_function: 'r.py:f'}}"
    )

    def merge(into: dict, other: dict) -> None:
        for key, value in other.items():
            if isinstance(value, dict):
                merge(into.setdefault(key, {}), value)
            else:
                into[key] = value

    merge(theirs, yaml.safe_load(given))
    Path("theirs.yaml").write_text(yaml.safe_dump(theirs))
    assert main(["import-config", "theirs.yaml", "-o", "refused.yaml"]) == 2
    said = capsys.readouterr()
    assert f"this would be another run: {LOSSES[given]} is lost" in said.err
    assert "LOST" in said.out
    assert "it loads" not in said.out
    assert main(["import-config", "theirs.yaml", "-o", "ours.yaml", "--accept-losses"]) == 0
    assert "it loads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fsdp", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": "fp32"}, "bfloat16"), ({"mp_param_dtype": "fp32"}, "float32")],
)
def test_the_precision_is_the_one_that_easyr1_computes_in(fsdp: dict, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"worker": {"actor": {"fsdp": fsdp or None}}}))
    assert imported(tmp_path / "theirs.yaml").settings["model.dtype"] == dtype


def test_the_written_file_loads_and_its_reward_is_called_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "score.py").write_text(BATCH_REWARD)
    source = tmp_path / "theirs.yaml"
    source.write_text(
        "data: {train_files: rows.parquet, rollout_batch_size: 8}\n"
        "algorithm: {disable_kl: true}\n"
        "worker:\n"
        "  actor: {global_batch_size: 4, model: {model_path: models/qwen}}\n"
        "  rollout: {n: 4}\n"
        "  reward:\n"
        "    reward_type: batch\n"
        "    reward_function: ./score.py:compute_score\n"
        "    reward_function_kwargs: {bonus: 0.5}\n"
    )
    assert main(["import-config", str(source), "-o", "ours.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "worker.actor.clip_ratio_high: 0.3 [their default]  -> algorithm.clip_ratio_high=0.3" in printed
    assert "it loads. Next: asyncrl doctor ours.yaml" in printed
    config = load_config(Path("ours.yaml"))
    assert config.algorithm.updates_per_batch == 2
    [reward] = config.reward.functions
    function = load_reward(reward.function)
    assert function(RewardSample(completion="7", answer="7"), **reward.kwargs) == 1.5
    component = load_reward("ours_reward.py:component")
    assert component(RewardSample(completion="6", answer="7"), key="accuracy") == 0.0
    before = {path.name for path in tmp_path.iterdir()}
    for out, said in (("ours.yaml", "ours.yaml exists already"), ("no/out.yaml", "cannot write no/out.yaml: No such")):
        assert main(["import-config", str(source), "-o", out]) == 2
        assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before, "nothing is overwritten, and nothing is left"


RLLAVA_ENVIRONMENT = """
class Search:
    def __init__(self, config):
        self.found = config["found"]

    def reset(self, data=None):
        self.question = data.non_tensor_batch["problem"][0]

    def extract_action(self, content):
        if "<answer>" in content or "<search>" not in content:
            return None
        return content.split("<search>")[1].split("</search>")[0]

    def step(self, action):
        return f"{self.question} {action}: {self.found}", 1.0, False, {"status": "success"}

    def close(self):
        pass
"""


@pytest.mark.parametrize("kind", ["sequential", "env"])
def test_an_environment_of_rllava_is_asked_as_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("search.py").write_text(RLLAVA_ENVIRONMENT)
    Path("env.yaml").write_text("env: {class_name: './search.py:Search', config: {found: Paris}}")
    Path("score.py").write_text(BATCH_REWARD)
    Path("theirs.yaml").write_text(
        "data: {train_files: rows.jsonl}\nactor: {model: {model_path: model}}\n"
        f"reward: {{reward_function: 'score.py:compute_score', reward_type: {kind}}}\n"
        "rollout: {n: 4, max_turns: 3, env_config_path: env.yaml, discount: 1.0}\n"
    )
    Path("model").mkdir()
    assert main(["import-config", "theirs.yaml", "-o", "ours.yaml"]) == 0, capsys.readouterr()
    config = load_config(Path("ours.yaml")).environment
    assert (config.limits.turns, config.config, config.call_format) == (3, {"theirs": {"found": "Paris"}}, "none")
    played, said = [], ["<search>capital</search>", "well", "<answer>Paris</answer>"]
    loaded = open_environment(config, unit=28)
    start = Start(row={"problem": "France"}, config=loaded.config)
    turns = asyncio.run(play(loaded, config, start, iter(said), lambda kind, part: played.append((kind, part))))
    assert (turns.end, turns.rewards) == ("done", [1.0 if kind == "env" else 0.0, 0.0, 0.0])
    shown = [part for kind, part in played if kind == "user"]
    assert shown[0] == "France capital: Paris"
    assert "<answer>" in shown[1]


def test_several_turns_of_verl_keep_their_limits_and_say_which_tools_are_missing(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: verl.tools.crop.Crop}]")
    turns = {"enable": True, "max_assistant_turns": 5, "format": "hermes", "max_parallel_calls": 2}
    turns["tool_config_path"] = str(tmp_path / "tools.yaml")
    theirs = {"actor_rollout_ref": {"rollout": {"n": 4, "multi_turn": turns}}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    done = imported(tmp_path / "theirs.yaml")
    found = {key: value for key, value in done.settings.items() if key.startswith("environment.")}
    assert found == {
        "environment.limits.turns": 5,
        "environment.limits.calls_per_turn": 2,
        "environment.call_format": "hermes",
    }
    assert [line.key for line in done.lost] == ["actor_rollout_ref.rollout.multi_turn.tool_config_path"]
    assert any("verl.tools.crop.Crop" in text for text in done.missing)


@pytest.mark.parametrize(
    ("section", "reward"),
    [
        ("reward_type: sequential", "f = lambda row: {'overall': len(row['response'])}"),
        ("reward_type: function", "f = lambda text, truth: {'overall': len(text)}"),
        ("skip_special_tokens: true", "f = lambda rows: [{'overall': len(rows[0]['response'])}]"),
        ("skip_special_tokens: true", "REWARD_TYPE = 'sequential'\nf = lambda row: {'overall': len(row['response'])}"),
    ],
)
def test_each_way_of_calling_a_reward(
    section: str, reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text(reward)
    key = "score_function" if "text, truth" in reward else "reward_function"
    Path("theirs.yaml").write_text(
        f"data: {{train_files: a.jsonl}}\nworker: {{reward: {{{section}, {key}: 'r.py:f'}}}}"
    )
    main(["import-config", "theirs.yaml", "-o", "ours.yaml"])
    assert load_reward("ours_reward.py:overall")(RewardSample(completion="four")) == 4.0


def test_the_printed_file_names_what_is_missing_and_keeps_every_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-config", str(IMPORTED / "easyr1.yaml")]) == 2
    printed = capsys.readouterr().out
    for key in read_foreign_config(IMPORTED / "easyr1.yaml").values:
        assert key in printed
    assert "path: Qwen/Qwen2.5-VL-7B-Instruct" in printed
    assert "With -o an adapter is written" in printed
    source = tmp_path / "theirs.yaml"
    source.write_text(
        "data: {train_files: a.parquet, rollout_batch_size: 10}\n"
        "worker: {actor: {global_batch_size: 4, model: {model_path: m}}, reward: {reward_function: r.py}}\n"
    )
    assert main(["import-config", str(source)]) == 2
    printed = capsys.readouterr().out
    assert "batch.group_size is 1: grpo needs at least 2 completions per prompt" in printed
    assert "algorithm.updates_per_batch: optimiser steps per batch of 10 prompts" in printed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PK\0\3: 1", "not valid YAML"),
        ("- 1", "holds no configuration"),
        ("model: {path: m}\nlearner: {}", "is an asyncrl configuration already: there is nothing to import"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_foreign_config(path)


def test_rules_only_set_keys_that_exist() -> None:
    """Each rule is tried with plausible values; whatever it sets must be in the schema."""
    known = set(all_keys())
    everything = {key: value for defaults in THEIR_DEFAULTS.values() for key, value in defaults.items()}
    for framework, defaults in THEIR_DEFAULTS.items():
        for key, rule in RULES.items():
            for value in ("text", 1, 0, -1, True, False, 0.5, ["a"], "token-mean", "vllm", "bf16"):
                try:
                    settings = rule(value, {**everything, **defaults, "actor.model.use_peft": True}).settings
                except (TypeError, AttributeError):  # this rule does not take such a value
                    continue
                for ours in settings:
                    assert ours in known or ours.startswith(("rollout.engine_args.", "reward.functions")), (key, ours)
        assert set(defaults) <= set(RULES), framework


def test_the_tables_of_the_documentation_name_keys_that_exist() -> None:
    """docs/migration.md: the second column is ours; the first, of RLLaVA and EasyR1, is known to the importer. The last
    section has words of the command line, which the tests of overlays know."""
    page = (ROOT / "docs" / "migration.md").read_text().partition("## RLLaVA's tasks")[0]
    known = set(all_keys())
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]] for line in page.splitlines() if "|" in line
    ]
    assert len(rows) > 50
    assert {key for _, ours in rows for key in ours if not key.startswith("rollout.engine_args.")} <= known
    theirs = [key for keys, _ in rows for key in keys if "." in key]
    assert len(theirs) > 25
    assert set(theirs) <= set(RULES)

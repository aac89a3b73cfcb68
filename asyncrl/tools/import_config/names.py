"""Names of algorithms in RLLaVA, EasyR1, verl and TRL, and what they are here: the table of docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, get_args

from asyncrl.config.algorithm import AlgorithmConfig


class Name(NamedTuple):
    """One setting of ours, and what the others call it. Names that mean the same are separated by commas."""

    ours: str
    """`key value`, below `algorithm`."""
    rllava: str = ""
    easyr1: str = ""
    verl: str = ""
    trl: str = ""


def _same(value: str, trl: str = "", *, easyr1: bool = False, rllava: bool = True, verl: str = "") -> Name:
    """An estimator that others call as we do."""
    return Name(
        f"adv_estimator {value}",
        value if rllava else "",
        value if easyr1 else "",
        ", ".join([value] + [verl] * bool(verl)),
        trl,
    )


NAMES: Mapping[str, tuple[Name, ...]] = {
    "`algorithm.adv_estimator` of RLLaVA, EasyR1 and verl; trainers and arguments of TRL": (
        _same("gae", "`PPOTrainer`", easyr1=True),
        _same("grpo", "`GRPOTrainer`", easyr1=True, verl="grpo_vectorized"),
        Name("adv_estimator dr_grpo", trl="`loss_type: dr_grpo` with `scale_rewards: none`"),
        Name("adv_estimator lite_ppo", trl="`scale_rewards: batch`"),
        _same("rloo", "`RLOOTrainer`", easyr1=True, verl="rloo_vectorized"),
        _same("remax", easyr1=True),
        _same("reinforce_plus_plus", easyr1=True),
        _same("reinforce_plus_plus_baseline"),
        _same("opo"),
        _same("gpg"),
        _same("grpo_passk", easyr1=True),
        Name("adv_estimator gdpo", verl="gdpo", trl="`multi_objective_aggregation: normalize_then_sum`"),
        _same("optimal_token_baseline", rllava=False, verl="tir_optimal_token_baseline"),
    ),
    "`actor.policy_loss.loss_mode` of RLLaVA and verl, `actor.loss_type` of EasyR1, `loss_type` of TRL": (
        Name("policy_loss ppo", "vanilla", "default", "vanilla", "grpo, bnpo, dapo, dr_grpo"),
        Name("policy_loss gspo", "gspo", "gspo, gspo_token", "gspo", "`importance_sampling_level: sequence`"),
        Name("policy_loss gmpo", "geo_mean", "", "geo_mean"),
        Name("policy_loss gpg", "gpg", "", "gpg"),
        Name("policy_loss cispo", "", "cispo", "cispo", "cispo"),
        Name("policy_loss sapo", "", "", "sapo", "sapo"),
        Name("policy_loss luspo", trl="luspo"),
        Name("policy_loss vespo", trl="vespo"),
        Name("policy_loss clip_cov", "clip_cov", "", "clip_cov"),
        Name("policy_loss kl_cov", "kl_cov", "", "kl_cov"),
        Name("policy_loss dppo", verl="dppo_tv"),
        Name("policy_loss luffy", "luffy"),
        Name("policy_loss uft", "uft"),
        Name("policy_loss hpt", "hpt"),
        Name("policy_loss srft", "srft"),
    ),
    "`actor.loss_agg_mode` of RLLaVA and verl, `actor.loss_avg_mode` of EasyR1, `loss_type` of TRL": (
        Name("loss_agg_mode token-mean", "token-mean", "token", "token-mean", "dapo, bnpo, cispo"),
        Name("loss_agg_mode seq-mean-token-mean", "seq-mean-token-mean", "seq", "seq-mean-token-mean", "grpo, sapo"),
        Name("loss_agg_mode seq-mean-token-sum", "seq-mean-token-sum", "", "seq-mean-token-sum", "luspo"),
        Name(
            "loss_agg_mode seq-mean-token-sum-norm", "seq-mean-token-sum-norm", "", "seq-mean-token-sum-norm", "dr_grpo"
        ),
    ),
    "`actor.kl_loss_type` of RLLaVA and verl, `algorithm.kl_penalty` of EasyR1 (and of all in the reward)": (
        Name("kl_estimator k1", "kl", "kl", "kl, k1"),
        Name("kl_estimator abs", "abs", "abs", "abs"),
        Name("kl_estimator k2", "mse", "mse", "mse, k2"),
        Name("kl_estimator k3", "low_var_kl", "low_var_kl", "low_var_kl, k3", "`use_bias_correction_kl: false`"),
        Name("kl_estimator k1+", "kl+", "", "kl+, k1+"),
        Name("kl_estimator k3+", "low_var_kl+", "", "low_var_kl+, k3+"),
        Name("kl_estimator k3_unbiased", trl="`use_bias_correction_kl: true`, its default"),
        Name("kl_estimator full", "full", "full", "full"),
        Name("kl_loss_coef", "`actor.kl_loss_coef`", "`kl_coef` and `use_kl_loss`", "`actor.kl_loss_coef`", "`beta`"),
        Name("kl_reward_coef", "`kl_ctrl.kl_coef`", "`kl_coef`", "`kl_ctrl.kl_coef`"),
    ),
    "`actor.tis_imp_ratio_cap` of RLLaVA and EasyR1, `algorithm.rollout_correction` of verl, arguments of TRL": (
        Name(
            "correction.kind token_tis",
            "a cap above 0",
            "a cap above 0",
            "`rollout_is: token`",
            "`vllm_importance_sampling_mode: token_truncate`",
        ),
        Name(
            "correction.kind token_mis",
            verl="`rollout_rs: token_k1` beside it",
            trl="`vllm_importance_sampling_mode: token_mask`",
        ),
        Name(
            "correction.kind sequence_tis",
            verl="`rollout_is: sequence`",
            trl="`vllm_importance_sampling_mode: sequence_truncate`",
        ),
        Name("correction.kind sequence_mis", trl="`vllm_importance_sampling_mode: sequence_mask`"),
        Name("correction.masks [{kind: sequence}]", verl="`rollout_rs: seq_sum_k1`"),
        Name("correction.masks [{kind: geometric}]", verl="`rollout_rs: seq_mean_k1`"),
        Name("correction.masks [{kind: opsm}]", trl="`off_policy_mask_threshold`"),
        Name("selections [overlong]", trl="`mask_truncated_completions`"),
        Name("selections [top_entropy]", trl="`top_entropy_quantile`"),
        Name("clip_ratio_c", "`clip_ratio_c`", "`clip_ratio_dual`", "`clip_ratio_c`", "`delta`, for every advantage"),
    ),
}
"""Names of settings elsewhere, by the subject of the columns. A cell in code quotes is an argument, any other a
value."""


def _values(key: str) -> dict[str, str]:
    """Our value of a key by their names, those of RLLaVA, EasyR1 and verl."""
    found: dict[str, str] = {}
    for name in (name for names in NAMES.values() for name in names):
        setting, _, value = name.ours.partition(" ")
        if setting == key:
            theirs = ", ".join((name.rllava, name.easyr1, name.verl)).split(", ")
            found |= {their: value for their in theirs if their}
    return found


ESTIMATORS: Mapping[str, str] = _values("adv_estimator")
LOSSES: Mapping[str, str] = _values("policy_loss") | {"clip-cov": "clip_cov", "kl-cov": "kl_cov"}
AGGREGATIONS: tuple[str, ...] = get_args(AlgorithmConfig.model_fields["loss_agg_mode"].annotation)

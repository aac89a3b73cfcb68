"""Every key of RLLaVA's and EasyR1's configurations, and what it is here. EasyR1's `worker.` is left out.

From their schemas (rllava/ppo/config.py, rllava/utils/config.py, rllava/data/config.py; verl/trainer/config.py and
verl/workers/*/config.py) and example files, older names included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.tools.import_config import derived
from asyncrl.tools.import_config.derived import named
from asyncrl.tools.import_config.foreign_config import Framework
from asyncrl.tools.import_config.outcome import Rule, absent, negative_is_zero, only, part_of, same

_ONE_DEVICE = "the learner works on one device: nothing is sharded"
_OFFLOAD = "in sync mode everything leaves the device in turn; otherwise it stays there"
_PACKED = "always on: a group is packed behind its prompt, without padding"
_NO_CRITIC = "there is no critic"
_NO_FILTER = "groups without spread have advantage 0 and are not sampled again"
_STREAMED = "groups are sampled one by one as they are needed"
_WEIGHTS = "the engine starts with the learner's weights"
_PLUGIN = "no built-in: algorithm.policy_loss=file.py:function (docs/bring-your-own.md)"
_ESTIMATOR = "no built-in: algorithm.adv_estimator=file.py:function (docs/bring-your-own.md)"
_PIXELS = "image sizes are those of the model folder's preprocessor_config.json: set them there"
_ENGINES = {"vllm": "vllm", "hf": "hf"}

DATA: dict[str, Rule] = {
    "data.train_files": derived.data_files("data.train_files"),
    "data.val_files": derived.data_files("data.val_files"),
    "data.prompt_key": same("data.prompt_key"),
    "data.answer_key": same("data.answer_key"),
    "data.image_key": same("data.image_key"),
    "data.video_key": same("data.video_key"),
    "data.image_dir": same("data.image_dir"),
    "data.train_image_dir": same("data.image_dir"),
    "data.val_image_dir": derived.validation_images,
    "data.video_fps": same("data.video_fps"),
    "data.max_prompt_length": same("data.max_prompt_length"),
    "data.max_response_length": same("data.max_response_length"),
    "data.rollout_batch_size": same("batch.prompts_per_step"),
    "data.train_batch_size": same("batch.prompts_per_step"),
    "data.mini_rollout_batch_size": absent(_STREAMED),
    "data.val_batch_size": absent("all held-out rows are scored, as many at a time as the server takes"),
    "data.format_prompt": same("data.format_prompt"),
    "data.format_prompt_path": same("data.format_prompt"),
    "data.system_prompt": same("data.system_prompt"),
    "data.override_chat_template": absent("put it into the model folder as chat_template.jinja"),
    "data.shuffle": same("data.shuffle"),
    "data.seed": same("trainer.seed"),
    "data.min_pixels": absent(_PIXELS),
    "data.max_pixels": absent(_PIXELS),
    "data.num_workers": absent("the learner reads rows as it hands out tickets"),
    "data.filter_overlong_prompts": same("data.filter_overlong_prompts"),
    "data.filter_overlong_prompts_workers": absent("prompts are measured by one process"),
}
ALGORITHM: dict[str, Rule] = {
    "algorithm.adv_estimator": named("algorithm.adv_estimator", {"grpo": "grpo", "rloo": "rloo"}, _ESTIMATOR),
    "algorithm.norm_adv_by_std_in_grpo": same("algorithm.norm_adv_by_std"),
    "algorithm.gamma": only(1.0, _NO_CRITIC, text="nothing is discounted"),
    "algorithm.lam": only(1.0, _NO_CRITIC, text="nothing is discounted"),
    "algorithm.disable_kl": part_of("the KL coefficient"),
    "algorithm.use_kl_loss": part_of("the KL coefficient"),
    "algorithm.kl_penalty": part_of("the KL coefficient"),
    "algorithm.kl_coef": derived.kl_in_easyr1,
    "algorithm.kl_type": only("fixed", "the coefficient is fixed"),
    "algorithm.kl_horizon": absent("of an adaptive coefficient; here it is fixed"),
    "algorithm.kl_target": absent("of an adaptive coefficient; here it is fixed"),
    "algorithm.kl_ctrl.type": only("fixed", "the coefficient is fixed"),
    "algorithm.kl_ctrl.kl_coef": absent("of a KL term in the reward"),
    "algorithm.kl_ctrl.horizon": absent("of an adaptive coefficient; here it is fixed"),
    "algorithm.kl_ctrl.target_kl": absent("of an adaptive coefficient; here it is fixed"),
    "algorithm.use_kl_in_reward": derived.kl_in_reward,
    "algorithm.online_filtering": only(False, _NO_FILTER, text="off"),
    "algorithm.filter_key": absent(_NO_FILTER),
    "algorithm.filter_low": absent(_NO_FILTER),
    "algorithm.filter_high": absent(_NO_FILTER),
}
ACTOR: dict[str, Rule] = {
    "actor.strategy": absent(_ONE_DEVICE),
    "actor.global_batch_size": derived.updates_per_batch,
    "actor.ppo_mini_batch_size": derived.updates_per_batch,
    "actor.micro_batch_size_per_device_for_update": derived.tokens_per_microbatch,
    "actor.ppo_micro_batch_size": derived.tokens_per_microbatch,
    "actor.micro_batch_size_per_device_for_experience": absent("batch.tokens_per_microbatch serves every pass"),
    "actor.log_prob_micro_batch_size": absent("batch.tokens_per_microbatch serves every pass"),
    "actor.ppo_epochs": only(1, "a group is trained once, never again", text="a group is trained once"),
    "actor.max_grad_norm": same("learner.optim.max_grad_norm"),
    "actor.clip_ratio": absent("algorithm.clip_ratio_low and clip_ratio_high are always both set"),
    "actor.clip_ratio_low": same("algorithm.clip_ratio_low"),
    "actor.clip_ratio_high": same("algorithm.clip_ratio_high"),
    "actor.clip_ratio_dual": same("algorithm.clip_ratio_c"),
    "actor.clip_ratio_c": same("algorithm.clip_ratio_c"),
    "actor.loss_avg_mode": named(
        "algorithm.loss_agg_mode", {"token": "token-mean", "seq": "seq-mean-token-mean"}, "token or seq there"
    ),
    "actor.loss_agg_mode": derived.loss_aggregation,
    "actor.loss_type": named("algorithm.policy_loss", {"default": "ppo"}, _PLUGIN),
    "actor.policy_loss.loss_mode": named("algorithm.policy_loss", {"vanilla": "ppo"}, _PLUGIN),
    "actor.entropy_coeff": same("algorithm.entropy_coeff"),
    "actor.tis_imp_ratio_cap": derived.importance_cap,
    "actor.kl_loss_coef": derived.kl_in_rllava,
    "actor.kl_loss_type": part_of("actor.kl_loss_coef"),
    "actor.sft_loss_coef": only(0.0, "supervised training is a stage of its own: asyncrl sft", text="off"),
    "actor.padding_free": only(True, _PACKED, text=_PACKED),
    "actor.dynamic_batching": only(True, _PACKED, text=_PACKED),
    "actor.ulysses_size": only(1, _ONE_DEVICE, text=_ONE_DEVICE),
    "actor.ulysses_sequence_parallel_size": only(1, _ONE_DEVICE, text=_ONE_DEVICE),
    "actor.use_torch_compile": absent("the learner does not compile"),
    "actor.model.model_path": derived.model_path,
    "actor.model.tokenizer_path": absent("tokenizer and processor are those of model.path"),
    "actor.model.enable_gradient_checkpointing": same("learner.gradient_checkpointing"),
    "actor.model.trust_remote_code": same("model.trust_remote_code"),
    "actor.model.freeze_vision_tower": same("model.freeze_vision_tower"),
    "actor.model.torch_dtype": derived.half_precision,
    "actor.model.attn_implementation": absent("the learner chooses what packing needs"),
    "actor.model.lora.rank": same("model.lora.rank"),
    "actor.model.lora.alpha": same("model.lora.alpha"),
    "actor.model.lora.target_modules": derived.target_modules,
    "actor.model.lora.exclude_modules": derived.excluded_modules,
    "actor.model.use_peft": part_of("actor.model.lora_r"),
    "actor.model.lora_r": derived.lora_only("model.lora.rank"),
    "actor.model.lora_alpha": derived.lora_only("model.lora.alpha"),
    "actor.model.lora_target_modules": derived.lora_only("model.lora.target_modules"),
    "actor.model.lora_dropout": absent("adapters have no dropout: the log-probs of a step must repeat"),
    "actor.model.lora_task_type": absent("it is always CAUSAL_LM"),
    "actor.model.lora_modules_to_save": absent("with LoRA only adapters are trained"),
    "actor.optim.lr": same("learner.optim.lr"),
    "actor.optim.betas": same("learner.optim.betas"),
    "actor.optim.weight_decay": same("learner.optim.weight_decay"),
    "actor.optim.strategy": only("adamw", "AdamW; bfloat16 weights are model.dtype=bfloat16", text="AdamW it is"),
    "actor.optim.lr_warmup_ratio": derived.warmup_ratio,
    "actor.optim.lr_warmup_steps": derived.warmup_steps,
    "actor.optim.min_lr_ratio": same("learner.optim.min_lr_ratio"),
    "actor.optim.lr_scheduler_type": same("learner.optim.lr_scheduler_type"),
    "actor.optim.warmup_style": same("learner.optim.lr_scheduler_type"),
    "actor.optim.num_cycles": only(0.5, "cosine goes down once", text="cosine goes down once"),
    "actor.fsdp.torch_dtype": derived.half_precision,
}
ROLLOUT: dict[str, Rule] = {
    "rollout.name": named("rollout.engine", _ENGINES, "engines are vllm and hf"),
    "rollout.n": same("batch.group_size"),
    "rollout.temperature": same("rollout.temperature"),
    "rollout.top_p": same("rollout.top_p"),
    "rollout.top_k": negative_is_zero("rollout.top_k", "every token may be sampled"),
    "rollout.seed": absent("trainer.seed decides, through the seed of each ticket"),
    "rollout.limit_images": absent("a row's images are taken as they are"),
    "rollout.dtype": absent("model.dtype is that of both sides"),
    "rollout.tensor_parallel_size": same("rollout.tensor_parallel_size"),
    "rollout.max_num_seqs": same("rollout.max_concurrent_sequences"),
    "rollout.max_model_len": absent("it is data.max_prompt_length + data.max_response_length"),
    "rollout.gpu_memory_utilization": same("rollout.engine_args.gpu_memory_utilization"),
    "rollout.enforce_eager": same("rollout.engine_args.enforce_eager"),
    "rollout.enable_chunked_prefill": same("rollout.engine_args.enable_chunked_prefill"),
    "rollout.max_num_batched_tokens": same("rollout.engine_args.max_num_batched_tokens"),
    "rollout.vllm.gpu_memory_utilization": same("rollout.engine_args.gpu_memory_utilization"),
    "rollout.vllm.enforce_eager": same("rollout.engine_args.enforce_eager"),
    "rollout.vllm.enable_chunked_prefill": same("rollout.engine_args.enable_chunked_prefill"),
    "rollout.vllm.max_num_batched_tokens": same("rollout.engine_args.max_num_batched_tokens"),
    "rollout.vllm.max_model_len": absent("it is data.max_prompt_length + data.max_response_length"),
    "rollout.vllm.dtype": absent("model.dtype is that of both sides"),
    "rollout.vllm.seed": absent("trainer.seed decides, through the seed of each ticket"),
    "rollout.vllm.load_format": absent(_WEIGHTS),
    "rollout.vllm.disable_log_stats": absent("vLLM's statistics are metrics here"),
    "rollout.load_format": absent(_WEIGHTS),
    "rollout.disable_log_stats": absent("vLLM's statistics are metrics here"),
    "rollout.disable_tqdm": absent("there is no progress bar of the engine"),
    "rollout.ignore_eos": only(False, "it bans the stop token, of which the learner knows nothing", text="off"),
    "rollout.micro_batch_size": absent("rollout.max_concurrent_sequences bounds what is decoded together"),
    "rollout.trust_remote_code": same("model.trust_remote_code"),
    "rollout.service_mode": absent("a rollout server is always a process of its own"),
    "rollout.service_url": absent("servers dial the learner: network.host"),
    "rollout.service_timeout": absent("network.timeout_s"),
    "rollout.val_override_config.temperature": same("evaluation.temperature"),
    "rollout.val_override_config.n": same("evaluation.group_size"),
    "rollout.val_override_config.top_p": only(1.0, "evaluation samples from the whole distribution", text="off"),
    "rollout.val_override_config.top_k": only(-1, "evaluation samples from the whole distribution", text="off"),
}
REWARD: dict[str, Rule] = {
    "reward.reward_type": derived.reward_type,
    "reward.reward_function": derived.reward_function,
    "reward.score_function": derived.reward_function,
    "reward.reward_function_kwargs": part_of("the reward function"),
    "reward.score_function_kwargs": part_of("the reward function"),
    "reward.compute_score": absent("a built-in of theirs: name its file and function"),
    "reward.skip_special_tokens": only(True, "completions reach a reward without special tokens"),
    "reward.num_cpus": same("reward.workers"),
}
TRAINER: dict[str, Rule] = {
    "trainer.total_epochs": same("trainer.total_epochs"),
    "trainer.total_episodes": same("trainer.total_epochs"),
    "trainer.max_steps": same("trainer.max_steps"),
    "trainer.project_name": same("telemetry.project"),
    "trainer.experiment_name": derived.run_dir,
    "trainer.outputs_dir": part_of("trainer.experiment_name"),
    "trainer.save_checkpoint_path": part_of("trainer.experiment_name"),
    "trainer.load_checkpoint_path": absent("a run goes on with --resume; a new one starts from model.path"),
    "trainer.find_last_checkpoint": absent("asyncrl train CONFIG --resume goes on from the newest checkpoint"),
    "trainer.logger": derived.trackers,
    "trainer.nnodes": absent("the learner is one process; rollout servers may run elsewhere (docs/multi-node.md)"),
    "trainer.n_gpus_per_node": absent("one device for the learner, rollout.servers times its own for the servers"),
    "trainer.max_try_make_batch": absent(_NO_FILTER),
    "trainer.critic_warmup": only(0, _NO_CRITIC, text=_NO_CRITIC),
    "trainer.val_freq": negative_is_zero("evaluation.every_steps", "0 evaluates at the start and at the end only"),
    "trainer.val_before_train": same("evaluation.before_training"),
    "trainer.val_only": only(False, "asyncrl eval CONFIG --model FOLDER", text="asyncrl eval does that"),
    "trainer.val_generations_to_log": absent("samples of training are kept instead: trainer.samples_per_step"),
    "trainer.save_freq": negative_is_zero("trainer.save_freq", "0 saves at the end only"),
    "trainer.save_limit": derived.kept_checkpoints,
    "trainer.save_model_only": only(False, "a checkpoint holds all that a restart needs"),
    "trainer.ray_timeline": absent("there is no Ray"),
    "trainer.async_training": absent("asynchronous is the rule: learner.max_staleness"),
}
RULES: Mapping[str, Rule] = {**DATA, **ALGORITHM, **ACTOR, **ROLLOUT, **REWARD, **TRAINER}

BELOW: Mapping[str, Rule] = {
    "actor.fsdp.": absent(_ONE_DEVICE),
    "actor.deepspeed.": absent(_ONE_DEVICE),
    "actor.offload.": absent(_OFFLOAD),
    "actor.checkpoint.": absent("a checkpoint holds all that a restart needs"),
    "actor.policy_loss.": absent(_PLUGIN),
    "actor.model.override_config.": absent("the model is as its folder says: change its config.json"),
    "ref.": absent("the reference policy, where there is one, is the base model under its adapters"),
    "critic": absent(_NO_CRITIC),
    "rollout.sglang.": absent("there is no sglang engine"),
    "reward.model.": absent("a reward is a function: docs/bring-your-own.md"),
    "reward.reward_function_kwargs.": part_of("the reward function"),
    "reward.score_function_kwargs.": part_of("the reward function"),
}
"""Whole sections, for keys without a rule of their own."""

_BOTH: Mapping[str, Any] = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": True,
    "actor.clip_ratio_low": 0.2,
    "actor.model.enable_gradient_checkpointing": True,
    "actor.model.freeze_vision_tower": False,
    "rollout.n": 1,
    "rollout.name": "vllm",
    "trainer.total_epochs": 15,
}
THEIR_DEFAULTS: Mapping[Framework, Mapping[str, Any]] = {
    "EasyR1": {
        **_BOTH,
        "data.rollout_batch_size": 512,
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": False,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_coef": 1e-3,
        "actor.global_batch_size": 256,
        "actor.micro_batch_size_per_device_for_update": 4,
        "actor.clip_ratio_high": 0.3,
        "rollout.tensor_parallel_size": 2,
        "rollout.gpu_memory_utilization": 0.6,
        "trainer.experiment_name": "demo",
    },
    "RLLaVA": {
        **_BOTH,
        "data.train_batch_size": 512,
        "algorithm.use_kl_loss": True,
        "actor.kl_loss_coef": 0.01,
        "actor.kl_loss_type": "low_var_kl",
        "actor.ppo_mini_batch_size": 256,
        "actor.ppo_micro_batch_size": 4,
        "actor.clip_ratio_high": 0.2,
        "actor.model.torch_dtype": "bf16",
        "reward.reward_type": "batch",
        "trainer.experiment_name": "agent",
    },
}
"""Of their schemas, where leaving the key out would mean something else here."""

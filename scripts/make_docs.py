"""Write the generated pages of docs/ (algorithms, configuration, metrics) and of plug-ins with methods.

tests/tools/test_docs.py compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import yaml

from asyncrl import plugins
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import method_sets
from asyncrl.config.method import TAKES_FROM, Kind, MethodSet
from asyncrl_plugins.prometheus.learner_metrics import METRICS as LEARNER_METRICS
from asyncrl_plugins.prometheus.metric_set import document
from asyncrl_plugins.prometheus.server_metrics import METRICS as ROLLOUT_METRICS
from asyncrl_plugins.reference.page import core_reference, key_tables, keys_of, method_settings

ROOT = Path(__file__).parent.parent

METHOD_SETTINGS: dict[Kind, tuple[str, str]] = {
    "advantage": ("Advantage estimators", "algorithm.adv_estimator"),
    "policy_loss": ("Policy losses", "algorithm.policy_loss"),
    "selection": ("Selections", "algorithm.selections"),
    "group_filter": ("Group filters", "algorithm.filters"),
    "addition": ("Additions to any method", "NAME, a section of `algorithm` whose presence chooses it"),
    "ticket_hook": ("Changes of trajectories", "NAME, a section of `algorithm` whose presence chooses it"),
    "loss_hook": ("Terms of the loss", "NAME, a section of `algorithm` whose presence chooses it"),
    "prompt_source": ("Choice of rows", "NAME, a section of `algorithm` whose presence chooses it"),
    "replay_buffer": ("Replay of groups", "NAME, a section of `algorithm` whose presence chooses it"),
    "staleness_controller": ("Staleness bound", "NAME, a section of `algorithm` whose presence chooses it"),
    "token_trace": ("Traces of tokens", "NAME, a section of `algorithm` whose presence chooses it"),
}
OF_ONE_UPDATE = """\
With the defaults (`algorithm.updates_per_batch=1`, `algorithm.proximal=recompute`) the ratio `r` is 1 wherever a loss
is computed: nothing is clipped, `ppo`, `gspo`, `gpg` and `cispo` have the same gradient under the same aggregation, and
`algorithm.correction` alone weighs stale tokens. To have what their formulas say, take several updates of each batch
(`algorithm.updates_per_batch=4`), or let the ratio be that to the policy that sampled (`algorithm.proximal=behaviour
algorithm.correction.kind=none`). With `rollout.quantization` the policy that sampled has other weights than the
learner, and the correction weighs all tokens, stale or not; it may then not be switched off."""
ALGORITHMS = """# Algorithms

One line of configuration is another method: `algorithm.policy_loss=gspo`. A method brings its paper's defaults for keys
that you leave out, in the file or, where an override names the method, on the command line. Estimators, losses and
aggregations (`algorithm.loss_agg_mode`) are combined freely, and so are the off-policy corrections
(`algorithm.correction.*`); what does not fit together is refused at the start, with the reason. Formulas: `s` is the
score of a trajectory, `A` the advantage of a token, `p` its probability under the policy that is trained, `r` its ratio
to the proximal policy. A method's own settings stand in a section of its name, `algorithm.gae.lam=0.95`, which exists
only where the method is chosen.

These are the core's, in `asyncrl/algorithms/` with their rows in `asyncrl/config/methods.py`. Plug-ins bring more:
[research methods](../asyncrl_plugins/methods/README.md),
[losses that learn from demonstrations](../asyncrl_plugins/demonstrations/README.md),
[teachers of the student's samples](../asyncrl_plugins/distillation/README.md),
[masked and distorted images](../asyncrl_plugins/perception/README.md),
[experts](../asyncrl_plugins/moe/README.md),
[a choice of rows](../asyncrl_plugins/curricula/README.md), and
[a staleness bound that moves](../asyncrl_plugins/adaptive_staleness/README.md). Your own is named as
`file.py:function` ([bring-your-own.md](bring-your-own.md)). Written by `scripts/make_docs.py`."""
PLUGINS = {
    "methods": """# Research methods

Estimators, losses and selections beside those of the core ([algorithms](../../docs/algorithms.md), where the letters of
the formulas are explained). They are chosen in the same way, by name or by the word of an overlay. With one update of
each batch and the defaults `luspo`, `aspo`, `gmpo` and `sapo` have the gradient of `ppo` under the same aggregation;
under `gmpo` each stale token has the mean weight of its trajectory. Written by `scripts/make_docs.py` from the rows in
`plugin.py`.""",
    "demonstrations": """# Learning from demonstrations

Policy losses that learn from `data.target_key` beside what the policy samples ([algorithms](../../docs/algorithms.md)
explains the letters of the formulas). The rows' demonstrations are members of their groups, or completions begin with
parts of them as hints: a hook of tickets (`learner/tickets/ticket_hook.py`) whose section, `algorithm.demonstrations`,
each of the losses gives. A group of a row without a demonstration is sampled alone. Written by `scripts/make_docs.py`
from the rows in `plugin.py`.""",
    "moe": """# Models of experts

```yaml
algorithm:
  routing_replay: {}
  router_losses: {z_coef: 0.001}
```

Routing replay (R3): a rounding, or weights of another version, makes a router choose other experts, and a token's
log-prob jumps. The engine sends the experts of each token and layer, of prompts and completions, with the group; they
are checked, journaled and packed, and the learner's model takes them in each of its passes: the log-prob check at the
start, proximal log-probs, training, and layers that checkpointing computes again. The weights of the chosen experts
are the learner's own, with their gradient. The reference policy chooses for itself. A token that new weights meet in
flight keeps the experts of the pass that predicted from it; a prompt has those of the group's first completion.

A token has layers × experts per token bytes (twice that over 256 experts): 384 of Qwen3-30B-A3B, 25 MB for 8
completions of 8,192 tokens. `network.max_message_mib` bounds a group.

| engine | |
|---|---|
| `hf` | recorded in the routers themselves |
| `vllm` | `enable_return_routed_experts` of vLLM 0.32, on a GPU: not run; refused on a CPU, where it needs Triton |
| `sglang` | refused: its `return_routed_experts` was not run |

Refused, too: environments, several learner processes, models without experts, routers that do not choose by one
`topk`, and hooks of tickets that insert whole completions. A server that leaves gives its tickets back without what it
has sampled of them, as experts do not travel with it. A second pass after other images (PAPO) takes the same experts.

Router losses are over all tokens of an update, prompts included; nothing is padded. The balance loss is that of
transformers' `load_balancing_loss_func`, summed over micro-batches and ranks with one denominator. The shares of tokens
in it are those of the update's micro-batches so far: exact with one micro-batch, and else an approximation
(arXiv 2501.11873). Families for which transformers has no such loss are refused. metrics.jsonl has
`router/balance_loss`, `router/z_loss`, `router/load_max` (tokens of the busiest expert of a layer over the mean) and
`router/other_experts` (share of tokens and layers in which the learner's router would choose otherwise); with both
coefficients 0 the section only measures. Measurements: [agreement](../../docs/lab-log/agreement.md).

Written by `scripts/make_docs.py` from the rows in `plugin.py`.""",
    "perception": """# Perception

Methods for policies that see images; they go with any estimator and loss
([algorithms](../../docs/algorithms.md)). NoisyRollout is a hook of tickets (`learner/tickets/ticket_hook.py`), PAPO a
hook of the loss (`learner/training/loss_hook.py`): a method of your own may use either in the same way. metrics.jsonl
has the mean reward of trajectories that saw other images as `other_images/reward`, and PAPO's KL as `kl_prcp`. Written
by `scripts/make_docs.py` from the rows in `plugin.py`.""",
}
PLUGINS |= {
    "distillation": """# Distillation

On-policy distillation: the student samples, and a teacher says how likely it finds each token. Every token of every
completion is taught: no group has to differ. A reward function is named as in any run: it shows how good completions
are, and teaches nothing unless `reward_weight` mixes it in.

```bash
asyncrl train runs/demo-1/grpo/config.yaml opd reference.path=runs/demo-1/grpo/export run_dir=runs/taught
asyncrl train runs/demo-1/grpo/config.yaml gkd reference.path=runs/demo-1/grpo/export algorithm.gkd.beta=0.1 \\
  run_dir=runs/compared
asyncrl train runs/demo-1/grpo/config.yaml opsd run_dir=runs/self-taught
```

| word | the teacher says | gradient |
|---|---|---|
| `opd` | its log-prob of the sampled token | log teacher - log student as credit: that of the reverse KL in \
the mean over samples ([a policy gradient](https://thinkingmachines.ai/blog/on-policy-distillation)) |
| `gkd` | its `top_k` likeliest tokens, and the mass of all others | exact: a divergence of both distributions |
| `opsd` | as in `gkd`, having seen the answer | as in `gkd` |

`gkd` compares `top_k` + 1 classes, the last being all other tokens, so that it is a divergence: at most that of the
whole vocabulary, and 0 only where the classes agree. Terms of the likeliest tokens alone are none: a reverse KL of
these falls while mass leaves them ([verl](https://github.com/verl-project/verl/pull/5041)), which a test here shows.
With `top_k` as large as the vocabulary it is TRL's `generalized_jsd_loss`. Logits are there some tokens at a time.

**Teachers.** The teacher is the reference policy of the run: a model folder of the student's family with the student's
tokenizer, of any size, loaded in the learner. `algorithm.distillation.teachers` names several, by a column of the rows;
one of them is `reference.path`, and each folder is loaded once. A tokenizer with other ids is refused by name, where
both folders have a `tokenizer.json`; a vocabulary that is padded to another size is none. They score prompts with their
images, one teacher after another, on ranks too, under adapters and in turns on one GPU; `reference.offload=true` keeps
them in host memory between their passes. A teacher behind a server is not supported.

**A teacher that sees more.** With `algorithm.distillation.privileged` the teacher scores the same tokens and images
after a prompt with more in it, such as the answer or a worked solution. Without `reference.path` it is the model as the
run began: a frozen copy, or with `model.lora.rank` the same weights without adapters (OPSD, arXiv 2601.18734);
`reference.ema=0.99` lets it follow the student (SDFT, arXiv 2601.19897, which moves the teacher so). Rows without a
teacher, or without a column that the text names, are bad rows (`data.on_bad_row`).

**Stale samples.** `opd`'s credit is weighed by `algorithm.correction`, as any advantage. The divergence of `gkd` has no
weight: it is a sum over the vocabulary, whichever policy has sampled. What the correction masks it leaves out.

**Measured**, one run each on the digits of the demo (60 steps, seed 1, teacher 0.882, start 0.385, 400 held-out rows,
2 busy cores, 2026-11-29): `gkd` with `beta` 0, 0.5 and 1 came to 0.723, 0.678 and 0.683, `opd` to 0.635; GRPO was at
0.595 after 75 steps. `opsd` fell to 0.003: a teacher of 1.8 million parameters makes nothing of the answer in its
prompt. Score the model with the hint first (`asyncrl eval` with `data.format_prompt`).

metrics.jsonl: `teacher/divergence` of `gkd`, and `teacher/mass_of_others`, the teacher's mass outside of its likeliest
tokens; `reference_kl` of `opd`; with several teachers `teacher/share/NAME` of the tokens. A step costs a forward pass
of the teacher, and with `opd` one of the student.

Written by `scripts/make_docs.py` from the rows in `plugin.py`.""",
    "curricula": """# Curricula

Prompt sources, which pass over rows by their latest groups: a row that taught nothing lately is visited less often. One
of them is chosen by its section, as in `asyncrl train run.yaml algorithm.greso={}`, and goes with any method. Epochs
stay what they are; a run whose `trainer.max_steps` is 0 ends with its epochs, after fewer steps. State is journaled
with the group that it was learnt from, so that a run that resumes chooses as it would have. A source of your own is a
row of the kind `prompt_source` and a subclass of `PromptSource` (`asyncrl/data/prompt_sources.py`). Written by
`scripts/make_docs.py` from the rows in `plugin.py`.""",
    "adaptive_staleness": """# Adaptive staleness

A staleness bound that moves between `algorithm.adaptive_staleness.min` and `learner.max_staleness`. A larger bound
keeps the learner from waiting, a smaller one keeps samples close to the policy. `patience` steps in a row that agree
move it by one; the next `bound + 1` steps are not judged, since samples of the old bound are still in the pipeline.
metrics.jsonl has it as `staleness/bound`. It is chosen by its section, as in
`asyncrl train run.yaml learner.max_staleness=8 algorithm.adaptive_staleness={}`.

A controller of your own is a row of the kind `staleness_controller` and a class with the methods of
`StalenessController` (`learner/loop/trainer.py`). Written by `scripts/make_docs.py` from the row in `plugin.py`.""",
}
WORDS = """## Words

| overlay | | needs |
|---|---|---|"""
OVERLAYS = """## One word for a whole method

What a paper sets besides its function is in an overlay, a few lines of YAML in
[configs/algorithms](../configs/algorithms). A word without `=` on the command line is the name of one of these, or the
path of an overlay of your own; what comes later on the line counts, and a key that ends in `+` adds to a list:

```bash
asyncrl demo rloo
asyncrl train base.yaml dapo learner.optim.lr=2e-6
asyncrl train base.yaml mine.yaml
```

Without a word the defaults of [configuration.md](configuration.md#algorithm) hold, and `asyncrl demo` is GRPO's
advantage with a clip of 0.2 and 0.28 and a mean over tokens; the word `grpo` is the paper's GRPO, with a clip of 0.2 on
both sides and a mean over trajectories.

| overlay | | needs |
|---|---|---|"""
SETTINGS = """## Settings

They exist only where their method is chosen.

"""
KL = """## KL to a reference policy

`algorithm.kl_loss_coef`, `algorithm.kl_reward_coef`, `algorithm.kl_estimator`

KL(policy || reference) of each token is a term of the loss, or is taken from the rewards by which credit is given (then
it is that of the policy at the start of the step, and its sum is taken from the trajectory's score). The reference is a
frozen copy of the model that the run begins with, or of `reference.path`; with `model.lora.rank` it is the model
without its adapters, which takes no memory. It may follow the policy (`reference.ema`) or be set to it now and then
(`reference.reset_every_steps`; with `reference.reset_optimizer` AdamW's moments begin anew then, too). On a GPU its
weights may be in host memory between its uses (`reference.offload`). `algorithm.kl_control` moves the coefficients.
With d = log policy - log reference at the sampled token:

| estimator | value | as a loss |
|---|---|---|
| `k1` | d | refused: its mean gradient is 0. In the reward, its default place, the mean gradient is the KL's |
| `k2` | d² / 2 | the KL's gradient on average |
| `k3` | exp(-d) + d - 1, at most 10 | the default; on average the gradient of KL(reference \\|\\| policy) |
| `abs` | absolute d | pulls every token equally hard |
| `k1+`, `k3+` | that of k1 or k3 | the gradient of k2 |
| `k3_unbiased` | k3 times policy / behaviour | the KL's gradient on average, whichever policy has sampled |
| `full` | the sum over the vocabulary | the exact gradient, for the logits of both models, some tokens at a time |"""
TURNS = """## Turns

In an [environment](../../docs/agents.md) a trajectory has several turns, each with a reward and a state of its own.
Estimators make of them:

| estimator | credit of a turn |
|---|---|
| those that compare scores (`grpo`, `rloo`, ...) | that of its trajectory, whose score has all rewards in it |
| `gae`, `reinforce`, `reinforce_plus_plus`, `optimal_token_baseline` | rewards of turns are at the turns' last \
tokens, that of the reward functions at the trajectory's; what the environment showed in \
between is no step of gamma or lambda |
| `agentic_reinforce`, `step_reinforce`, `turn_return` | its return, as it is, against all turns of the group, against \
those of the same number |
| `gigpo` | that of its trajectory, and its return against turns of the group that began in the same `state_key` |
| `mt_grpo` | that of the reward functions, and its own reward against turns of the same number |

`turn_return`, `gigpo` and `mt_grpo` are refused without an environment, and with `environment.limits.turns=1`. A
`state_key` names the state after a turn, in which the next one begins; the first turn begins in the prompt, which no
later state equals. Where an environment gives no `state_key` it is a digest of the observation."""
BESIDE = """## Beside these

Any method may have an entropy bonus, fixed or towards a target (`algorithm.entropy_coeff`,
`algorithm.entropy_control`), of the mean entropy of a token under any aggregation of the loss
(`algorithm.entropy_agg_mode`), masked or distorted images ([perception](../asyncrl_plugins/perception/README.md)),
weights and masks for stale samples (`algorithm.correction`), several updates of one batch
(`algorithm.updates_per_batch`) and a choice of rows
([curricula](../asyncrl_plugins/curricula/README.md)); penalties of length and repetition are rewards
([rewards.md](rewards.md)). Their keys are in [configuration.md](configuration.md#algorithm), and `asyncrl train CONFIG
METHOD --dry-run` prints what a run would have: below `# Algorithm` in one line, which `asyncrl train`, the panel, the
learner's log and the report say, too, and a note for each schedule that the run is too short for.

Not here: BRIDGE, PF-PPO, PKPO, PSR and NSR (right or wrong completions alone), OPMD, T-GRPO, VAPO's likelihood of right
completions, preference losses (DPO, MPO), branched rollouts (VinePPO, trees)."""


def _tables(methods: MethodSet) -> Iterator[str]:
    """Tables of the methods of each kind that there are."""
    for kind, titles in METHOD_SETTINGS.items():
        if methods.rows(kind):
            yield _methods(methods, kind, titles)


def _methods(methods: MethodSet, kind: Kind, titles: tuple[str, str]) -> str:
    """A table of the methods of a kind."""
    key, comma, rest = titles[1].partition(", ")
    own = "taken from" if kind == "selection" else "defaults of its own"
    lines = [
        f"## {titles[0]}\n\n`{key}`{comma}{rest}\n",
        *([f"{OF_ONE_UPDATE}\n"] if methods is method_sets()[""] and kind == "policy_loss" else []),
        f"| name | what it does | formula | needs | {own} | paper |",
        "|---|---|---|---|---|---|",
    ]
    for name, method in methods.rows(kind).items():
        paper = f"[{method.paper}](https://arxiv.org/abs/{method.paper})" if method.paper else ""
        defaults = ", ".join(f"`{key}={_short(value)}`" for key, value in method.defaults.items())
        if kind == "selection":
            defaults = TAKES_FROM[method.takes_from]
        needs = ", ".join(sorted(method.needs))
        needs += f"tokens of the selection `{method.marks}`" if method.marks else ""
        formula = method.formula.replace("|", "\\|")
        said = (inspect.getdoc(plugins.implementation(method.implementation)) or "").partition("\n\n")[0]
        summary = " ".join(said.split()).rstrip(".").replace("|", "\\|")
        lines.append(f"| `{name}` | {summary} | {formula} | {needs} | {defaults} | {paper} |")
    return "\n".join(lines)


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(each)}" for key, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


NEEDED = {
    "inserted": "texts to learn from (`data.target_key`)",
    "critic": "a critic: memory of a second model, trained beside it",
    "turns": "an environment",
    "greedy_row": "a greedy completion more per group",
    "reference": "a reference policy",
}
"""Requirements of a whole method, in words. The rest is a forward pass."""


def _overlays(methods: MethodSet, folder: str) -> str:
    """Rows of a table: each overlay, its first comment, and what it needs of the run."""
    assert methods.overlays is not None
    rows: list[str] = []
    for file in sorted(methods.overlays.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        said, keys = text.partition("\n")[0].removeprefix("# "), yaml.safe_load(text).get("algorithm", {})
        needs = AlgorithmConfig.model_validate(keys).needs
        cell = "; ".join(words for need, words in NEEDED.items() if need in needs)
        rows.append(f"| [`{file.stem}`]({folder}/{file.name}) | {said} | {cell} |")
    return "\n".join(rows)


def _plugin_page(name: str) -> str:
    methods = method_sets()[name]
    words = ["\n".join([WORDS, _overlays(methods, "overlays")])] if methods.overlays else []
    keys = "\n".join(key_tables(keys_of(f"asyncrl_plugins.{name}")))
    keys = "## Settings\n\n" + keys[keys.index("| key |") :]
    turns = [TURNS] if any("turns" in method.needs for method in methods.advantages.values()) else []
    return "\n\n".join([PLUGINS[name], *words, *_tables(methods), *turns, keys.strip()]) + "\n"


def pages() -> dict[str, str]:
    """File in the repository -> text."""
    metrics = (
        "# Metrics\n\nBoth processes answer `GET /metrics` (`telemetry.learner_port`, `telemetry.rollout_port`). "
        "Every series has the label `run`, the run directory as the configuration has it. "
        "A gauge is NaN as long as it has no value. Written by `scripts/make_docs.py` from the tables in code.\n\n"
        f"## Learner\n\n{document(LEARNER_METRICS).strip()}\n\n"
        f"## Rollout server\n\n{document(ROLLOUT_METRICS).strip()}\n"
    )
    core = method_sets()[""]
    overlays = "\n".join([OVERLAYS, _overlays(core, "../configs/algorithms")])
    algorithms = "\n\n".join([ALGORITHMS, overlays, *_tables(core), SETTINGS + method_settings(), KL, BESIDE])
    return {
        "docs/algorithms.md": algorithms + "\n",
        "docs/configuration.md": core_reference().strip() + "\n",
        "docs/metrics.md": metrics,
        **{f"asyncrl_plugins/{name}/README.md": _plugin_page(name) for name in PLUGINS},
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")

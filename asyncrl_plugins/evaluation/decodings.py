"""`asyncrl eval --decodings`: held-out accuracy of a model by each way of decoding.

Greedy, sampled as in training, and greedy with each first word that demonstrations have: a policy that has only changed
its first word looks better by greedy decoding, and has learnt nothing else. A run has learnt what it gains on the best
of its start.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import open_train
from asyncrl.rewards.score import EvaluationScores
from asyncrl_plugins.evaluation.plain_scores import evaluate

MOST_WORDS = 8
"""Most first words that are tried, the commonest ones."""


def first_words(data: DataConfig) -> list[str]:
    """Words with which the demonstrations of the training rows begin, sorted; no numbers. Empty without any."""
    rows = open_train(data, "environment") if data.train_files else None
    if rows is None or data.target_key not in rows.columns:
        return []
    targets = (str(target or "").split() for target in rows.column(data.target_key))
    counts = Counter(words[0] for words in targets if words and words[0].isalpha())
    return sorted(word for word, _ in counts.most_common(MOST_WORDS))


def score_decodings(config: RunConfig, folder: Path) -> dict[str, EvaluationScores]:
    """Scores of the model in `folder` by name of the decoding. Prints a line for each as it is known."""
    temperature = config.rollout.temperature
    decodings = [("greedy", 0.0, ""), (f"sampled at temperature {temperature:g}", temperature, "")]
    decodings += [(f"greedy, first word `{word}`", 0.0, word) for word in first_words(config.data)]
    found = {}
    for name, value, prefix in decodings:
        decoded = config.evaluation.model_copy(update={"temperature": value})
        scores = evaluate(config.model_copy(update={"evaluation": decoded}), folder, prefix=prefix)
        found[name] = scores
        print(f"{name:<32}{scores.accuracy:.3f} ± {scores.accuracy_error:.3f}", flush=True)
    return found

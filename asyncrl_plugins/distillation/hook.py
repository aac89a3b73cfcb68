"""Hook of the loss: teachers score each batch before credit is given, and `gkd` compares distributions in each pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from asyncrl.models.output_head import Comparison
from asyncrl_plugins.distillation.divergence import class_logprobs, generalised_jsd
from asyncrl_plugins.distillation.settings import DistillationConfig, GkdConfig
from asyncrl_plugins.distillation.teachers import Teachers, TeacherTokens
from learner.training.loss_hook import AdditionalLoss

if TYPE_CHECKING:
    from asyncrl.config.algorithm import AlgorithmConfig
    from learner.training.batch import Batch
    from learner.training.engine import TorchEngine
    from learner.training.loss_hook import PolicyPass
    from learner.training.packing import MicroBatch
    from learner.training.roles import Roles, Scored


class Distillation:
    """The teachers of a run, and what they have said of the batch of the step."""

    trains_entropy = False
    _gkd: GkdConfig | None = None
    """Settings where distributions are compared; None: `opd` reads the log-probs alone."""
    _teachers: Teachers
    _said: TeacherTokens

    def __init__(self, settings: DistillationConfig):
        self._settings = settings

    def prepare(self, algorithm: AlgorithmConfig, roles: Roles) -> None:
        self._gkd = algorithm.settings_of(GkdConfig) if algorithm.adv_estimator == "gkd" else None
        self._teachers = Teachers(self._settings, roles, top_k=self._gkd.top_k if self._gkd else 0)

    def score(self, batch: Batch, scored: Scored, tokens_per_microbatch: int) -> Scored:
        self._said = self._teachers.score(batch, tokens_per_microbatch)
        return replace(scored, reference_logprobs=self._said.logprobs)

    def before_pass(self, actor: TorchEngine, batch: Batch, micro_batch: MicroBatch) -> Comparison | None:
        if self._gkd is None:
            return None
        beta = self._gkd.beta

        def divergence(logprobs: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            return generalised_jsd(class_logprobs(logprobs, ids), teacher, beta)

        place = batch.places(micro_batch.row, micro_batch.column)
        said = (self._said.ids[place].to(actor.device), self._said.classes[place].to(actor.device))
        return Comparison(divergence, said)

    def __call__(self, seen: PolicyPass) -> AdditionalLoss:
        """The divergence of each token's distributions, where it is a loss. No importance weight is on it: it is a sum
        over the vocabulary, and no estimate from the token that was sampled."""
        place = seen.batch.places(seen.micro_batch.row, seen.micro_batch.column)
        loss, columns = torch.zeros_like(seen.outputs.logprobs.detach()), {}
        if self._gkd is not None:
            assert seen.outputs.compared is not None
            loss = self._gkd.teacher_weight * seen.outputs.compared
            others = self._said.classes[place, -1].exp().to(loss.device)
            columns = {"teacher/divergence": seen.outputs.compared.detach(), "teacher/mass_of_others": others}
        teacher = self._said.teacher[place].to(loss.device)
        names = self._teachers.names if len(self._teachers.names) > 1 else ()
        columns |= {f"teacher/share/{name}": (teacher == number).float() for number, name in enumerate(names)}
        return AdditionalLoss(loss, columns)

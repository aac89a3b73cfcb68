"""The teachers of a run: which of them scores a row, after which prompt, and the passes in which they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from asyncrl.config.sections import LoraConfig
from asyncrl.config.service_sections import ReferenceConfig
from asyncrl.errors import BadStateError
from asyncrl.models.output_head import Asked, Comparison
from asyncrl_plugins.distillation.divergence import class_logprobs, likeliest
from asyncrl_plugins.distillation.rows import DEFAULT, Hint, columns_of, hinted, teacher_of
from asyncrl_plugins.distillation.settings import DistillationConfig
from learner.training.engine import TorchEngine
from learner.training.rank_plan import Share, plan_shares
from learner.training.reference import Reference, WithoutAdapters

if TYPE_CHECKING:
    from asyncrl.processing.encoded_prompt import EncodedPrompt
    from learner.groups.ticket import ReceivedGroup
    from learner.training.batch import Batch
    from learner.training.packing import MicroBatch, TrainGroup
    from learner.training.roles import Roles


@dataclass(frozen=True)
class TeacherTokens:
    """Scores of a batch's `N` trained tokens by their teachers, fp32 on the CPU."""

    logprobs: torch.Tensor
    """[N] of the tokens that were sampled."""
    ids: torch.Tensor
    """[N, k] int64: the teacher's likeliest tokens."""
    classes: torch.Tensor
    """[N, k + 1] log-probs of these, and last of all other tokens together."""
    teacher: torch.Tensor
    """[N] int64: number of the token's teacher in `Teachers.names`."""


class Teachers:
    """Teachers of all rows, one of which is the run's reference policy. Of one folder there is one model."""

    def __init__(self, settings: DistillationConfig, roles: Roles, *, top_k: int):
        """Load what is not there. `top_k` tokens of each distribution are wanted; with 0 only those that were
        sampled."""
        self._settings = settings
        self._roles = roles
        self._hint = Hint(settings.privileged) if settings.privileged else None
        own = roles.own_reference or roles.actor
        self._by_folder: dict[str, Reference | WithoutAdapters] = {own.settings.model.path: roles.reference}
        self._folders = settings.teachers or {DEFAULT: own.settings.model.path}
        self.names = tuple(self._folders)
        for folder in self._folders.values():
            if folder not in self._by_folder:
                self._by_folder[folder] = self._load(folder)
        sizes = [self._packing(teacher).facts.vocabulary for teacher in self._by_folder.values()]
        self._known = min(roles.actor.facts.vocabulary, *sizes)
        """Ids below this one are in all vocabularies: what a larger one has beyond them is among the others."""
        self._top_k = min(top_k, self._known)

    def _load(self, folder: str) -> Reference:
        """A teacher with weights of its own, asleep and awake with the policy."""
        actor, reference = self._roles.actor, self._roles.own_reference
        model = actor.settings.model.model_copy(update={"path": folder, "lora": LoraConfig()})
        config = ReferenceConfig(path=folder, offload=reference is not None and reference.config.offload)
        teacher = Reference(replace(actor.settings, model=model), config, self._roles.ranks)
        teacher.prepare()
        with teacher.on_device():
            teacher.check_fits(actor, compares_distributions=False)
        actor.companions = (*actor.companions, teacher)
        return teacher

    def _packing(self, teacher: Reference | WithoutAdapters) -> TorchEngine:
        """Engine that packs what a teacher scores."""
        return teacher if isinstance(teacher, Reference) else self._roles.actor

    @torch.no_grad()
    def score(self, batch: Batch, tokens_per_microbatch: int) -> TeacherTokens:
        """Score all trained tokens, one teacher after another. A collective."""
        k = self._top_k
        table = torch.zeros(len(batch.trained.row), 1 + (2 * k + 1 if k else 0))
        asked: Asked = {"comparison": Comparison(self._classes)} if k else {}
        number = torch.zeros(len(batch.scores), dtype=torch.long)
        groups: dict[str, list[TrainGroup]] = {folder: [] for folder in self._by_folder}
        for group in batch.train_groups:
            name = self._teacher_of(group, batch)
            number[[completion.row for completion in group.completions]] = self.names.index(name)
            groups[self._folders[name]].append(self._seen_by_teacher(group, batch))
        for folder, teacher in self._by_folder.items():
            packing = self._packing(teacher)
            packing.features = self._roles.actor.features
            budget = packing.tokens_at_once(tokens_per_microbatch)
            plan = plan_shares(groups[folder], budget, self._roles.ranks.size)
            with teacher.on_device():
                for micro_batch in self._roles.work.of(self._micro_batches(packing, plan)):
                    outputs = teacher.forward(micro_batch, **asked)
                    if not micro_batch.is_idle:
                        place = batch.places(micro_batch.row, micro_batch.column)
                        compared = () if outputs.compared is None else (outputs.compared,)
                        table[place] = torch.cat([outputs.logprobs[:, None], *compared], dim=1).cpu()
        table = self._roles.ranks.sum_columns({"said": table})["said"]
        return TeacherTokens(table[:, 0], table[:, 1 : 1 + k].long(), table[:, 1 + k :], number[batch.trained.row])

    def _classes(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[n, V] -> [n, 2 k + 1]: ids as numbers, which fp32 has exactly up to 2^24, and log-probs of their classes."""
        ids = likeliest(logprobs[:, : self._known], self._top_k)
        return torch.cat([ids.to(logprobs.dtype), class_logprobs(logprobs, ids)], dim=1)

    def _micro_batches(self, packing: TorchEngine, plan: Sequence[Sequence[Share]]) -> Iterator[MicroBatch]:
        for shares in plan:
            share = shares[self._roles.ranks.rank]
            yield replace(packing.pack(share.groups), is_idle=share.is_idle)

    def _teacher_of(self, group: TrainGroup, batch: Batch) -> str:
        if not self._settings.teachers:
            return DEFAULT
        prompt, key = _received(group, batch).ticket.prompt, self._settings.teacher_key
        name = teacher_of(columns_of(prompt), key, self._folders)
        if name is None:
            raise BadStateError(
                f"row {prompt.row_id} has {prompt.columns.get(key)!r} in column {key!r}, which is no teacher in "
                f"algorithm.distillation.teachers ({', '.join(self.names)}). Add it, or one of the name default"
            )
        return name

    def _seen_by_teacher(self, group: TrainGroup, batch: Batch) -> TrainGroup:
        """The group after the prompt that its teacher sees: the same completions and images."""
        if self._hint is None:
            return group
        item = _received(group, batch)
        columns = columns_of(item.ticket.prompt)
        if missing := self._hint.missing(columns):
            raise BadStateError(
                f"row {item.ticket.prompt.row_id} has no text in column {missing[0]!r}, which "
                "algorithm.distillation.privileged shows to the teacher. Leave the row or the setting out"
            )
        measured = batch.processor.measure(hinted(item.prompt, self._hint.of(columns)), item.blobs)

        def with_pixels() -> EncodedPrompt:
            plain = group.whole_prompt
            return replace(measured, pixel_values=plain.pixel_values, video_pixel_values=plain.video_pixel_values)

        if group.encode is None:
            return replace(group, prompt=with_pixels(), traces={})
        return replace(group, prompt=measured, encode=with_pixels, traces={})


def _received(group: TrainGroup, batch: Batch) -> ReceivedGroup:
    return batch.received[int(batch.groups[group.completions[0].row])]

"""Rows with demonstrations: prompts, and the token ids of the answers that are to be learnt."""

from __future__ import annotations

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train, open_validation
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.row_survey import PromptRows
from asyncrl.errors import UserError
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.sft.trainer import Demonstration


class DemonstrationRows:
    """The usable rows of data.train_files, or of data.val_files."""

    def __init__(self, config: RunConfig, processor: PromptProcessor, *, is_held_out: bool = False):
        """Raises UserError where no row is usable, or there are none."""
        self._data, self._processor = config.data, processor
        source = open_validation(config.data, "sft") if is_held_out else open_train(config.data, "sft")
        if source is None:
            raise UserError("data.val_files is empty: there are no held-out rows")
        name, most_mib = "held-out" if is_held_out else "training", config.network.max_message_mib
        self._rows = PromptRows(source, config.data, processor, most_mib, name, check=self._target_ids)
        self.survey = self._rows.usable()
        self.usable = self.survey.usable
        """Numbers of the usable rows."""

    def demonstration(self, index: int) -> Demonstration:
        rendered = self.render(index)
        return Demonstration(rendered.prompt, rendered.blobs, self._target_ids(rendered))

    def render(self, index: int) -> RenderedPrompt:
        return self._rows.render(index)

    def _target_ids(self, rendered: RenderedPrompt) -> list[int]:
        """Token ids of the demonstration. Raises UserError where there is none, or it is too long."""
        data, row_id = self._data, rendered.prompt.row_id
        if not rendered.target:
            raise UserError(f"row {row_id}: column {data.target_key!r} (data.target_key) must be a non-empty string")
        ids = self._processor.tokenize_completion(rendered.target)
        if len(ids) > data.max_response_length:
            raise UserError(
                f"row {row_id}: the target has {len(ids)} tokens, over data.max_response_length = "
                f"{data.max_response_length}. Raise it or shorten the target"
            )
        return ids

"""Read a run's configuration, tokenizer, data set and images, for its samples. Loads no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from asyncrl.config.sections import DataConfig
from asyncrl.data.images import content_hash
from asyncrl.errors import UserError
from asyncrl.run_folder.contents import MODEL_FOLDER, checkpoint_folders
from asyncrl.run_folder.failure import is_there
from asyncrl.telemetry.recorder import CONFIG_FILE, IMAGES_FOLDER
from asyncrl_plugins.viewer.samples.model import SampleImage
from asyncrl_plugins.viewer.samples.sample_index import PromptText
from protocol.messages import Group

if TYPE_CHECKING:
    from asyncrl.data.dataset import RowSource
    from asyncrl.data.prompts import PromptRenderer, RenderedPrompt

TOKENIZER_FILE = "tokenizer.json"


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Read the run's config.yaml without checks, as another version may have written it; empty if there is none.

    Raises UserError for a file that is no configuration of a run.
    """
    file = run_dir / CONFIG_FILE
    if not is_there(file):
        return {}
    fix = "Restore it, or move it away: without it tokens may be numbers, and images missing"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise UserError(f"cannot read {file}: {' '.join(str(problem).split())}. {fix}") from None
    sections = ("model", "data", "trainer")
    if not isinstance(config, dict) or not all(isinstance(config.get(section), dict) for section in sections):
        raise UserError(f"{file} is no configuration of a run: it has not {', '.join(sections)}. {fix}")
    return config


class TokenTexts:
    """Texts of tokens, by the tokenizer of the run's model. Without a tokenizer a token's text is its number."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        newest_first = reversed(checkpoint_folders(run_dir).values())
        saved = [folder / MODEL_FOLDER / TOKENIZER_FILE for folder in newest_first]
        self._places = [run_dir / "export" / TOKENIZER_FILE, *saved]
        if config:
            self._places.append(Path(config["model"]["path"]) / TOKENIZER_FILE)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        file = next((place for place in self._places if place.is_file()), None)
        return None if file is None else Tokenizer.from_file(str(file))

    @property
    def problem(self) -> str:
        """Reason that tokens are shown as numbers; empty if there is a tokenizer."""
        if self._tokenizer is not None:
            return ""
        return f"there is no tokenizer: none of {', '.join(map(str, self._places))} is there. Tokens are numbers"

    def plain(self, token_ids: np.ndarray) -> str:
        """Decode tokens, without the special ones."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids.tolist()))
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def each(self, token_ids: np.ndarray) -> tuple[str, ...]:
        """Decode into [T] texts that together are the whole. A character of several tokens is in the last of them."""
        if self._tokenizer is None:
            return tuple(f"{'' if place == 0 else ' '}{token}" for place, token in enumerate(token_ids.tolist()))
        stream = DecodeStream(skip_special_tokens=False)
        texts = [stream.step(self._tokenizer, token) or "" for token in token_ids.tolist()]
        if texts:  # an unfinished character at the end
            whole = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
            texts[-1] += whole[len("".join(texts)) :]
        return tuple(texts)


class RunRows:
    """Rows and images of the run's data set, which is opened for the first row. `problem` says why one is missing."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        self._images = run_dir / IMAGES_FOLDER
        self._data = DataConfig.model_validate(config["data"]) if config else None
        self.problem = "" if config else f"{run_dir} has no config.yaml that names the data set"

    def prompt(self, row: int) -> RenderedPrompt | None:
        """Render a row; None where it cannot be read."""
        if self._opened is None:
            return None
        rows, renderer = self._opened
        try:
            return renderer.render(rows[row], rows.row_id(row))
        except (UserError, OSError) as problem:
            self.problem = f"its row cannot be read: {problem}"
            return None

    def images(self, prompt: PromptText) -> tuple[SampleImage, ...]:
        """Read a prompt's images and its videos' first frames: from the run's directory, else from the data set."""
        wanted = [*((digest, 0) for digest in prompt.images), *prompt.videos]
        blobs = {digest: data for digest, _ in wanted if (data := self._stored(digest)) is not None}
        if prompt.row_id and any(digest not in blobs for digest, _ in wanted) and self._opened is not None:
            for row in self._opened[0].places_of(prompt.row_id):
                rendered = self.prompt(row)
                blobs |= rendered.blobs if rendered else {}
        changed = f"row {prompt.row_id} has other images now: the data set has changed"
        missing = self.problem or (changed if prompt.row_id else "it is not known which row it belongs to")
        return tuple(
            SampleImage(digest, blobs.get(digest), "" if digest in blobs else missing, frames)
            for digest, frames in wanted
        )

    def _stored(self, digest: str) -> bytes | None:
        for path in self._images.glob(f"{digest}.*") if digest else ():
            if content_hash(data := path.read_bytes()) == digest:
                return data
        return None

    @cached_property
    def _opened(self) -> tuple[RowSource, PromptRenderer] | None:
        if self._data is None:
            return None
        from asyncrl.data.dataset import open_train
        from asyncrl.data.prompts import PromptRenderer

        try:
            return open_train(self._data, "environment"), PromptRenderer(self._data)  # whatever the run needed
        except (UserError, OSError) as problem:
            self.problem = f"the data set of config.yaml cannot be opened in {Path.cwd()}: {problem}"
            return None


def prompt_of_tokens(group: Group, texts: TokenTexts) -> PromptText:
    """Decode a group's prompt tokens: one text, without row, answer and roles. It needs no data set."""
    text = texts.plain(group.prompt_ids).strip()
    videos = () if group.video_grids is None else tuple(("", int(grid[0])) for grid in group.video_grids)
    return PromptText("", ({"role": "prompt", "content": text},), "", group.image_hashes, videos)

"""Token ids as texts, by the tokenizer of the run's model. Loads no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from asyncrl.run_folder.checkpoints import MODEL_FOLDER, checkpoint_folders

TOKENIZER_FILE = "tokenizer.json"


class TokenTexts:
    """Where there is no tokenizer, a token's text is its number."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        """`config` is the content of the run's config.yaml; empty if there is none."""
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
        """Empty if there is a tokenizer."""
        if self._tokenizer is not None:
            return ""
        return f"there is no tokenizer: none of {', '.join(map(str, self._places))} is there. Tokens are numbers"

    def plain(self, token_ids: np.ndarray) -> str:
        """Without special tokens."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids.tolist()))
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def each(self, token_ids: np.ndarray) -> tuple[str, ...]:
        """[T] texts that together are the whole; a character of several tokens stands at the last of them."""
        if self._tokenizer is None:
            return tuple(f"{'' if place == 0 else ' '}{token}" for place, token in enumerate(token_ids.tolist()))
        stream = DecodeStream(skip_special_tokens=False)
        texts = [stream.step(self._tokenizer, token) or "" for token in token_ids.tolist()]
        if texts and (rest := self._rest(token_ids, "".join(texts))):
            texts[-1] += rest  # an unfinished character at the end
        return tuple(texts)

    def _rest(self, token_ids: np.ndarray, said: str) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)[len(said) :]

"""The `data` section: the rows, and their way to prompts."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.section import Section


class DataConfig(Section):
    train_files: tuple[str, ...]
    """Parquet or JSONL files, image folders, or `org/name@split` of the `datasets` library."""
    val_files: tuple[str, ...] = ()
    """Held-out rows, never trained on; same kinds as train_files."""
    prompt_key: str = "prompt"
    """Column with the question: a string (which may contain `<image>` and `<video>`) or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer, handed to the rewards."""
    image_key: str = "images"
    """Column with 0 to N images per row: paths, bytes or a list of either. A missing column means text only."""
    video_key: str = "videos"
    """Column with 0 to N videos per row, each a list of frames: paths or bytes of images, no video files."""
    video_fps: float = Field(default=2.0, gt=0)
    """Frames per second of the videos in video_key: places them in time for models that ask (Qwen2.5-VL, Qwen3-VL)."""
    target_key: str = "target"
    """Column with the demonstration that `asyncrl sft` imitates."""
    image_dir: str = ""
    """Base of relative image and frame paths; empty means the folder of the data file."""
    format_prompt: str = ""
    """Jinja template file for the question; it sees `content` and every column. Empty means the question as it is."""
    system_prompt: str = ""
    """System message before the question; empty means none."""
    max_prompt_length: int = Field(default=2048, gt=0)
    """Tokens, image tokens included. Longer prompts are refused by name or, with filter_overlong_prompts, left out."""
    max_response_length: int = Field(default=512, gt=0)
    """Most tokens sampled per completion."""
    filter_overlong_prompts: bool = False
    """Leave out rows over max_prompt_length (counted and named) instead of stopping."""
    shuffle: bool = True
    """Visit the training rows in a seeded random order, fresh each epoch."""
    max_train_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""
    max_val_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""

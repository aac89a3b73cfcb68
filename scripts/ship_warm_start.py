"""Put a warm start of the demo into the package, in bf16: half the bytes, and a rounding that training does not notice.

python -m asyncrl.demo.prepare --folder runs/warm-start --from-scratch
python scripts/ship_warm_start.py runs/warm-start/sft/export
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="of the supervised run that prepare has made")
    export: Path = parser.parse_args().export

    import torch
    from transformers import AutoModelForImageTextToText

    from asyncrl.demo.prepare import WARM_START

    shutil.copytree(export, WARM_START, dirs_exist_ok=True)  # beside its README
    AutoModelForImageTextToText.from_pretrained(export, dtype=torch.bfloat16).save_pretrained(WARM_START)


if __name__ == "__main__":
    main()

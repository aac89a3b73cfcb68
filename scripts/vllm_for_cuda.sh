#!/usr/bin/env bash
# Install vLLM's package for CUDA in FOLDER (8 GB), and check it against this checkout without a GPU: its libraries load,
# its worker takes ours, its arguments are accepted (tests/rigs/cuda_stand_in.py). Needs gcc and nm.
#
#     bash scripts/vllm_for_cuda.sh FOLDER
set -euo pipefail
FOLDER="$(realpath -m "${1:?usage: bash scripts/vllm_for_cuda.sh FOLDER}")"
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
VLLM="$(sed -n 's/.*"vllm==\([0-9.]*\)".*/\1/p' "$ROOT/pyproject.toml")"
PYTHON="${PYTHON:-python3}"
pinned() { sed -n "s/^  \"$1==\([0-9.]*\)\",/\1/p" "$ROOT/pyproject.toml"; }

[ -x "$FOLDER/bin/python" ] || "$PYTHON" -m venv "$FOLDER"
"$FOLDER/bin/pip" install -q "vllm==$VLLM" peft msgpack pyzmq xxhash psutil pyarrow pydantic pyyaml rich datasets
# `===` takes the build for CUDA where an index has one for the CPU, too, whose version sorts above it.
"$FOLDER/bin/pip" install -q "torch===$(pinned torch)" "torchvision===$(pinned torchvision)" "transformers==$(pinned transformers)"
cd "$ROOT"
exec "$FOLDER/bin/python" -m tests.rigs.cuda_stand_in

#!/usr/bin/env bash
# What the demo's services need before they start: data, a warm start, and keys. What is there already is kept.
#
#     docker/prepare_demo.sh FOLDER KEYS
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER="$1" KEYS="$2"

[ -f "$KEYS/learner.secret" ] || asyncrl keys "$KEYS"
[ -d "$FOLDER/sft/export" ] || python examples/digits/prepare.py --folder "$FOLDER"

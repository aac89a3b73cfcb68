#!/usr/bin/env bash
# Train on one GPU: rollout server and learner take turns on it. Further arguments are key=value, --resume or --dry-run.
#   scripts/sync_single_gpu.sh asyncrl/demo/grpo.yaml learner.max_staleness=0 run_dir=runs/digits-sync
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: $0 CONFIG [key=value ...] [--resume] [--dry-run]" >&2
  exit 2
fi
python="$(dirname "$0")/../.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" -m asyncrl sync "$@"

#!/usr/bin/env bash
# What the demo's services need before they start: keys, data, a warm start. What is there already is kept.
#
#     docker/prepare_demo.sh FOLDER KEYS [full|quick]
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER="$1" KEYS="$2" SIZE="${3:-full}"

[ -f "$KEYS/learner.secret" ] || asyncrl keys "$KEYS"
if [ ! -f "$FOLDER/config.yaml" ]; then # written last
  rm -rf "$FOLDER"
  if [ "$SIZE" = quick ]; then OPTIONS=--quick; else OPTIONS=; fi
  mkdir -p "$FOLDER"
  echo "$SIZE" > "$FOLDER/size"
  exec python -m asyncrl.demo.prepare --folder "$FOLDER" $OPTIONS
fi
KEPT="$(cat "$FOLDER/size" 2>/dev/null || echo "unknown size")"
echo "the demo in $FOLDER is kept as it was prepared: $KEPT"
if [ "$KEPT" != "$SIZE" ]; then
  echo "warning: ASYNCRL_DEMO=$SIZE has no effect on it. To begin anew: docker compose down --volumes (removes the run)"
fi

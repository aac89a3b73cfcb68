#!/usr/bin/env bash
# Keys, data and a warm start, which the demo's services need before they start. Files that are there already are kept.
#
#     docker/prepare_demo.sh FOLDER KEYS [full|digits|quick]
#
# full: a real language model and real pictures; digits: handwritten digits; quick: these, in two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER="$1" KEYS="$2" SIZE="${3:-full}"

[ -f "$KEYS/learner.secret" ] || asyncrl keys "$KEYS"
if [ ! -f "$FOLDER/config.yaml" ]; then # written last
  rm -rf "$FOLDER"
  mkdir -p "$FOLDER"
  echo "$SIZE" > "$FOLDER/size"
  case "$SIZE" in
    full) exec python -m asyncrl_plugins.demos.vqa "$FOLDER" ;;
    digits) exec python -m asyncrl.demo.prepare --folder "$FOLDER" ;;
    quick) exec python -m asyncrl.demo.prepare --folder "$FOLDER" --quick ;;
    *) echo "error: ASYNCRL_DEMO is $SIZE: set it to full, digits or quick" >&2; exit 2 ;;
  esac
fi
KEPT="$(cat "$FOLDER/size" 2>/dev/null || echo "unknown size")"
echo "the demo in $FOLDER is kept as it was prepared: $KEPT"
if [ "$KEPT" != "$SIZE" ]; then
  echo "warning: ASYNCRL_DEMO=$SIZE has no effect on it. To begin anew: docker compose down --volumes (removes the run)"
fi

#!/usr/bin/env bash
# First hour on a real GPU: checks in order, each with what is expected, and one report at the end.
#   scripts/first_gpu_hour.sh [--dry-run] [--out FOLDER] [STEP ...]      steps by name; default: all of them
# A step that needs more GPUs than there are (nvidia-smi, CUDA_VISIBLE_DEVICES) is skipped and says so. Steps from
# vllm-run on use the model of step digits. Exit code 1 if a step failed.
# BUDGET_GIB (default 16) is the memory of one GPU that two processes divide where they share it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python="$PWD/.venv/bin/python"
[ -x "$python" ] || python="$(command -v python3)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
budget="${BUDGET_GIB:-16}"
out="" dry=no wanted=()
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry=yes ;;
    --out) shift; out="${1:?--out needs a folder}" ;;
    -*) sed -n '2,7p' "$0" >&2; exit 2 ;;
    *) wanted+=("$1") ;;
  esac
  shift
done
out="${out:-runs/first-gpu-hour-$(date +%Y%m%d-%H%M%S)}"
case "$out" in /*) ;; *) out="$PWD/$out" ;; esac

gpus=0
if command -v nvidia-smi >/dev/null; then
  gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    visible="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^ ]')"
    gpus=$((visible < gpus ? visible : gpus))
  fi
fi
rows=() failed=0 passed=0 skipped=0 number=0 known=()

# step NAME GPUS SECONDS EXPECTED COMMAND...
step() {
  local name="$1" needs="$2" limit="$3" expected="$4" began code result log
  shift 4
  known+=("$name")
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  number=$((number + 1))
  if [ "$dry" = yes ]; then
    printf '%2d. %-18s GPUs: %s, at most %s s\n    expected: %s\n    %s\n' "$number" "$name" "$needs" "$limit" "$expected" "${*//$'\n'/; }"
    return
  fi
  log="$out/$(printf '%02d' "$number")-$name.log"
  if [ "$gpus" -lt "$needs" ]; then
    result="skip: no GPU (needs $needs, found $gpus)" code=0 began="$(date +%s)"
    echo "$result" >"$log"
    skipped=$((skipped + 1))
  else
    printf '%2d. %-18s ... ' "$number" "$name"
    began="$(date +%s)"
    timeout --kill-after=30 "$limit" "$@" >"$log" 2>&1
    code=$?
    if [ "$code" -eq 0 ]; then
      result=pass passed=$((passed + 1))
    else
      result="FAIL: exit code $code"
      [ "$code" -ne 124 ] || result="FAIL: not done after $limit s"
      failed=$((failed + 1))
    fi
    printf '\r'
  fi
  rows+=("| $number | $name | $expected | $result | $(($(date +%s) - began)) | $log |")
  printf '%2d. %-18s %s\n' "$number" "$name" "$result"
}

report() {
  {
    echo "# First hour on a GPU: $passed passed, $failed failed, $skipped skipped"
    echo
    echo "$(date -u +%FT%TZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(uname -sr)"
    echo
    if [ "$gpus" -gt 0 ]; then nvidia-smi -L; else echo "No GPU: nothing below says anything about CUDA unless it passed."; fi
    echo
    echo "| | step | expected | result | s | output |"
    echo "|---|---|---|---|---|---|"
    printf '%s\n' "${rows[@]}"
  } >"$out/report.md"
  echo
  cat "$out/report.md"
}

run="$out/digits/config.yaml"
on_gpu=(learner.device=cuda rollout.device=cuda trainer.max_steps=6)
short_run() { # NAME key=value ...: the command of a short run
  command=("$python" -m asyncrl train "$run" "run_dir=$out/$1" "${on_gpu[@]}" "${@:2}")
}
imports='import sys, torch, transformers, vllm
print("torch", torch.__version__, "CUDA", torch.version.cuda, "transformers", transformers.__version__, "vllm", vllm.__version__)
sys.exit("torch sees no device: is the driver too old?" if not torch.cuda.is_available() else 0)'
profile='import asyncio, sys, tempfile, torch
from pathlib import Path
from benchmarks.gpu_cycle import TINY, cycle_config, run_cycle
from benchmarks.gpu_report import settings
from benchmarks.random_models import make_model
folder = Path(tempfile.mkdtemp())
model = make_model(folder / "model", "100m", dtype="bfloat16", device="cuda")
config = cycle_config(model, folder, TINY, **settings("100m", "cuda", "hf", float(sys.argv[1])))
with torch.profiler.profile() as profiler:
    asyncio.run(run_cycle(config, TINY))
print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=30))
profiler.export_chrome_trace(sys.argv[2])'

if [ "$dry" = no ]; then
  mkdir -p "$out" || exit 2
  trap report EXIT
fi
step driver 1 60 "a driver of 580 or newer (torch is built for CUDA 13)" bash -c '
  nvidia-smi --query-gpu=index,name,uuid,driver_version,memory.total,memory.used --format=csv || exit 1
  driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
  [ "${driver%%.*}" -ge 580 ] || { echo "driver $driver is too old"; exit 1; }'
step headers 0 60 "a C compiler and Python.h: Triton compiles with them" \
  bash -c 'cc --version && ls "$("$1" -c "import sysconfig; print(sysconfig.get_paths()[\"include\"])")/Python.h"' - "$python"
step imports 1 300 "versions of torch, transformers and vllm, and torch sees a device" "$python" -c "$imports"
step doctor 1 300 "no problem; GPUs and driver are listed" "$python" -m asyncrl doctor --quick
step gpu-tests 1 1800 "every test of tests/gpu and the sync cycle pass, none is skipped with one GPU but those of two" \
  "$python" -m pytest -q -rs -p no:cacheprovider tests/gpu tests/plugins/vllm/test_sync_cycle.py
step digits 0 900 "a small model and its data, made on the CPU" \
  "$python" -m asyncrl.demo.prepare --folder "$out/digits" --from-scratch --quick
short_run vllm rollout.engine=vllm model.dtype=bfloat16 "gpu_memory.budget_gib=$budget"
step vllm-run 1 1200 "6 steps with vLLM on CUDA (Model Runner V2), its log-probs accepted at the start" "${command[@]}"
for dtype in float32 bfloat16; do
  limits="1e-3 at most (vllm 0.025: attention in TF32), 1e-4 in the mean" && [ "$dtype" = float32 ] || limits="0.2 at most, 0.03 in the mean"
  step "parity-$dtype" 1 900 "to be read: log-probs of hf and vllm differ from the learner's by $limits (nats)" \
    "$python" benchmarks/logprob_parity.py "$run" --rows 16 learner.device=cuda rollout.device=cuda "model.dtype=$dtype"
done
step sync-cycle 1 1800 "to be read: what stays on the device after each sleep is at most what the plan says (contexts and CUDA graphs are estimates)" \
  "$python" -m benchmarks.gpu_report --size 100m --budget-gib "$budget"
short_run cuda_ipc rollout.weights_channel=cuda_ipc "gpu_memory.budget_gib=$budget"
step channel-cuda_ipc 1 900 "6 steps with both on one GPU, weights over cuda_ipc" "${command[@]}"
for channel in nccl shm zmq; do
  short_run "$channel" rollout.engine=vllm model.dtype=bfloat16 "rollout.weights_channel=$channel"
  step "channel-$channel" 2 900 "6 steps with a GPU for each side, weights over $channel" "${command[@]}"
done
step profile 1 900 "to be read: kernels of a learner's and an engine's step by time; the trace opens in a browser" \
  "$python" -c "$profile" "$budget" "$out/profile.json"

for name in "${wanted[@]}"; do
  [[ " ${known[*]} " == *" $name "* ]] || { echo "no step is called $name; there are: ${known[*]}" >&2; exit 2; }
done
[ "$failed" -eq 0 ]

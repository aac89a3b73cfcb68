#!/usr/bin/env bash
# Measurements of a GPU machine in order of value, within ten minutes: each with a limit, a log and what is expected.
#   scripts/gpu_quarter_hour.sh [--dry-run] [--bundle FILE] [--out FOLDER] [STEP ...]     default: all steps
# --dry-run executes every step with tiny models on the CPU. --bundle is a tar of vLLM and its dependencies for a machine
# without network; its versions are then taken as they are. The page FOLDER/report.md has a table of the steps and what
# each printed; FOLDER is runs/gpu-DATE unless given. Exit code 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python="$PWD/.venv/bin/python"
[ -x "$python" ] || python="$(command -v python3)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out="runs/gpu-$(date +%Y%m%d-%H%M%S)" bundle="" device=cuda wanted=()
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) device=cpu ;;
    --bundle) shift; bundle="${1:?--bundle needs a file}" ;;
    --out) shift; out="${1:?--out needs a folder}" ;;
    -*) sed -n '2,7p' "$0" >&2; exit 2 ;;
    *) wanted+=("$1") ;;
  esac
  shift
done
case "$out" in /*) ;; *) out="$PWD/$out" ;; esac
known=(imports vllm cycle learner decode updates)
for name in "${wanted[@]}"; do
  [[ " ${known[*]} " == *" $name "* ]] || { echo "no step is called $name; there are: ${known[*]}" >&2; exit 2; }
done
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "torch sees no GPU. Use --dry-run, which executes the steps on the CPU" >&2
  exit 2
fi
mkdir -p "$out" || exit 2
module=("$python" -m)
if [ -n "$bundle" ]; then
  mkdir -p "$out/site" && tar -xf "$bundle" -C "$out/site" || { echo "$bundle cannot be unpacked" >&2; exit 2; }
  export PYTHONPATH="$PYTHONPATH:$out/site"
  module=("$python" -m benchmarks.installed_versions)
fi
rows=() failed=() said=()

step() { # NAME SECONDS EXPECTED COMMAND...
  local name="$1" limit="$2" expected="$3" began=$SECONDS result=pass log="$out/$1.log"
  shift 3
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>"$log.err"
  local code=$?
  if [ $code -ne 0 ]; then
    result="FAIL: exit code $code"
    [ $code -ne 124 ] || result="FAIL: not done after $limit s"
    failed+=("$name")
    tail -n 12 "$log.err" >>"$log"
  fi
  rows+=("| $name | $expected | $result | $((SECONDS - began)) |")
  said+=("## $name" "" '```' "$(tail -n 60 "$log" | cut -c1-240)" '```' "")
  printf '%-8s %s, %s s\n' "$name" "$result" "$((SECONDS - began))"
}

report() {
  {
    echo "# GPU measurements: $((${#rows[@]} - ${#failed[@]})) of ${#rows[@]} steps passed"
    echo
    echo "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(uname -sr)"
    echo
    if [ "$device" = cpu ]; then
      echo "Dry run on a CPU with tiny models: nothing below says anything about CUDA."
    else
      nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    fi
    printf '%s\n' "" "| step | expected | result | s |" "|---|---|---|---|" "${rows[@]}" "" "${said[@]}"
  } >"$out/report.md"
  echo "$out/report.md"
}
trap report EXIT

if [ "$device" = cpu ]; then
  size=(--size tiny --device cpu) whole=(--size tiny --device cpu --engines hf) learner=(--size tiny --device cpu --tokens 128 256)
  decode=(--size tiny --device cpu --rows 6 --prompt 40 --steps 4 --graphs) channel=shm steps=3
else
  size=(--size tiny) whole=(--whole --engines vllm) learner=(--size 4b --tokens 16384 46000)
  decode=(--size 4b --rows 128 --prompt 900 --steps 20 --graphs) channel=cuda_ipc steps=50
fi
imports='import torch, transformers, vllm
import asyncrl_plugins.vllm.worker
print("torch", torch.__version__, "transformers", transformers.__version__, "vllm", vllm.__version__)'
graphs='{"max_num_batched_tokens": 16384, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
updates='python="$1" folder="$2" device="$3" channel="$4" steps="$5"
"$python" -m asyncrl.demo.prepare --folder "$folder" --from-scratch --quick &&
  "$python" -m asyncrl train "$folder/config.yaml" "run_dir=$folder/run" "learner.device=$device" "rollout.device=$device" \
    "rollout.weights_channel=$channel" "trainer.max_steps=$steps" evaluation.every_steps=0 gpu_memory.budget_gib=16 &&
  "$python" -m benchmarks.memory_over_steps "$folder/run"'

step imports 60 "vLLM and the worker of the plug-in import" "$python" -c "$imports"
step vllm 120 "log-probs of vLLM, eager, differ from the learner's by 0.2 at most; its memory is free after sleep" \
  "${module[@]}" benchmarks.gpu_report "${size[@]}" --engines vllm --engine-args '{"enforce_eager": true}'
[[ " ${failed[*]} " == *" vllm "* ]] && whole+=(--engines hf)
[ "$device" = cpu ] || whole+=(--engine-args "$graphs")
step cycle 220 "4 billion parameters: 18,000 tokens/s or more (hf 3,000), training in 10 to 12 s, publication at most 1.5 s" \
  "${module[@]}" benchmarks.gpu_report "${whole[@]}"
step learner 110 "backward pass of 5 to 6 s, then 3.5 to 4.5 s with one micro-batch; peak below 23 GiB; a profile by kernel" \
  "$python" -m benchmarks.offload_cost "${learner[@]}" --offloaded --rounds 1 --profile
step decode 80 "a step of equal rows in 30 ms, of ragged ones no longer, captured in 7 to 9 ms; kernels below 8 ms" \
  "$python" -m benchmarks.decode_steps "${decode[@]}"
step updates 120 "memory of the device stays the same over $steps weight versions by $channel" \
  bash -c "$updates" - "$python" "$out/digits" "$device" "$channel" "$steps"
[ ${#failed[@]} -eq 0 ]

#!/bin/bash
# What train.sbatch runs on each node: on the first the learner with its first LEARNER_GPUS GPUs, one for each rank, and
# on every GPU left a rollout server. LEARNER_GPUS=0: servers alone, of a learner elsewhere. Which engine divides the
# learner, fsdp2 or deepspeed, is the configuration's to say: with LEARNER_GPUS=2 or more one without is refused.
set -euo pipefail
network=(network.host="$LEARNER_NODE" network.control_port="$CONTROL_PORT" network.weights_port="$WEIGHTS_PORT"
  network.keys_dir="$KEYS")
servers=()
learner=""
learner_gpus="${LEARNER_GPUS:-1}"
gpus="${SLURM_GPUS_ON_NODE:-1}"
IFS=, read -ra gpu_names <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}" # those that the job may use
serve() { # on the job's GPU $1; again where it waited in vain for a learner that is not up yet (3: a wait ran out)
  local gpu="$1" attempt code=0 server=""
  shift
  trap 'kill -TERM $server 2>/dev/null || true; wait; exit 143' TERM
  for attempt in {1..50}; do
    CUDA_VISIBLE_DEVICES="${gpu_names[gpu]}" "$ASYNCRL" rollout "$CONFIG" "${network[@]}" \
      telemetry.rollout_port="$((FIRST_METRICS_PORT + gpu))" "$@" &
    server=$!
    code=0
    wait "$server" || code=$?
    [ "$code" = 3 ] || return "$code"
    sleep "${RESTART_DELAY:-5}" &
    server=$!
    wait "$server"
  done
  return "$code"
}
trap 'kill -TERM $learner "${servers[@]}" 2>/dev/null || true' TERM INT EXIT

if [ "${SLURM_NODEID:-0}" = 0 ] && [ "$learner_gpus" -gt 0 ]; then
  ranks=()
  if [ "$learner_gpus" -gt 1 ]; then
    ranks=(learner.num_processes="$learner_gpus")
  fi
  CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${gpu_names[*]:0:learner_gpus}")" \
    "$ASYNCRL" learn "$CONFIG" --unattended "${network[@]}" "${ranks[@]}" "$@" &
  learner=$!
fi
for ((gpu = ${learner:+$learner_gpus}+0; gpu < gpus; gpu++)); do
  serve "$gpu" "$@" &
  servers+=($!)
done

# On the first node the learner's exit code: 0 finished, 1 crashed, 2 a mistake to mend, 3 bad state (failure.json).
if [ -n "$learner" ]; then
  wait "$learner"
fi
# A server that crashes is missed by nobody: its work goes to others. One that is misconfigured ends the job.
for server in "${servers[@]}"; do
  wait "$server" || [ $? != 2 ]
done

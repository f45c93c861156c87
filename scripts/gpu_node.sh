#!/usr/bin/env bash
# Runs a gin file on all GPUs of this machine, one process each.
#
#   scripts/gpu_node.sh [--dry-run] [--gpus=N] GIN_FILE [flags of spec_decode.run]
#
# Without --gpus, as many as nvidia-smi lists. --dry-run prints the commands.
# In T5X, --gin.partitioning.PjitPartitioner.num_partitions=N, with N GPUs, lets
# all of them share a batch of 1.
set -euo pipefail
dry='' gpus=''
while [[ "${1:-}" == --dry-run || "${1:-}" == --gpus=* ]]; do
  if [ "$1" = --dry-run ]; then dry=1; else gpus=${1#--gpus=}; fi
  shift
done
cd "$(dirname "$0")/.."
if [ ! -f "${1:-}" ]; then
  echo "Expected a gin file, found no '${1:-}'." >&2
  exit 2
fi
gin_file=$1
shift
gpus=${gpus:-$(nvidia-smi --list-gpus | wc -l)}
port=${PORT:-12321}
started=()
# Processes in the background do not hear of an interrupt.
trap 'kill "${started[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 143' INT TERM
for ((i = 0; i < gpus; i++)); do
  job=(env "CUDA_VISIBLE_DEVICES=$i" python -m spec_decode.run
    "--distributed=localhost:$port,$gpus,$i" "--gin_file=$gin_file" "$@")
  if [ -n "$dry" ]; then
    printf '%q ' "${job[@]}" && echo
  else
    "${job[@]}" &
    started+=($!)
  fi
done
# Each is waited for, so that one that fails is the status of all.
status=0
for process in "${started[@]}"; do
  wait "$process" || status=$?
done
exit "$status"

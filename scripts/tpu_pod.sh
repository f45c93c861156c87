#!/usr/bin/env bash
# Runs a gin file for T5X on every worker of a TPU pod slice, or on a TPU VM.
#
#   scripts/tpu_pod.sh [--dry-run] TPU ZONE GIN_FILE [flags of spec_decode.run]
#
# Copies the last commit to all workers, installs it there with T5X, and starts
# one process per worker; they find each other. --dry-run prints the commands.
set -euo pipefail
run() { "$@"; }
if [ "${1:-}" = --dry-run ]; then
  run() { printf '%q ' "$@" && echo; }
  shift
fi
if [ $# -lt 3 ]; then
  echo 'Expected TPU ZONE GIN_FILE, as in scripts/tpu_pod.sh my-pod us-central2-b' \
    'configs/runs/t5x_infer_ende_small_t0.gin' >&2
  exit 2
fi
tpu=$1 zone=$2 gin_file=$3
shift 3
cd "$(dirname "$0")/.."
if [ ! -f "$gin_file" ]; then
  echo "Expected a gin file, found no $gin_file." >&2
  exit 2
fi
archive=spec_decode.tar.gz
printf -v job '%q ' python3 -m spec_decode.run --distributed=auto \
  "--gin_file=$gin_file" "$@"
command="set -e; mkdir -p spec_decode; tar -xzf $archive -C spec_decode
cd spec_decode
python3 -m pip install --quiet 'jax[tpu]<0.11' -e '.[t5x]'
python3 -m pip install --quiet --no-deps -r scripts/t5x_requirements.txt
$job"
run git archive --format=tar.gz --output="/tmp/$archive" HEAD
run gcloud compute tpus tpu-vm scp "/tmp/$archive" "$tpu:" \
  --zone="$zone" --worker=all
run gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all \
  --command="$command"

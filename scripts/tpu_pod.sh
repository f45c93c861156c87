#!/usr/bin/env bash
# Runs a gin file on every worker of a TPU pod slice, or on a TPU VM.
#
#   scripts/tpu_pod.sh [--dry-run] TPU ZONE GIN_FILE [flags of spec_decode.run]
#
# Copies the last commit to all workers, installs it there with T5X, and starts
# one process per worker; they find each other. --dry-run prints the commands.
# PYTHON is the workers' Python, 3.11 or later; python3 unless given.
#
#   PYTHON=python3.11 scripts/tpu_pod.sh my-pod us-central2-b \
#     configs/runs/t5x_infer_ende_small_t0.gin \
#     --gin.partitioning.PjitPartitioner.num_partitions=8 \
#     --gin.INFER_OUTPUT_DIR="'gs://my-bucket/ende'" ...
#
# num_partitions is the number of devices of the slice, so that batch 1 fits
# the mesh. All workers look in INFER_OUTPUT_DIR for what is done and the first
# writes there: with several it has to be one place, gs:// or a shared disk.
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
printf -v python '%q' "${PYTHON:-python3}"
printf -v job '%q ' python -m spec_decode.run --distributed=auto \
  "--gin_file=$gin_file" "$@"
command="set -e
if ! $python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo 'Expected Python 3.11 or later, got:' \$($python --version) >&2
  echo 'Install one with its venv on all workers and name it:' \
    'PYTHON=python3.11 scripts/tpu_pod.sh ...' >&2
  exit 2
fi
mkdir -p spec_decode
tar -xzf $archive -C spec_decode
cd spec_decode
$python -m venv .venv
. .venv/bin/activate
python -m pip install --quiet 'jax[tpu]<0.11' -e '.[t5x]'
python -m pip install --quiet --no-deps -r scripts/t5x_requirements.txt
$job"
run git archive --format=tar.gz --output="/tmp/$archive" HEAD
run gcloud compute tpus tpu-vm scp "/tmp/$archive" "$tpu:" \
  --zone="$zone" --worker=all
run gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all \
  --command="$command"

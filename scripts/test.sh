#!/usr/bin/env bash
# Every check of the project: style, then tests. CI runs the same.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
# One device and a quiet TensorFlow, wherever this runs.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} TF_CPP_MIN_LOG_LEVEL=3
python -m pytest "$@"

#!/usr/bin/env bash
# Every check of the project: style, then tests. CI runs the same.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
python scripts/make_tables.py --check
# One device and a quiet TensorFlow, wherever this runs. The tests are many
# small programs, so compiling them fast matters more than running them fast.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} TF_CPP_MIN_LOG_LEVEL=3
export XLA_FLAGS="--xla_backend_optimization_level=0 \
  --xla_llvm_disable_expensive_passes=true \
  --xla_cpu_use_fusion_emitters=false \
  --xla_cpu_parallel_codegen_split_count=1 ${XLA_FLAGS:-}"
python -m pytest -n 2 --dist worksteal "$@"

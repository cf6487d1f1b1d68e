#!/usr/bin/env bash
# Measure this machine's NVIDIA GPU, in ten minutes at most: prints a table, writes one JSON file.
#
#   benchmarks/gpu.sh [--dry] [OUTDIR] [WHEELS]
#
# OUTDIR is where the file goes (default: benchmarks/results). The machine needs Python with jax for CUDA; nothing of it is changed:
# packages of duetto's that are missing are taken from a folder of wheels, or the index, into a folder that is removed. PYTHON
# names another interpreter, XLA_FLAGS are kept and recorded, PARTS names the parts to measure, whose figures join those of the
# file. --dry rehearses on a tiny shape, on any device: its file is DATE-gpu-dry.json. Without it nothing is written where there is
# no NVIDIA GPU.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
dry=() name=gpu seconds=380
if [ "${1:-}" = --dry ]; then dry=(--dry) name=gpu-dry seconds=9999 && shift; fi # a rehearsal leaves nothing out
mkdir -p "${1:-$root/benchmarks/results}"
out=$(cd "${1:-$root/benchmarks/results}" && pwd)
wheels=${2:-}
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site:$root/src:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

pip() { "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$site" "$@"; }

if [ -n "$wheels" ]; then pip --no-index "$wheels"/*.whl; fi
if ! (cd "$site" && "$python" -c 'from importlib.metadata import version; version("duetto")' 2>/dev/null); then
  # the package reads its version: say it without a build, which may need what is not here
  mkdir -p "$site/duetto-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: duetto\nVersion: 0+source\n' >"$site/duetto-0.dist-info/METADATA"
fi
for package in msgspec wadler_lindig jaxtyping markupsafe jinja2 tokenizers safetensors tqdm ml_dtypes; do
  if ! "$python" -c "import $package" 2>/dev/null; then
    pip "$package" || { echo "$package is missing: pass a folder with its wheel" >&2 && exit 1; }
  fi
done

# what this machine is, and whether its kernels pass; a fault is said, and measured all the same
shape=8b
if [ ${#dry[@]} -gt 0 ]; then shape=135m; fi
"$python" -m duetto doctor --shape "$shape" --compilation-cache none || echo "duetto doctor found a fault" >&2

file="$out/$(date +%F)-$name.json"
if [ -n "${PARTS:-}" ]; then
  # shellcheck disable=SC2086 # a list of words
  "$python" -m benchmarks.gpu "$file" --parts $PARTS ${dry[@]+"${dry[@]}"}
  exit
fi
status=0
"$python" -m benchmarks.gpu "$file" --anew --seconds "$seconds" ${dry[@]+"${dry[@]}"} || status=$?
if [ "$status" = 2 ]; then exit 2; fi # refused: nothing is measured here
# another process, since both frameworks keep the memory that they take
if "$python" -c 'import torch, transformers' 2>/dev/null; then
  XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m benchmarks.gpu "$file" --parts peers ${dry[@]+"${dry[@]}"}
fi
echo "written: $file"
exit "$status"

#!/usr/bin/env bash
# One GPU session on a machine that has Python, torch with CUDA, and nothing of ours: benchmarks/gpu_session.sh --help
#
#   WHEELS   folder of wheels that the machine lacks (default: .whl in this checkout); they are installed for this call
#   PYTHON   the interpreter that has torch (default python3)
#   OUT      folder of the results, if --out names none
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/.whl}
shopt -s nullglob
carried=("$wheels"/*.whl)
path=$root/benchmarks:$root
if [ "${#carried[@]}" -gt 0 ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "${carried[@]}"
  path=$path:$site
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
"$python" -m gpu_session --spent "$SECONDS" "$@"

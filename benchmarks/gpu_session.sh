#!/usr/bin/env bash
# One GPU session on a machine that has Python, torch with CUDA, and nothing of ours.
#
#   benchmarks/gpu_session.sh --list               the rows, and how long they are expected to take
#   benchmarks/gpu_session.sh --seconds 520        as many as fit; again, until nothing is left (exit code 0)
#   benchmarks/gpu_session.sh --from FOLDER        earlier rows, where the machine is another one
#   benchmarks/gpu_session.sh --rehearse           every row on a CPU, with tiny shapes
#   benchmarks/gpu_session.sh --help               --only, --out, --again, --at-once
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
"$python" -m gpu_session --spent "$SECONDS" "$@" &
session=$!
# Whoever ends this script ends the session, which ends its rows.
trap 'kill -TERM "$session" 2>/dev/null || true' TERM INT
code=0
wait "$session" || code=$?
while kill -0 "$session" 2>/dev/null; do
  code=0
  wait "$session" || code=$?
done
exit "$code"

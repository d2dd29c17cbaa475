#!/usr/bin/env bash
# One GPU session on a machine that has Python and torch with CUDA; titanlab need not be installed.
#
#   benchmarks/gpu_session.sh --list               the rows, and how long they are expected to take
#   benchmarks/gpu_session.sh --seconds 520        as many as fit; again, until nothing is left (exit code 0)
#   benchmarks/gpu_session.sh --from FOLDER        earlier rows, where the machine is another one
#   benchmarks/gpu_session.sh --rehearse           every row on a CPU, with tiny shapes
#   benchmarks/gpu_session.sh --again              also the rows that failed or were late
#   benchmarks/gpu_session.sh --help               --only, --out, --at-once
#
# Exit code 0: nothing is left; 1: rows are left; 2: the session cannot begin or go on.
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
  site=$(mktemp -d) || exit 2
  trap 'rm -rf "$site"' EXIT
  install=(-m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir)
  if ! answer=$("$python" "${install[@]}" --upgrade --target "$site" "${carried[@]}" 2>&1); then
    echo "gpu_session: the wheels in $wheels cannot be installed: $(tail -n 1 <<<"$answer")"
    exit 2
  fi
  path=$path:$site
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
"$python" -m gpu_session --spent "$SECONDS" "$@" &
session=$!
# A signal to this script ends the session, which ends its rows.
trap 'kill -TERM "$session" 2>/dev/null || true' TERM INT
code=0
wait "$session" || code=$?
while kill -0 "$session" 2>/dev/null; do
  code=0
  wait "$session" || code=$?
done
exit "$code"

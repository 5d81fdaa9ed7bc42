#!/usr/bin/env bash
# Makes .venv with the test extra (sglang 0.5.23 included: about 11 GB, 3 to 6 minutes) and runs ruff, the type checker and pytest.
# Arguments go to pytest:  scripts/test.sh tests/formats -k e8m0
set -euo pipefail
cd "$(dirname "$0")/.."

# a disk that fills up shows as a hundred errors of other kinds
need_mb=4000
[ -e .venv/test-extra ] || need_mb=16000
free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
if [ "$free_mb" -lt "$need_mb" ]; then
  echo "scripts/test.sh: $free_mb MB free here; $need_mb MB are needed (.venv takes 11 GB, the tests up to 3)" >&2
  exit 1
fi

if ! .venv/bin/python -c '' 2>/dev/null; then
  "${PYTHON:-python3}" -m venv .venv
fi
# the stamp is younger than pyproject.toml only after a complete install of what pyproject.toml asks for now
if [ ! -e .venv/test-extra ] || [ pyproject.toml -nt .venv/test-extra ]; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
  touch .venv/test-extra
fi

# one thread a process: the suite starts up to two sglang ranks at once
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if [ $# -gt 0 ]; then
  exec .venv/bin/python -m pytest "$@"
fi
# two processes, so that what sglang does to the process that it is imported into cannot reach the other tests
.venv/bin/python -m pytest --ignore tests/engines
exec .venv/bin/python -m pytest tests/engines

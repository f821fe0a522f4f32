#!/usr/bin/env bash
# Installs the package with its test extra, editable, into the active environment or else into .venv, and prints
# that environment's interpreter. Does nothing else when the environment is up to date, nor when PYTHON names the
# interpreter to use as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${PYTHON:-}" ]; then
  echo "$PYTHON"
  exit
fi

environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-$PWD/.venv}}
python=$environment/bin/python
stamp=$environment/.megatron_glm_setup
wanted="$PWD $(cat setup.py pyproject.toml examples/setup.sh | cksum)"

# An installed torch stays (a GPU machine's own build); without a GPU, one release is pinned.
install_torch() {
  if "$python" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; then
    return
  elif nvidia-smi >/dev/null 2>&1; then
    "$python" -m pip install -q 'torch>=2.11'
  else
    "$python" -m pip install -q 'torch==2.13.0'
  fi
}

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "setting up $environment (takes a minute or two) ..." >&2
  if [ "$environment" = "$PWD/.venv" ]; then
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: python3 is $(python3 -V 2>&1), 3.11 or newer is needed: activate an environment that has it" >&2
      exit 1
    fi
    python3 -m venv "$environment"
  fi
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2
  install_torch >&2
  "$python" -m pip install -q -e '.[test]' >&2
  echo "$wanted" > "$stamp"
fi
echo "$python"

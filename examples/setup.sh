#!/usr/bin/env bash
# Installs the package with its test extra, editable, into the active environment or else into .venv, and prints
# that environment's interpreter. Where a Hopper GPU is seen, the GPU packages come too (megatron_glm/packages.py).
# Does nothing else when the environment is up to date, nor when PYTHON names the interpreter to use as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "error: $*" >&2 && exit 2; }
packages() { "$python" -m megatron_glm.packages "$@"; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
  python=$PYTHON
  command -v "$python" >/dev/null || fail "PYTHON=$python is no program"
  new_enough "$python" || fail "PYTHON=$python is $("$python" -V 2>&1 | head -1), not Python 3.11 or newer"
  fault=$(packages check 2>&1) || fail "PYTHON=$python cannot be used: ${fault#error: }"
  echo "$python"
  exit
fi

environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-$PWD/.venv}}
python=$environment/bin/python
stamp=$environment/.megatron_glm_setup # what was set up; "unfinished" in the meantime
log=$environment/.megatron_glm_setup.log
files="$PWD $(cat pyproject.toml setup.py megatron_glm/packages.py examples/setup.sh | cksum)"

# hopper: a GPU that the kernels serve, with a driver for CUDA 13; gpu: another one; or cpu.
hardware() {
  local found=cpu capability driver
  while IFS=', ' read -r capability driver; do
    found=gpu
    if [[ "$capability $driver $(uname -m)" =~ ^9\.0\ ([0-9]+).*\ x86_64$ ]] && [ "${BASH_REMATCH[1]}" -ge 580 ]; then
      found=hopper && break
    fi
  done < <(nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null | grep '^[0-9]')
  echo "$found"
}

# What was set up beside a Hopper GPU serves a machine without one too (a login node), not the other way round.
up_to_date() {
  local found
  found=$(cat "$stamp" 2>/dev/null) || return 1
  [ "$found" = "$files hopper" ] || [ "$found" = "$files $(hardware)" ] || return 1
  packages check >/dev/null 2>&1
}

make_environment() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if new_enough "$candidate" && { [ "$kind" != hopper ] || python=$candidate packages fresh >/dev/null 2>&1; }; then
      rm -rf .venv && mkdir .venv && echo unfinished >"$stamp"
      "$candidate" -m venv .venv >"$log" 2>&1 || { cat "$log" >&2 && fail "$candidate -m venv .venv failed"; }
      return
    fi
  done
  fail "python3 is $(python3 -V 2>&1), Python 3.11 to 3.13 is needed: activate an environment that has it"
}

# A package whose installation was cut off lacks the list of its files, and pip would take it for whole.
remove_half_packages() {
  find "$environment"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -newer "$stamp" | while read -r folder; do
    [ -e "$folder/RECORD" ] || rm -r "$folder"
  done
}

pip() {
  if ! "$python" -m pip "$@" -q --no-input --disable-pip-version-check >"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 15 >&2
    fail "pip $* failed (all that it said: $log); what it has done is kept, run this again when the cause is gone"
  fi
}

set_up() {
  local kind own='' unfinished='' wanted others=()
  kind=$(hardware)
  [ "$environment" != "$PWD/.venv" ] || own=yes
  [ "$(cat "$stamp" 2>/dev/null)" != unfinished ] || unfinished=yes
  case $kind in
    cpu) echo "setting up $environment (a minute or two) ..." >&2 ;;
    gpu) echo "setting up $environment for a GPU that the kernels do not serve (see tools/doctor.py) ..." >&2 ;;
    hopper) echo "setting up $environment with the kernels for Hopper GPUs (several GB) ..." >&2 ;;
  esac
  if [ -n "$own" ] && { [ -n "$unfinished" ] || ! "$python" -c '' 2>/dev/null; }; then
    make_environment
  elif [ -n "$unfinished" ]; then
    remove_half_packages
  fi
  new_enough "$python" || fail "$environment has $("$python" -V 2>&1 | head -1), not Python 3.11 or newer"
  echo unfinished >"$stamp"
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >"$log" 2>&1 || fail "$python has no pip: $log"
  if ! wanted=$(packages "$kind" 2>&1); then
    # Nobody else's torch: replaced. In an environment that was active, the user decides.
    [ -n "$own" ] || fail "${wanted#error: }; or name the interpreter to use it as it is: PYTHON=$python"
    wanted=$(packages fresh)
  fi
  if [ "$kind" = hopper ]; then
    read -ra others < <(packages rivals)
    [ ${#others[@]} = 0 ] || pip uninstall -y "${others[@]}"
  fi
  read -ra wanted <<<"$wanted"
  pip install -e '.[test]' "${wanted[@]}"
  packages check && packages "$kind" >/dev/null # what is wrong now is said, and not taken for done
  echo "$files $kind" >"$stamp"
}

exec 9<.
flock 9 2>/dev/null || true # one at a time, as under make -j; the pip of a killed setup holds the lock until it ends
up_to_date || set_up
echo "$python"

# Sourced by the commands of this folder: `use_environment NAME CONSTRAINTS EXTRAS [BARE]` sets
# $python. BARE names a file of packages that are installed without their dependencies.
# `run_loragate COMMAND...` runs a command of loragate.
#
# The environment is made on first use, and again whenever its requirements have changed. With
# LORAGATE_PYTHON=/path/to/python that interpreter is used as it is, and nothing is installed.
# shellcheck shell=bash

# hundreds of processes import the same sources: where nothing is kept, each compiles them again
unset PYTHONDONTWRITEBYTECODE

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  printf '%s\n' "$1" >&2
  exit "${2:-3}"
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if is_new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "No Python >= 3.11 found on PATH (tried python3, python3.13, python3.12, python3.11, python).
Install one, or set LORAGATE_PYTHON to an interpreter that has the project's dependencies."
}

use_existing_python() {
  python=$LORAGATE_PYTHON
  is_new_enough "$python" || fail "LORAGATE_PYTHON=$python is not a Python >= 3.11 that runs."
  export PYTHONPATH="$root/harness:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
  "$python" - <<'PYTHON' || fail "LORAGATE_PYTHON=$python lacks packages that the gate needs."
import importlib.util as u, sys
names = """torch triton numpy packaging safetensors pydantic yaml jinja2 pytest xdist covertable
filelock psutil pynvml regex sqlalchemy""".split()
missing = [name for name in names if u.find_spec(name) is None]
if missing:
    sys.exit("missing: " + ", ".join(missing))
PYTHON
}

make_environment() {
  local venv=$1 constraints=$2 extras=$3 stamp=$4 bare=$5 base
  base=$(find_python)
  printf 'preparing %s with %s (a few minutes on first use)\n' "${venv#"$root"/}" "$base" >&2
  if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    "$base" -m venv --clear "$venv" ||
      fail "$base cannot make a virtual environment (on Debian and Ubuntu: install python3-venv)."
  fi
  # most modules of the dependencies are never imported: those that are get compiled then
  (cd "$root" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-compile -c "$constraints" -e ".[$extras]") ||
    fail "pip could not install the dependencies; run the same command again to continue."
  if [ -n "$bare" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --no-compile --no-deps -r "$bare" ||
      fail "pip could not install what $bare names; run the same command again to continue."
  fi
  printf '%s\n' "$stamp" >"$venv/loragate-stamp"
}

use_environment() {
  local venv=$root/$1 constraints=$root/$2 extras=$3 bare=${4:+$root/$4} stamp
  if [ -n "${LORAGATE_PYTHON:-}" ]; then
    use_existing_python
    return
  fi
  python=$venv/bin/python
  # the path counts too: an editable install points to it
  stamp=$({
    cat "$root/pyproject.toml" "$constraints" ${bare:+"$bare"} &&
      printf '%s %s\n' "$extras" "$root"
  } | cksum)
  if [ "$(cat "$venv/loragate-stamp" 2>/dev/null)" != "$stamp" ] || ! is_new_enough "$python"; then
    make_environment "$venv" "$constraints" "$extras" "$stamp" "$bare"
  fi
}

# Chooses vLLM with the torch that it pins or, without a GPU, vLLM without its dependencies beside
# the project's torch: the interpreter needs no more.
use_vllm() {
  if nvidia-smi -L >/dev/null 2>&1; then
    use_environment .venv-vllm ci/constraints-vllm.txt test,vllm
  else
    use_environment .venv-vllm-without-gpu ci/constraints.txt test ci/vllm-without-gpu.txt
  fi
}

# Becomes `loragate COMMAND...` in the environment that the command needs. Reports begin the commands
# that they print with LORAGATE_COMMAND: the path by which the caller's folder reaches ci/loragate.
run_loragate() {
  case " ${*/#--subject=/--subject } " in
  # builds of lorakernels are compared with each other, without vllm
  *" bench "*" --against"*) use_environment .venv ci/constraints.txt test ;;
  *" --subject vllm "* | *" --subject vllm_lorakernels "* | " findings "* | " bench "* | \
    " replay"*" vllm."* | " replay"*" vllm_lorakernels."*)
    use_vllm
    ;;
  *) use_environment .venv ci/constraints.txt test ;;
  esac
  LORAGATE_COMMAND=$(dirname -- "$0")/loragate
  export LORAGATE_COMMAND
  exec "$python" -m loragate "$@"
}

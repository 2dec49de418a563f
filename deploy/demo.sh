#!/usr/bin/env bash
# Makes .venv if needed, installs kvxfer, and runs `kvxfer demo` with the given options.
source "$(dirname "$0")/env.sh"
prepare ""
say "kvxfer demo $*"
exec .venv/bin/kvxfer demo "$@"

#!/usr/bin/env bash
# Makes .venv if needed, installs kvxfer with its test tools, and runs the tests.
# Further arguments go to pytest, for example: ./deploy/test.sh -k planner
source "$(dirname "$0")/env.sh"
prepare "[test]"
say "pytest $*"
exec "$python" -m pytest "$@"

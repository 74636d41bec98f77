#!/bin/bash
# The verifier's python3: `-m pytest` goes to our runner; code from -c or stdin does not import from the workspace.
[ -d /opt/rsi/ld ] && export LD_LIBRARY_PATH=/opt/rsi/ld
if [ "$1" = -m ] && [ "$2" = pytest ]; then shift 2; exec /opt/rsi/interpreter -I /opt/rsi/lib/rsi_pytest.py "$@"; fi
case "${1--}" in
  -c | -) exec /opt/rsi/interpreter -P "$@" ;;
esac
exec /opt/rsi/interpreter "$@"

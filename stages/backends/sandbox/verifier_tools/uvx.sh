#!/bin/bash
# Harbor's usual `uvx -p 3.13 -w pytest==… pytest ARGS`, without a network: the options name what is already here.
[ "$1" = tool ] && shift
[ "$1" = run ] && shift
while [ $# -gt 0 ]; do
  case "$1" in
    -p | --python | -w | --with | --from) shift 2 ;;
    -*) shift ;;
    pytest | pytest==* | pytest@*) shift; exec /opt/rsi/bin/python3 -m pytest "$@" ;;
    python | python3) shift; exec /opt/rsi/bin/python3 "$@" ;;
    *) echo "uvx in a verifier runs pytest and python only, not $1" >&2; exit 127 ;;
  esac
done
exit 127

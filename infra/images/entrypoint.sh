#!/bin/sh
# Secrets by file: for each variable NAME_FILE set NAME to the text of that file, then run the command.
set -eu
for pair in $(env | grep -E '^(DATABASE_URL|RSI_[A-Z_]+)_FILE=' || true); do
  name=${pair%%=*}
  file=${pair#*=}
  [ -r "$file" ] || { echo "error: $name names $file, which cannot be read" >&2; exit 2; }
  export "${name%_FILE}=$(cat "$file")"
done
exec "$@"

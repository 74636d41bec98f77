#!/bin/sh
# Secrets by file: where NAME_FILE is set, NAME becomes the text of that file; then the command runs. (Settings whose own
# name ends in _FILE, as RSI_WEBHOOK_SECRET_FILE, are read by the program itself.)
set -eu
for name in DATABASE_URL RSI_PREFECT_AUTH PREFECT_SERVER_DATABASE_CONNECTION_URL PREFECT_SERVER_API_AUTH_STRING \
  PREFECT_API_AUTH_STRING; do
  eval "file=\${${name}_FILE:-}"
  [ -n "$file" ] || continue
  [ -r "$file" ] || { echo "error: ${name}_FILE names $file, which cannot be read" >&2; exit 2; }
  export "$name=$(cat "$file")"
done
exec "$@"

#!/bin/sh
# A dump into a new, empty database; refused when it exists, so that nothing is overwritten.
#   PGHOST, PGUSER, PGPASSWORD or PGPASSWORD_FILE as libpq; usage: restore.sh FILE DATABASE
set -eu
file=${1:?usage: restore.sh FILE DATABASE}
database=${2:?usage: restore.sh FILE DATABASE}
[ -z "${PGPASSWORD_FILE:-}" ] || { PGPASSWORD=$(cat "$PGPASSWORD_FILE") && export PGPASSWORD; }
[ -r "$file" ] || { echo "error: $file cannot be read" >&2; exit 2; }
createdb "$database"
pg_restore --exit-on-error --no-owner --single-transaction --dbname="$database" "$file"

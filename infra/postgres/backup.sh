#!/bin/sh
# One dump of each database into FOLDER, whole or not at all; dumps older than KEEP_DAYS go.
#   PGHOST, PGUSER, PGPASSWORD or PGPASSWORD_FILE as libpq; usage: backup.sh FOLDER DATABASE…
set -eu
folder=${1:?usage: backup.sh FOLDER DATABASE…}
shift
[ -z "${PGPASSWORD_FILE:-}" ] || { PGPASSWORD=$(cat "$PGPASSWORD_FILE") && export PGPASSWORD; }
for database in "$@"; do
  file=$folder/$database-$(date -u +%Y%m%dT%H%M%SZ).dump
  trap 'rm -f "$file.part"' EXIT
  pg_dump --format=custom --file="$file.part" "$database"
  mv "$file.part" "$file"
  echo "$file"
done
find "$folder" -name '*.dump' -mtime "+${KEEP_DAYS:-14}" -delete

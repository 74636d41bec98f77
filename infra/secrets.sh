#!/bin/sh
# Random passwords, one file each; what is there stays.
#   infra/secrets.sh infra/secrets                        for compose
#   infra/secrets.sh infra/kubernetes/base/secrets        for Kubernetes
set -eu
folder=${1:?usage: secrets.sh FOLDER}
[ -d "$folder" ] || mkdir -m 700 "$folder" # keeps others out; the files themselves are read by other accounts in containers
write() {
  [ -e "$folder/$1" ] && return
  printf %s "$2" > "$folder/$1.new"
  chmod 644 "$folder/$1.new"
  mv "$folder/$1.new" "$folder/$1"
}
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

write postgres_password "$(random)"
write prefect_auth "rsi:$(random)"
password=$(cat "$folder/postgres_password")
write database_url "postgresql://rsi:$password@postgres/rsi"
write prefect_database_url "postgresql+asyncpg://rsi:$password@postgres/prefect"

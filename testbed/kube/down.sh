#!/usr/bin/env bash
# Stops what up.sh started, by its recorded pids only; PURGE=1 also removes the state folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"

stop() { # name, signal
  if alive "$1"; then
    local pid; read -r pid _ <"$KUBE_STATE/pid/$1"
    kill "-$2" "$pid"
    for _ in $(seq 100); do alive "$1" || break; sleep 0.1; done
    if alive "$1"; then kill -9 "$pid"; fi
    echo "stopped $1"
  fi
  rm -f "$KUBE_STATE/pid/$1"
}
stop kube-apiserver KILL # it keeps no state, and its graceful stop takes seconds
stop etcd TERM
[ -z "${PURGE:-}" ] || rm -rf --one-file-system "${KUBE_STATE:?}"

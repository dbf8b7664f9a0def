#!/usr/bin/env bash
# Stops what up.sh started, by its recorded pids only.
#   down.sh [name...]   etcd kube-apiserver kcm scheduler node containerd kubelet; without names all of them, their pods and mounts
# PURGE=1 also removes the state folder, and the kubelet's if this instance had a node.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"

if [ $# -gt 0 ]; then
  for n in "$@"; do stop "$n"; done
  exit
fi
stop kubelet
if alive containerd; then rmpods "unix://$CTD_SOCK" || true; fi # containers outlive containerd
stop containerd
stop node KILL
for n in scheduler kcm kube-apiserver; do stop $n KILL; done # they keep no state, and their graceful stop takes seconds
stop etcd
if [ -e "$KUBE_STATE/node" ]; then # there was a node: undo what up.sh did to this machine
  for root in "$KUBE_STATE" "$KUBELET_ROOT"; do # deepest first, KUBELET_ROOT's own mount last
    awk -v r="$root" '$2 == r || index($2, r "/") == 1 {print $2}' /proc/mounts | sort -r |
      while read -r m; do umount "$m" 2>/dev/null || umount -l "$m" 2>/dev/null || ! mountpoint -q "$m"; done # a copy goes with its original
  done
  for chain in PREROUTING OUTPUT; do iptables -t nat -D $chain $(api_dnat) 2>/dev/null || true; done
  ip link del "$BRIDGE" 2>/dev/null || true
  find /sys/fs/cgroup -depth -type d -path '*/kubepods*' -exec rmdir {} + 2>/dev/null || true
  [ -z "${PURGE:-}" ] || rm -rf --one-file-system "${KUBELET_ROOT:?}"
  rm "$KUBE_STATE/node"
fi
[ -z "${PURGE:-}" ] || rm -rf --one-file-system "${KUBE_STATE:?}"

#!/usr/bin/env bash
# Kubernetes' own end-to-end suite (External.Storage) on a real kubelet, with the drivers as deploy/ installs them.
#   e2e.sh [DRIVER...]   the definitions of e2e/: local-ext4 local-xfs local-btrfs local-dir nfs nfs-image (default: all);
#                        csimock: the suite's own mock driver with Berth's sidecars
# FOCUS and SKIP select specs by regular expression, PROCS (default 4) is how many run at once, RESULTS where lists and logs are
# kept, BERTH_BIN the program. UP=1 leaves the cluster running, and uses one that runs. It ends with a table, and fails if a spec did.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
export KUBE_STATE=${KUBE_STATE:-$HOME/.cache/kube-testbed/e2e} PORT=${PORT:-5443} KUBELET_PORT=${KUBELET_PORT:-10250}
# Of its own, so that it also runs beside another cluster on this machine. The suite expects the kubelet at /var/lib/kubelet.
export BRIDGE=${BRIDGE:-kube1} POD_NET=${POD_NET:-10.89.0} SERVICE_NET=${SERVICE_NET:-10.97.0} KUBELET_ROOT=/var/lib/kubelet
export KUBELET_ARGS=${KUBELET_ARGS:---cgroups-per-qos=false --enforce-node-allocatable=}
# A claim that is made in the same instant as its volume waits for the binder's next resync, of 15 seconds by default.
export KCM_ARGS=${KCM_ARGS:---pvclaimbinder-sync-period=1s}
. "$here/env.sh"
. "$here/suite.sh"
results=${RESULTS:-$repository/target/e2e}
drivers=${*:-local-ext4 local-xfs local-btrfs local-dir nfs nfs-image}
mkdir -p "$results"
work=$KUBE_STATE-work # disks and the NFS server's directories
server=

finish() {
  [ -z "$server" ] || { exec {server}>&-; wait "$server_pid" || true; }
  [ -z "${UP:-}" ] || { echo "left running; KUBE_STATE=$KUBE_STATE KUBELET_ROOT=$KUBELET_ROOT BRIDGE=$BRIDGE PORT=$PORT PURGE=1 $here/down.sh ends it"; return; }
  PURGE=1 "$here/down.sh" >/dev/null || true
  rm -rf --one-file-system "$work"
}
trap finish EXIT

apply() { # directory of deploy/, sed expression, workload...: what is edited replaces what was there before
  local dir=$1 edit=$2 workload; shift 2
  kubectl kustomize "$repository/deploy/$dir" | sed -E "$edit" | kubectl apply -f - >/dev/null
  for workload; do kubectl -n berth-system rollout status --timeout=180s "$workload" >/dev/null; done
}
local_driver() { # its data directory, with room for volumes that are promised and not filled
  apply local "s|/var/lib/berth/local|$1|; s|^( *)- --node-deployment|&\n\1- --overcommit=20|" daemonset/berth-local deployment/berth-snapshot-controller
  kubectl apply -f "$here/e2e/local-classes.yaml" >/dev/null
}
nfs_server() {
  [ -z "$server" ] || return 0
  mkdir -p "$work/nfs" "$work/export"; rm -f "$work/orders"; mkfifo "$work/orders"
  "$repository/testbed/nfs/ganesha.sh" "$work/nfs" "$work/export" 5460 5461 <"$work/orders" >"$work/nfs.log" 2>&1 &
  server_pid=$!
  exec {server}>"$work/orders"
  until grep -q ready "$work/nfs.log"; do kill -0 "$server_pid"; sleep 0.1; done
}
nfs_driver() {
  nfs_server
  local options=vers=4.1,port=5460
  apply nfs "s|^( *)- --state-dir=.*|&\n\1- --mount-mode=fuse\n\1- --default-mount-options=$options|; s|^( *)- --extra-create-metadata|&\n\1- --default-mount-options=$options|" \
    daemonset/berth-nfs-node deployment/berth-nfs-controller deployment/berth-snapshot-controller
  sed "s|SERVER|$POD_NET.1|; s|SHARE|/export|; s|OPTIONS|\"vers=4.1\", \"port=5460\"|" "$here/e2e/nfs-classes.yaml" | kubectl apply -f - >/dev/null
}
disk() { # filesystem: a disk of its own, where the node sees what is mounted; prints its directory
  local at=$KUBELET_ROOT/plugins/e2e-$1
  if ! mountpoint -q "$at"; then
    mkdir -p "$at" "$work"
    truncate -s 40G "$work/$1.img"
    "mkfs.$1" -q -f "$work/$1.img" >/dev/null
    mount -o loop "$work/$1.img" "$at"
  fi
  echo "$at"
}
prepare() { # definition
  case $1 in
    # Only a filesystem with reflinks copies a raw block volume in use.
    local-ext4 | local-xfs) local_driver "$(disk xfs)/data" ;;
    local-btrfs) local_driver "$(disk btrfs)/data" ;;
    local-dir) local_driver "$KUBELET_ROOT/plugins/e2e-data" ;;
    nfs*) nfs_driver ;;
    csimock)
      apply snapshot-controller '' deployment/berth-snapshot-controller
      kubectl apply -f "$here/e2e/sidecars.yaml" >/dev/null ;;
  esac
}

"$here/build.sh" e2e | { grep -v ^have || true; }
if [ -z "${UP:-}" ] || ! alive kubelet; then
  PURGE=1 "$here/down.sh" >/dev/null
  rm -rf --one-file-system "$work"
  "$here/up.sh" node
fi
"$here/images.sh" e2e berth
kubectl -n berth-system delete pods --all --ignore-not-found >/dev/null # they run the image of before
kubectl apply --server-side -f "$repository/crates/berth-sidecars/src/snapshots" >/dev/null
kubectl wait --for=condition=Established --timeout=60s -f "$repository/crates/berth-sidecars/src/snapshots" >/dev/null
for driver in $drivers; do
  prepare "$driver"
  echo "run    $driver"
  suite "$driver"
  kubectl delete --ignore-not-found -f "$here/e2e/sidecars.yaml" >/dev/null # no other driver is to have these rules
done
table

#!/usr/bin/env bash
# Kubernetes' own end-to-end suite (External.Storage) on `berth up --runtime cri`: Berth's API server, controllers, node and local driver,
# and this machine's containerd, which runs the pods.
#   e2e-up.sh [DRIVER...]   the definitions of e2e/: local-ext4 local-xfs local-btrfs local-dir (default: all)
# FOCUS, SKIP and PROCS as in suite.sh; RESULTS is where lists and logs are kept, BERTH_BIN the program. It ends with a table, and fails
# if a spec did, or if `berth down --purge` left something. UP=1 leaves the machine running, and uses one that runs, for a
# single definition.
#   e2e-up.sh down          ends what UP=1 has left, or a kill
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
export KUBE_STATE=${KUBE_STATE:-$HOME/.cache/kube-testbed/e2e-up} PORT=${PORT:-4443}
# Debian's is older than the one in $KUBE_BIN, which speaks to newer servers only.
export CTR=${CTR:-/usr/bin/ctr} CONTAINERD=${CONTAINERD:-/usr/bin/containerd}
. "$here/env.sh"
. "$here/suite.sh"
results=${RESULTS:-$repository/target/e2e-up}
drivers=${*:-local-ext4 local-xfs local-btrfs local-dir}
data=$KUBE_STATE/disk/data

down() { # nothing of an earlier run is to be left, and nothing of this one
  if alive node && [ -d "$data" ]; then
    find_namespaces
    enter "$BERTH_BIN" down --data-dir "$data" --purge >/dev/null || true # its loop devices and control groups
  fi
  stop node KILL >/dev/null # and with it every process and mount
  # What a killed run left. Most devices go with the last mount of them, now or in a moment.
  local disk volume
  while read -r disk _; do
    while read -r volume _; do
      losetup --detach "$volume" 2>/dev/null || true
    done < <(losetup_of "$(lsblk --noheadings --output MAJ:MIN "$disk" | tr -d ' ')")
    losetup --detach "$disk" 2>/dev/null || true
  done < <(losetup_of "$KUBE_STATE/")
  rm -rf --one-file-system "${KUBE_STATE:?}"
}
losetup_of() { # the beginning of a file's name, or its device: the loop devices of such files
  losetup --list --noheadings --output NAME,BACK-MAJ:MIN,BACK-FILE | awk -v of="$1" '$2 == of || index($3, of) == 1'
}
enter() { nsenter --target "$ns" --pid --mount -- "$@"; }

# A process tree and mounts of its own: the suite looks for volumes below /var/lib/kubelet of process 1, and all ends with that process.
namespaces() {
  node private
  enter mount --make-rshared /
  enter mount -t tmpfs tmpfs /var/lib
  enter mkdir /var/lib/kubelet
}
runtime() {
  cat >"$KUBE_STATE/containerd.toml" <<EOF
version = 2
root = "$KUBE_STATE/containerd"
state = "$KUBE_STATE/containerd-state"
[grpc]
  address = "$CTD_SOCK"
[plugins."io.containerd.internal.v1.opt"]
  path = "$KUBE_STATE/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = $(cap_sys_resource && echo false || echo true)
  sandbox_image = "registry.k8s.io/pause:3.10"
[plugins."io.containerd.grpc.v1.cri".cni]
  conf_dir = "$KUBE_STATE/cni"
EOF
  # Without $KUBE_BIN, where the shim of another version lies.
  PATH=${PATH#"$KUBE_BIN":} inside containerd "$CONTAINERD" --config "$KUBE_STATE/containerd.toml"
  await containerd 30 ctrk version
  "$here/images.sh" e2e
}
disk() { # filesystem, or none for the one that is there
  mkdir -p "$KUBE_STATE/disk"
  [ "$1" != none ] || return 0
  truncate -s 200G "$KUBE_STATE/$1.img" # with room for volumes that are promised and not filled
  "mkfs.$1" -q -f "$KUBE_STATE/$1.img"
  enter mount -o loop "$KUBE_STATE/$1.img" "$KUBE_STATE/disk"
}
begin() { # definition
  ! alive berth || return 0
  case $1 in
    # Only a filesystem with reflinks copies a raw block volume in use.
    local-ext4 | local-xfs) disk xfs ;;
    local-btrfs) disk btrfs ;;
    local-dir) disk none ;;
    *) echo "e2e-up.sh: there is no $1" >&2; exit 2 ;;
  esac
  inside berth "$BERTH_BIN" up --data-dir "$data" --listen "127.0.0.1:$PORT" --kubeconfig "$KUBECONFIG" --node-name "$NODE_NAME" \
    --runtime cri --cri-endpoint "unix://$CTD_SOCK"
  await berth 60 kubectl wait --for=condition=Ready --timeout=1s "node/$NODE_NAME"
  enter mount --rbind "$data/node" /var/lib/kubelet
  # As in deploy/local: one node alone publishes no capacity otherwise.
  kubectl patch csidriver local.berth.dev --type=merge --patch '{"spec": {"storageCapacity": true}}' >/dev/null
  kubectl apply -f "$here/e2e/local-classes.yaml" >/dev/null
}
end() { # definition: what it leaves is a failure
  [ -z "${UP:-}" ] || return 0
  cp "$KUBE_STATE/log/berth.log" "$results/$1.berth.log"
  enter umount -l /var/lib/kubelet
  enter "$BERTH_BIN" down --data-dir "$data" --purge >>"$results/$1.berth.log" 2>&1
  {
    ctrk containers list -q
    losetup --list --noheadings --raw --output BACK-FILE | grep "^$data/" || true
    enter grep " $data/" /proc/self/mountinfo || true
  } >"$results/$1.left"
  [ ! -s "$results/$1.left" ] || { echo "left by $1:"; cat "$results/$1.left"; left=1; }
  ! enter mountpoint -q "$KUBE_STATE/disk" || enter umount "$KUBE_STATE/disk"
  rm -rf "$KUBE_STATE"/*.img "$KUBE_STATE/disk"
}

main() { # read as a whole before it runs
  "$here/build.sh" pause agnhost ginkgo e2e.test kubectl | { grep -v ^have || true; }
  if [ -n "${UP:-}" ]; then
    trap 'echo "left running; KUBECONFIG=$KUBECONFIG; $here/e2e-up.sh down ends it"' EXIT
  else
    trap down EXIT
  fi
  if [ -n "${UP:-}" ] && alive berth; then
    find_namespaces
  else
    down
    mkdir -p "$results" "$KUBE_STATE"/{pid,log}
    namespaces
    runtime
  fi
  local driver left=
  for driver in $drivers; do
    begin "$driver"
    echo "run    $driver"
    suite "$driver"
    end "$driver"
  done
  table
  [ -z "$left" ]
}
if [ "$drivers" = down ]; then down; else main; fi

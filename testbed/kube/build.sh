#!/usr/bin/env bash
# Builds the real servers from Go modules, pinned by mods/*/go.{mod,sum}.
#   build.sh [target...]   a binary's name, or a level with all below it: control controllers node e2e (default: control)
# A binary that is already in $KUBE_BIN is left alone; FORCE=1 rebuilds it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"

CONTROL="etcd kube-apiserver kubectl"
CONTROLLERS="$CONTROL kube-controller-manager kube-scheduler"
NODE="$CONTROLLERS kubelet containerd containerd-shim-runc-v2 ctr pause rmpods"

E2E="$NODE e2e.test ginkgo agnhost hostpath"

version() { awk -v m="$2" '{for (i = 1; i < NF; i++) if ($i == m && $(i+1) ~ /^v/) {print $(i+1); exit}}' "$here/mods/$1/go.mod"; }
k8s_ldflags() { # without these the servers call themselves v0.0.0-master, and version checks go wrong
  local v p=k8s.io/component-base/version; v=$(version k8s k8s.io/kubernetes)
  local minor=${v#v1.}
  echo "-X $p.gitVersion=$v -X $p.gitMajor=1 -X $p.gitMinor=${minor%%.*} -X $p.gitTreeState=clean -X $p.gitCommit=registry -X $p.buildDate=2026-01-01T00:00:00Z"
}

build() {
  local t=$1 out=$KUBE_BIN/$1 start=$SECONDS mod pkg ld= how=build
  case $t in
    kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kubectl)
      mod=k8s pkg=k8s.io/kubernetes/cmd/$t ld=$(k8s_ldflags) ;;
    etcd) mod=etcd pkg=go.etcd.io/etcd/server/v3 ;;
    containerd|containerd-shim-runc-v2|ctr)
      mod=containerd pkg=github.com/containerd/containerd/v2/cmd/$t
      ld="-X github.com/containerd/containerd/v2/version.Version=$(version containerd github.com/containerd/containerd/v2)" ;;
    pause|hostpath) mod=$t pkg=. ;;
    rmpods) mod=k8s pkg=./rmpods ;;
    e2e.test) mod=k8s pkg=./e2e ld=$(k8s_ldflags) how="test -c" ;;
    ginkgo) mod=k8s pkg=github.com/onsi/ginkgo/v2/ginkgo ;;
    agnhost) mod=k8s pkg=k8s.io/kubernetes/test/images/agnhost ;;
    *) echo "unknown target $t" >&2; exit 2 ;;
  esac
  [ -x "$out" ] && [ -z "${FORCE:-}" ] && { echo "have   $t"; return; }
  echo "build  $t"
  ( cd "$here/mods/$mod" && CGO_ENABLED=0 nice -n 5 "$GO" $how -mod=readonly -trimpath -ldflags "-s -w $ld" -o "$out.new" "$pkg" )
  mv "$out.new" "$out"
  echo "built  $t in $((SECONDS - start))s, $(($(stat -c %s "$out") / 1048576)) MiB"
}

mkdir -p "$KUBE_BIN"
for t in "${@:-control}"; do
  case $t in
    control) list=$CONTROL ;;
    controllers) list=$CONTROLLERS ;;
    node) list=$NODE ;;
    e2e) list=$E2E ;;
    *) list=$t ;;
  esac
  for b in $list; do build "$b"; done
done

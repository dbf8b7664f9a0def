# Sourced by every script here. Override any of these from the environment.
KUBE_BIN=${KUBE_BIN:-$HOME/.cache/kube-testbed/bin}      # built binaries
KUBE_STATE=${KUBE_STATE:-$HOME/.cache/kube-testbed/run}   # certificates, etcd's data, logs, pids, the kubeconfig
PORT=${PORT:-6443}                                        # kube-apiserver; PORT+1 etcd, PORT+2 etcd's peers
FEATURE_GATES=${FEATURE_GATES:-}                          # A=true,B=false
# More flags: APISERVER_ARGS ETCD_ARGS
GO=${GO:-$(command -v go || echo /usr/local/go/bin/go)}
export KUBECONFIG=$KUBE_STATE/admin.kubeconfig PATH=$KUBE_BIN:$PATH

# A pid file holds "pid starttime", so that a reused pid is never taken for ours.
started() { awk '{sub(/.*\) /, "")} $1 != "Z" {print $20}' "/proc/$1/stat" 2>/dev/null; }
alive() { # name
  local pid t
  { read -r pid t <"$KUBE_STATE/pid/$1"; } 2>/dev/null && [ "$(started "$pid")" = "$t" ]
}

# Sourced by every script here. Override any of these from the environment.
KUBE_BIN=${KUBE_BIN:-$HOME/.cache/kube-testbed/bin}      # built binaries
KUBE_STATE=${KUBE_STATE:-$HOME/.cache/kube-testbed/run}   # certificates, etcd's data, logs, pids, kubeconfigs
PORT=${PORT:-6443}                                        # kube-apiserver; then etcd, its peers, kcm, scheduler, kubelet's health
FEATURE_GATES=${FEATURE_GATES:-}                          # A=true,B=false, for every component
KCM_CONTROLLERS=${KCM_CONTROLLERS:-*}                     # '*,-persistentvolume-binder-controller' switches one off
KUBELET_ROOT=${KUBELET_ROOT:-/var/lib/kubelet}            # drivers register in plugins_registry below it
KUBELET_PORT=${KUBELET_PORT:-10250}
NODE_NAME=${NODE_NAME:-testbed}
FLEX_DIR=${FLEX_DIR:-$KUBE_STATE/flexvolume}              # FlexVolume drivers, as vendor~driver/driver
BRIDGE=${BRIDGE:-kube0}                                   # pods' network, of this host only; the kubelet listens on its .1
POD_NET=${POD_NET:-10.88.0}
SERVICE_NET=${SERVICE_NET:-10.96.0}                       # services' addresses, of which only the API server's .1 answers
# More flags: ETCD_ARGS APISERVER_ARGS KCM_ARGS SCHEDULER_ARGS KUBELET_ARGS
GO=${GO:-$(command -v go || echo /usr/local/go/bin/go)}
CTD_SOCK=$KUBE_STATE/containerd.sock
export KUBECONFIG=$KUBE_STATE/admin.kubeconfig PATH=$KUBE_BIN:$PATH

# In-cluster clients dial the service's address, and no kube-proxy answers there.
api_dnat() { echo "-p tcp -d $SERVICE_NET.1 --dport 443 -j DNAT --to-destination 127.0.0.1:$PORT"; }
ctrk() { "${CTR:-ctr}" --address "$CTD_SOCK" -n k8s.io "$@" 2> >(grep -v DEPRECATION >&2); }

cap_sys_resource() { (echo -999 >/proc/self/oom_score_adj) 2>/dev/null; } # without it runc cannot lower a container's OOM score

# A pid file holds "pid starttime", so that a reused pid is never taken for ours.
started() { awk '{sub(/.*\) /, "")} $1 != "Z" {print $20}' "/proc/$1/stat" 2>/dev/null; }
alive() { # name
  local pid t
  { read -r pid t <"$KUBE_STATE/pid/$1"; } 2>/dev/null && [ "$(started "$pid")" = "$t" ]
}

start() { # name, command...
  local n=$1; shift
  alive "$n" && return
  setsid "$@" >>"$KUBE_STATE/log/$n.log" 2>&1 </dev/null &
  echo "$! $(started $!)" >"$KUBE_STATE/pid/$n"
}
await() { # name, seconds, command...
  local n=$1 end=$((SECONDS + $2)); shift 2
  until "$@" >/dev/null 2>&1; do
    alive "$n" || { echo "$n died:" >&2; tail -5 "$KUBE_STATE/log/$n.log" >&2; exit 1; }
    [ $SECONDS -lt $end ] || { echo "$n not ready; see $KUBE_STATE/log/$n.log" >&2; exit 1; }
    sleep 0.2
  done
  echo "ready  $n (${SECONDS}s)"
}
node() { # propagation of mounts: namespaces with a PID 1 of their own; when that dies, every process in them does
  start node unshare --fork --kill-child --pid --mount-proc --propagation "$1" pause
  until find_namespaces; do alive node; sleep 0.05; done
}
find_namespaces() { ns=$(pgrep -P "$(cut -d' ' -f1 "$KUBE_STATE/pid/node")" -x pause); }
inside() { # name, command...: start, in the node's namespaces
  local n=$1 pid; shift
  alive "$n" && return
  setsid nsenter --target "$ns" --pid --mount -- "$@" >>"$KUBE_STATE/log/$n.log" 2>&1 </dev/null &
  until pid=$(pgrep -P $!); do kill -0 $!; sleep 0.05; done
  echo "$pid $(started "$pid")" >"$KUBE_STATE/pid/$n"
}
stop() { # name, [signal]
  if alive "$1"; then
    local pid; read -r pid _ <"$KUBE_STATE/pid/$1"
    kill "-${2:-TERM}" "$pid"
    for _ in $(seq 100); do alive "$1" || break; sleep 0.1; done
    if alive "$1"; then kill -9 "$pid"; fi
    echo "stopped $1"
  fi
  rm -f "$KUBE_STATE/pid/$1"
}

#!/usr/bin/env bash
# Starts etcd and kube-apiserver on loopback, building them first if need be; what already runs is left running.
# Settings: env.sh. Then: export KUBECONFIG=$KUBE_STATE/admin.kubeconfig
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"
S=$KUBE_STATE; P=$S/pki
mkdir -p "$S"/{pid,log,pki,etcd}
"$here/build.sh" | grep -v ^have || true

start() { # name, command...
  local n=$1; shift
  alive "$n" && return
  setsid "$@" >>"$S/log/$n.log" 2>&1 </dev/null &
  echo "$! $(started $!)" >"$S/pid/$n"
}
await() { # name, seconds, command...
  local n=$1 end=$((SECONDS + $2)); shift 2
  until "$@" >/dev/null 2>&1; do
    alive "$n" || { echo "$n died:" >&2; tail -5 "$S/log/$n.log" >&2; exit 1; }
    [ $SECONDS -lt $end ] || { echo "$n not ready; see $S/log/$n.log" >&2; exit 1; }
    sleep 0.2
  done
  echo "ready  $n (${SECONDS}s)"
}

# --- certificates and the kubeconfig, made once per state folder
if [ ! -f "$P/ca.crt" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=kube-testbed-ca \
    -keyout "$P/ca.key" -out "$P/ca.crt" 2>/dev/null
  openssl genrsa -out "$P/sa.key" 2048 2>/dev/null
  openssl rsa -in "$P/sa.key" -pubout -out "$P/sa.pub" 2>/dev/null
fi
cert() { # name, subject, [subject alternative names]
  [ -f "$P/$1.crt" ] && return
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "$2" -keyout "$P/$1.key" -out "$P/$1.csr" 2>/dev/null
  openssl x509 -req -in "$P/$1.csr" -CA "$P/ca.crt" -CAkey "$P/ca.key" -CAcreateserial -days 3650 -out "$P/$1.crt" \
    -extfile <(echo "extendedKeyUsage=clientAuth,serverAuth"; echo "${3:+subjectAltName=$3}") 2>/dev/null
}
kubeconfig() { # name, subject: writes $S/name.kubeconfig
  cert "$1" "$2"
  local b64="base64 -w0"
  cat >"$S/$1.kubeconfig" <<END
{"apiVersion": "v1", "kind": "Config", "current-context": "testbed",
 "clusters": [{"name": "testbed", "cluster": {"server": "https://127.0.0.1:$PORT", "certificate-authority-data": "$($b64 "$P/ca.crt")"}}],
 "users": [{"name": "$1", "user": {"client-certificate-data": "$($b64 "$P/$1.crt")", "client-key-data": "$($b64 "$P/$1.key")"}}],
 "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "$1"}}]}
END
}
cert apiserver /CN=kube-apiserver "IP:127.0.0.1,DNS:localhost"
kubeconfig admin /O=system:masters/CN=admin

# --- etcd, kube-apiserver
E_URL=http://127.0.0.1:$((PORT + 1)) E_PEER=http://127.0.0.1:$((PORT + 2))
start etcd etcd --name=testbed --data-dir="$S/etcd" --listen-client-urls="$E_URL" --advertise-client-urls="$E_URL" \
  --listen-peer-urls="$E_PEER" --initial-advertise-peer-urls="$E_PEER" --initial-cluster="testbed=$E_PEER" \
  --unsafe-no-fsync --log-level=warn ${ETCD_ARGS:-}
start kube-apiserver kube-apiserver --etcd-servers="$E_URL" --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$PORT" \
  --endpoint-reconciler-type=none --service-cluster-ip-range=10.96.0.0/24 --authorization-mode=Node,RBAC --allow-privileged=true \
  --tls-cert-file="$P/apiserver.crt" --tls-private-key-file="$P/apiserver.key" --client-ca-file="$P/ca.crt" \
  --service-account-issuer=https://kubernetes.default.svc.cluster.local --service-account-key-file="$P/sa.pub" \
  --service-account-signing-key-file="$P/sa.key" ${FEATURE_GATES:+--feature-gates=$FEATURE_GATES} ${APISERVER_ARGS:-}
await kube-apiserver 120 curl -fs --cacert "$P/ca.crt" "https://127.0.0.1:$PORT/readyz"

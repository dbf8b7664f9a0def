#!/usr/bin/env bash
# Starts real Kubernetes on loopback up to a level, building it first if need be; what already runs is left running.
#   up.sh control       etcd + kube-apiserver (default)
#   up.sh controllers   + kube-controller-manager + kube-scheduler
#   up.sh node          + containerd + kubelet, with local images; needs root
# Settings: env.sh. Then: export KUBECONFIG=$KUBE_STATE/admin.kubeconfig
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"
level=${1:-control}
case $level in control|controllers|node) ;; *) sed -n 2,6p "$0"; exit 2 ;; esac
S=$KUBE_STATE; P=$S/pki
mkdir -p "$S"/{pid,log,pki,etcd} "$FLEX_DIR"
"$here/build.sh" "$level" | { grep -v ^have || true; }

gates() { [ -z "$FEATURE_GATES" ] || echo "--feature-gates=$FEATURE_GATES"; }

# --- certificates and kubeconfigs, made once per state folder
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
  cat >"$S/$1.kubeconfig" <<EOF
{"apiVersion": "v1", "kind": "Config", "current-context": "testbed",
 "clusters": [{"name": "testbed", "cluster": {"server": "https://127.0.0.1:$PORT", "certificate-authority-data": "$($b64 "$P/ca.crt")"}}],
 "users": [{"name": "$1", "user": {"client-certificate-data": "$($b64 "$P/$1.crt")", "client-key-data": "$($b64 "$P/$1.key")"}}],
 "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "$1"}}]}
EOF
}
cert apiserver /CN=kube-apiserver "IP:127.0.0.1,IP:$SERVICE_NET.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
cert apiserver-client /O=system:masters/CN=apiserver-client
kubeconfig admin /O=system:masters/CN=admin

# --- control: etcd, kube-apiserver
E_URL=http://127.0.0.1:$((PORT + 1)) E_PEER=http://127.0.0.1:$((PORT + 2))
start etcd etcd --name=testbed --data-dir="$S/etcd" --listen-client-urls="$E_URL" --advertise-client-urls="$E_URL" \
  --listen-peer-urls="$E_PEER" --initial-advertise-peer-urls="$E_PEER" --initial-cluster="testbed=$E_PEER" \
  --unsafe-no-fsync --log-level=warn ${ETCD_ARGS:-}
start kube-apiserver kube-apiserver --etcd-servers="$E_URL" --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port="$PORT" \
  --endpoint-reconciler-type=none --service-cluster-ip-range=$SERVICE_NET.0/24 --authorization-mode=Node,RBAC --allow-privileged=true \
  --tls-cert-file="$P/apiserver.crt" --tls-private-key-file="$P/apiserver.key" --client-ca-file="$P/ca.crt" \
  --kubelet-certificate-authority="$P/ca.crt" --kubelet-client-certificate="$P/apiserver-client.crt" \
  --kubelet-client-key="$P/apiserver-client.key" --kubelet-preferred-address-types=InternalIP \
  --service-account-issuer=https://kubernetes.default.svc.cluster.local --service-account-key-file="$P/sa.pub" \
  --service-account-signing-key-file="$P/sa.key" $(gates) ${APISERVER_ARGS:-}
await kube-apiserver 120 curl -fs --cacert "$P/ca.crt" "https://127.0.0.1:$PORT/readyz"
[ "$level" = control ] && exit

# --- controllers: kube-controller-manager, kube-scheduler
kubeconfig kcm /CN=system:kube-controller-manager
kubeconfig scheduler /CN=system:kube-scheduler
own() { echo "--kubeconfig=$S/$1.kubeconfig --authentication-kubeconfig=$S/$1.kubeconfig --authorization-kubeconfig=$S/$1.kubeconfig \
  --bind-address=127.0.0.1 --leader-elect=false"; }
set -f # a * in KCM_CONTROLLERS stays a *
start kcm kube-controller-manager $(own kcm) --secure-port=$((PORT + 3)) --controllers="$KCM_CONTROLLERS" \
  --use-service-account-credentials --service-account-private-key-file="$P/sa.key" --root-ca-file="$P/ca.crt" \
  --cluster-signing-cert-file="$P/ca.crt" --cluster-signing-key-file="$P/ca.key" \
  --flex-volume-plugin-dir="$FLEX_DIR" $(gates) ${KCM_ARGS:-}
start scheduler kube-scheduler $(own scheduler) --secure-port=$((PORT + 4)) $(gates) ${SCHEDULER_ARGS:-}
set +f
await kcm 60 curl -fsk "https://127.0.0.1:$((PORT + 3))/healthz"
await scheduler 60 curl -fsk "https://127.0.0.1:$((PORT + 4))/healthz"
[ "$level" = controllers ] && exit

# --- node: containerd, kubelet
for c in runc ip iptables busybox; do command -v $c >/dev/null || { echo "there is no $c: run testbed/deps.sh kube" >&2; exit 1; }; done
# Every kubelet makes /var/lib/kubelet/device-plugins, wherever its own directory is.
if [ ! -e "$S/node" ] && [ -n "$(ls -A -I device-plugins "$KUBELET_ROOT" 2>/dev/null)" ]; then
  echo "$KUBELET_ROOT belongs to another kubelet; name a directory of its own as KUBELET_ROOT" >&2; exit 1
fi
touch "$S/node" # down.sh undoes the following
IP=$POD_NET.1
ip link show "$BRIDGE" >/dev/null 2>&1 || ip link add "$BRIDGE" type bridge
ip addr replace "$IP/24" dev "$BRIDGE"; ip link set "$BRIDGE" up
sysctl -qw net.ipv4.ip_forward=1 "net.ipv4.conf.$BRIDGE.route_localnet=1"
for chain in PREROUTING OUTPUT; do
  iptables -t nat -C $chain $(api_dnat) 2>/dev/null || iptables -t nat -A $chain $(api_dnat)
done
# Mounts made by CSI drivers must propagate between pods, drivers and the kubelet.
mkdir -p "$KUBELET_ROOT" "$S/cni"
mountpoint -q "$KUBELET_ROOT" || mount --bind "$KUBELET_ROOT" "$KUBELET_ROOT"
mount --make-rshared "$KUBELET_ROOT"

cat >"$S/cni/10-bridge.conflist" <<EOF
{"cniVersion": "1.0.0", "name": "testbed", "plugins": [{"type": "bridge", "bridge": "$BRIDGE", "isGateway": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "dataDir": "$S/cni-ipam", "ranges": [[{"subnet": "$POD_NET.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
EOF
cat >"$S/containerd.toml" <<EOF
version = 3
root = "$S/containerd"
state = "$S/containerd-state"
[grpc]
  address = "$CTD_SOCK"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "registry.k8s.io/pause:3.10"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = $(cap_sys_resource && echo false || echo true)
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["${CNI_BIN:-/usr/lib/cni}"]
  conf_dir = "$S/cni"
EOF

node unchanged
inside containerd containerd --config "$S/containerd.toml"
await containerd 30 ctrk version
"$here/images.sh"

kubeconfig kubelet "/O=system:nodes/CN=system:node:$NODE_NAME"
cert kubelet-serving "/CN=$NODE_NAME" "IP:$IP,DNS:$NODE_NAME"
cat >"$S/kubelet.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $IP
port: $KUBELET_PORT
healthzBindAddress: 127.0.0.1
healthzPort: $((PORT + 5))
containerRuntimeEndpoint: unix://$CTD_SOCK
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $P/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $P/kubelet-serving.crt
tlsPrivateKeyFile: $P/kubelet-serving.key
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
resolvConf: ""
clusterDomain: cluster.local
clusterDNS: [$SERVICE_NET.10]
volumePluginDir: $FLEX_DIR
podLogsDir: $S/pod-logs
staticPodPath: ""
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
volumeStatsAggPeriod: 10s
EOF
inside kubelet kubelet --config="$S/kubelet.yaml" --kubeconfig="$S/kubelet.kubeconfig" --root-dir="$KUBELET_ROOT" \
  --hostname-override="$NODE_NAME" --node-ip="$IP" $(gates) ${KUBELET_ARGS:-}
node_ready() { # the API alone would still say Ready after a kubelet restart
  curl -fs "http://127.0.0.1:$((PORT + 5))/healthz" && kubectl wait --for=condition=Ready --timeout=1s "node/$NODE_NAME"
}
await kubelet 120 node_ready

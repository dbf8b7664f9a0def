#!/usr/bin/env bash
# Measures what looking costs, with the release binary: a scrape of /metrics with many volumes, the doctor on them, and what an idle page
# costs `berth up`. VOLUMES (default 10000) for less.
#   bench-see.sh BERTH
set -euo pipefail
berth=$1 volumes=${VOLUMES:-10000}
dir=$(mktemp -d /tmp/bench-see.XXXX)
trap '"$berth" down --purge --data-dir "$dir/data" >/dev/null 2>&1 || true; rm -rf "$dir"' EXIT
"$berth" up --detach --data-dir "$dir/data" --listen 127.0.0.1:0 >"$dir/screen"
export KUBECONFIG=$dir/data/apiserver/kubeconfig
server=$(kubectl config view --raw -o 'jsonpath={.clusters[0].cluster.server}')
for part in ca:.clusters[0].cluster.certificate-authority-data crt:.users[0].user.client-certificate-data key:.users[0].user.client-key-data; do
    kubectl config view --raw -o "jsonpath={${part#*:}}" | base64 -d >"$dir/${part%%:*}"
done
fetch() { curl --silent --show-error --fail --cacert "$dir/ca" --cert "$dir/crt" --key "$dir/key" "$@"; }

# Claims and volumes that are bound to each other: as objects only, no storage is made for them.
create() {
    for number in $(seq "$1" "$2" "$volumes"); do
        name=v$number
        printf 'url = "%s/api/v1/persistentvolumes"\nheader = "Content-Type: application/json"\ndata = "%s"\noutput = "/dev/null"\nnext\n' "$server" \
            "{\\\"metadata\\\":{\\\"name\\\":\\\"$name\\\"},\\\"spec\\\":{\\\"storageClassName\\\":\\\"none\\\",\\\"accessModes\\\":[\\\"ReadWriteOnce\\\"],\\\"capacity\\\":{\\\"storage\\\":\\\"1Gi\\\"},\\\"persistentVolumeReclaimPolicy\\\":\\\"Retain\\\",\\\"claimRef\\\":{\\\"namespace\\\":\\\"default\\\",\\\"name\\\":\\\"$name\\\"},\\\"csi\\\":{\\\"driver\\\":\\\"none.example.com\\\",\\\"volumeHandle\\\":\\\"$name\\\"}}}"
        printf 'url = "%s/api/v1/namespaces/default/persistentvolumeclaims"\nheader = "Content-Type: application/json"\ndata = "%s"\noutput = "/dev/null"\nnext\n' "$server" \
            "{\\\"metadata\\\":{\\\"name\\\":\\\"$name\\\"},\\\"spec\\\":{\\\"storageClassName\\\":\\\"none\\\",\\\"volumeName\\\":\\\"$name\\\",\\\"accessModes\\\":[\\\"ReadWriteOnce\\\"],\\\"resources\\\":{\\\"requests\\\":{\\\"storage\\\":\\\"1Gi\\\"}}}}"
    done | sed '$d' >"$dir/create.$1"
    # Options of a connection are forgotten at each `next`.
    sed -i "s|^url|cacert = \"$dir/ca\"\ncert = \"$dir/crt\"\nkey = \"$dir/key\"\nurl|" "$dir/create.$1"
    curl --silent --config "$dir/create.$1"
}
for part in 1 2 3 4; do create "$part" 4 & done
wait
until [ "$(fetch "$server/metrics" | awk '/^pv_collector_bound_pvc_count/ {sum += $2} END {print int(sum)}')" -ge "$volumes" ]; do sleep 1; done
pid=$(jq .pid "$dir/data/running.json")
cpu() { awk '{print ($14 + $15) * 10}' "/proc/$pid/stat"; }
echo "| measured with $volumes volumes | |"
echo "|---|---|"
# The first one starts a look at the whole cluster in the background, which the others do not wait for.
fetch -o /dev/null "$server/metrics"; sleep 5
times=$(for _ in $(seq 20); do fetch -o "$dir/metrics" -w '%{time_starttransfer} %{time_total}\n' "$server/metrics"; done | sort -n -k2)
echo "| scrape of /metrics, median of 20 | $(echo "$times" | awk 'NR == 10 {printf "%.0f ms", $2 * 1000}') |"
echo "| its size | $(wc -c <"$dir/metrics") bytes |"
begun=$(date +%s%N); "$berth" doctor --data-dir "$dir/data" >/dev/null || true
echo "| berth doctor | $((($(date +%s%N) - begun) / 1000000)) ms |"
before=$(cpu); sleep 30
echo "| processor of \`berth up\` while nobody looks | $(awk "BEGIN {printf \"%.2f\", ($(cpu) - $before) / 300}") % of a core |"
echo "| its memory | $(awk '/^VmRSS/ {print int($2 / 1024)}' "/proc/$pid/status") MiB |"

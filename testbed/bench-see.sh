#!/usr/bin/env bash
# Measures what looking costs, with the release binary: a scrape of /metrics with many volumes, the doctor and `berth top` on them, and what an idle page
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
# Milliseconds of processor time, and KiB of memory that is not shared with files.
cpu() { awk '{print ($14 + $15) * 10}' "/proc/$pid/stat"; }
memory() { awk '/^RssAnon/ {print $2}' "/proc/$pid/status"; }
percent() { awk "BEGIN {printf \"%.2f\", ($2 - $1) / ($3 * 10)}"; }
echo "| measured with $volumes volumes | |"
echo "|---|---|"
# The first one starts a look at the whole cluster in the background, which the others do not wait for.
fetch -o /dev/null "$server/metrics"; sleep 5
before=$(cpu)
times=$(for _ in $(seq 20); do fetch -o "$dir/metrics" -w '%{time_starttransfer} %{time_total}\n' "$server/metrics"; done | sort -n -k2)
echo "| scrape of /metrics, median of 20 | $(echo "$times" | awk 'NR == 10 {printf "%.0f ms", $2 * 1000}') |"
echo "| processor time of one scrape | $((($(cpu) - before) / 20)) ms |"
echo "| its size | $(wc -c <"$dir/metrics") bytes |"
begun=$(date +%s%N); "$berth" doctor --data-dir "$dir/data" >/dev/null || true
echo "| berth doctor | $((($(date +%s%N) - begun) / 1000000)) ms |"
begun=$(date +%s%N); "$berth" top --once --data-dir "$dir/data" >/dev/null
echo "| berth top --once | $((($(date +%s%N) - begun) / 1000000)) ms |"
sleep 10; before=$(cpu); rest=$(memory); sleep 30
echo "| processor of \`berth up\` while nobody looks | $(percent "$before" "$(cpu)" 30) % of a core |"
echo "| its memory | $((rest / 1024)) MiB |"

# A page that is open and on which nothing happens: the stream of its changes, read by curl in the place of a browser.
link=$("$berth" status --data-dir "$dir/data" | awk '$1 == "page" {print $2}')
curl --silent --show-error --cookie-jar "$dir/cookies" --location --output /dev/null "$link"
curl --silent --no-buffer --cookie "$dir/cookies" --output "$dir/live" "${link%%\?*}api/live" & page=$!
until grep -q '"sections"' "$dir/live" 2>/dev/null; do sleep 0.2; done
sleep 15; before=$(cpu); sleep 60
echo "| processor of \`berth up\` for an idle page | $(percent "$before" "$(cpu)" 60) % of a core |"
echo "| memory for an idle page | $(awk "BEGIN {printf \"%.1f\", ($(memory) - $rest) / 1024}") MiB |"
kill "$page"; wait "$page" 2>/dev/null || true

# Sourced by e2e.sh and e2e-up.sh: runs Kubernetes' own end-to-end suite against $KUBECONFIG with the definitions of e2e/, into $results.
# FOCUS and SKIP select specs by regular expression, PROCS (default 4) is how many run at once.
export BERTH_BIN=${BERTH_BIN:-$repository/target/debug/berth}

definition() { # prints it for this machine
  if grep -q 'onlineExpansion: false' "$here/e2e/$1.yaml" && cap_sys_resource; then
    sed 's/onlineExpansion: false/onlineExpansion: true/' "$here/e2e/$1.yaml"
  else
    cat "$here/e2e/$1.yaml"
  fi
}
mock_manifests() { # prints a directory with the suite's manifest that wants its image pulled each time: there is no registry
  local mock=test/e2e/testing-manifests/storage-csi/mock/csi-mock-driver-snapshotter.yaml root=$results/manifests kubernetes
  kubernetes=$(cd "$here/mods/k8s" && go list -m -f '{{.Dir}}' k8s.io/kubernetes)
  mkdir -p "$root/${mock%/*}"
  sed 's/imagePullPolicy: Always/imagePullPolicy: IfNotPresent/' "$kubernetes/$mock" >"$root/$mock"
  echo "$root"
}
suite() { # definition: External.Storage with it
  # Specs marked Disruptive restart the kubelet by ssh; any volume data source needs programs of kubernetes-csi (hello-populator,
  # volume-data-source-validator).
  local specs=External.Storage skip='\[Disruptive\]|any volume data source' driver= root=$here/e2e
  if [ "$1" = csimock ]; then
    # SELinux is for kernels with it, OffByDefault for clusters with features that are switched off: nothing of Berth is in these specs.
    specs='CSI Mock' skip="$skip|\[Feature:(SELinux|OffByDefault)\]" root=$(mock_manifests)
  else
    definition "$1" >"$results/$1.yaml"
    driver=--storage.testdriver=$results/$1.yaml
  fi
  rm -f "$results/$1.txt"
  (cd "$results" && ginkgo --procs="${PROCS:-4}" --no-color --timeout=8h --focus="${FOCUS:-$specs}" --skip="${SKIP:-$skip}" \
    "$KUBE_BIN/e2e.test" -- --kubeconfig="$KUBECONFIG" --provider=skeleton --kubectl-path="$KUBE_BIN/kubectl" --repo-root="$root" \
    $driver --results="$results/$1.txt" >"$results/$1.log" 2>&1) || true
}
table() { # of $drivers; fails if a spec did
  printf '\n%-14s %7s %7s %8s %8s\n' driver passed failed skipped minutes
  local d failed=0
  for d in $drivers; do
    [ -s "$results/$d.txt" ] || { echo "$d: no results; see $results/$d.log"; failed=1; continue; }
    awk -F'\t' -v d="$d" '{n[$1]++; t += $2} END {
      printf "%-14s %7d %7d %8d %8.0f\n", d, n["passed"], NR - n["passed"] - n["skipped"], n["skipped"], t / 60}' "$results/$d.txt"
  done
  for d in $drivers; do
    awk -F'\t' -v d="$d" '$1 != "passed" && $1 != "skipped" {print d ": " $1 ": " $3}' "$results/$d.txt" 2>/dev/null || true
  done | tee "$results/failed"
  [ ! -s "$results/failed" ] && [ $failed = 0 ]
}

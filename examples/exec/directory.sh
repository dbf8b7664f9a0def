#!/bin/sh
# A CSI driver in shell, for `berth driver exec --program ./directory.sh`: a volume is a directory below ROOT, with snapshots and
# clones by copies. Fields of the request are in variables (BERTH_ID is "id"); the whole of it, with secrets, is on the standard input.
set -eu
root=${ROOT:-/srv/directory}
volume=$root/${BERTH_ID:-}

refuse() { # CODE MESSAGE
    printf '{"error":{"code":"%s","message":"%s"}}\n' "$1" "$2"
    exit 0
}

# Makes the volume of the content of a directory; one that an attempt has left is made again.
fill() {
    [ -d "$1" ] || refuse NOT_FOUND "there is no $1"
    rm -rf "$volume" "$volume.new"
    cp -a "$1" "$volume.new"
    mv "$volume.new" "$volume"
}

case $1 in
describe)
    echo '{"version":1, "name":"directory.example.com", "multiNode":true, "operations":["create", "delete", "clone",
        "snapshot", "delete-snapshot", "restore", "grow", "capacity", "publish", "stats", "probe"]}'
    ;;
probe) mkdir -p "$root/.snapshots" ;;
create)
    case ${BERTH_PARAMETERS_MODE:-0777} in
    [0-7][0-7][0-7] | [0-7][0-7][0-7][0-7]) ;;
    *) refuse INVALID_ARGUMENT "the parameter mode is not an octal number of three or four digits" ;;
    esac
    mkdir -p "$volume"
    chmod "${BERTH_PARAMETERS_MODE:-0777}" "$volume"
    ;;
delete) rm -rf "$volume" "$volume.new" ;;
clone) fill "$root/$BERTH_SOURCE_VOLUME_ID" ;;
restore) fill "$root/.snapshots/$BERTH_SOURCE_SNAPSHOT_ID" ;;
snapshot)
    volume=$root/.snapshots/$BERTH_ID
    mkdir -p "$root/.snapshots"
    fill "$root/$BERTH_SOURCE_VOLUME_ID"
    ;;
delete-snapshot) rm -rf "$root/.snapshots/$BERTH_ID" "$root/.snapshots/$BERTH_ID.new" ;;
grow | stats) ;; # A directory has no size of its own, and df says how full it is.
capacity)
    mkdir -p "$root"
    echo "{\"available\":$(df --output=avail -B1 "$root" | tail -n 1)}"
    ;;
publish)
    [ -d "$volume" ] || refuse NOT_FOUND "there is no $volume"
    printf '{"source":"%s"}\n' "$volume"
    ;;
esac

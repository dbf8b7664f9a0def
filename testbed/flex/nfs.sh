#!/usr/bin/env bash
# A FlexVolume driver for NFS shares in a few lines, as tutorials have it: bash, jq, and mount(8). Options: server, share.
# The tests run it as a driver of somebody else's, beside `berth flex`.

reply() {
    echo "$1"
    exit "$2"
}

domount() {
    local mnt=$1 server share options
    server=$(jq -r .server <<<"$2")
    share=$(jq -r .share <<<"$2")
    options=$(jq -r '.mountOptions // empty' <<<"$2")
    mountpoint -q "$mnt" && reply '{"status": "Success"}' 0
    mkdir -p "$mnt" &>/dev/null
    if ! mount -t nfs ${options:+-o "$options"} "$server:/${share#/}" "$mnt" &>/dev/null; then
        reply "{\"status\": \"Failure\", \"message\": \"Failed to mount $server:$share at $mnt\"}" 1
    fi
    reply '{"status": "Success"}' 0
}

dounmount() {
    mountpoint -q "$1" || reply '{"status": "Success"}' 0
    umount "$1" &>/dev/null || reply "{\"status\": \"Failure\", \"message\": \"Failed to unmount $1\"}" 1
    reply '{"status": "Success"}' 0
}

case $1 in
    init) reply '{"status": "Success", "capabilities": {"attach": false}}' 0 ;;
    mount) domount "$2" "$3" ;;
    unmount) dounmount "$2" ;;
    *) reply '{"status": "Not supported"}' 0 ;;
esac

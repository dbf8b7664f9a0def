#!/bin/sh
# A FlexVolume driver for tests, which records how it is called: a line per call, its words separated by tabs. Installed as
# NAME it mounts a filesystem in memory for each pod; as anything that begins with "disk" it attaches volumes first, and
# leaves `mount` to the host. It stops after the work of the call that .stop names, until it is killed.
here=$(dirname "$0")
call=$1
line=$1
for word in "$@"; do [ "$word" = "$1" ] || line=$line$(printf '\t%s' "$word"); done
record() { printf '%s\n' "$1" >> "$here/.calls"; }
reply() {
    if [ "$(cat "$here/.stop" 2>/dev/null)" = "$call" ]; then
        touch "$here/.stopped"
        while :; do sleep 0.1; done
    fi
    printf '%s\n' "$1"
    exit 0
}
fail() { reply "{\"status\":\"Failure\",\"message\":\"$1\"}"; }
volume() { printf '%s' "$1" | sed 's/.*"kubernetes.io\/pvOrVolumeName":"\([^"]*\)".*/\1/'; }
tmpfs() {
    if mountpoint -q "$1"; then record "TWICE $1"; fi
    mount -t tmpfs -o size=1m,mode=0755 flex "$1" || fail "mount failed"
}
record "$line"
case $(basename "$0") in disk*) attach=true ;; *) attach=false ;; esac
case $call in
    init) reply "{\"status\":\"Success\",\"Capabilities\":{\"attach\":$attach}}" ;;
    attach)
        touch "$here/.attached-$(volume "$2")-$3"
        reply "{\"status\":\"Success\",\"device\":\"/dev/flex-$(volume "$2")\"}" ;;
    detach) rm -f "$here/.attached-$2-$3"; reply '{"status":"Success"}' ;;
    isattached)
        if [ -e "$here/.attached-$(volume "$2")-$3" ]; then attached=true; else attached=false; fi
        reply "{\"status\":\"Success\",\"attached\":$attached}" ;;
    waitforattach) reply "{\"status\":\"Success\",\"device\":\"$2\"}" ;;
    mountdevice) tmpfs "$2"; reply '{"status":"Success"}' ;;
    mount)
        if $attach; then reply '{"status":"Not supported"}'; fi
        tmpfs "$2"; reply '{"status":"Success"}' ;;
    unmount | unmountdevice)
        if mountpoint -q "$2"; then umount "$2" || fail "umount failed"; fi
        reply '{"status":"Success"}' ;;
    expandfs) reply '{"status":"Success"}' ;;
    *) reply '{"status":"Not supported"}' ;;
esac

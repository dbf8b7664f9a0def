#!/usr/bin/env bash
# An NFS server for tests: Ganesha, serving one directory by versions 3 and 4 on ports of its own.
#
#   ganesha.sh STATE EXPORT PORT MOUNT_PORT [key=value…]
#
# EXPORT is served as /export (version 4) and under its own path (version 3); STATE keeps what the server writes down.
# Keys: pseudo=/export  minor=0,1,2  protocols=3,4  access=RW  squash=None  secure=false  grace=0 (seconds)  cache=0 (seconds that the
# server may remember a file's attributes, and so not see what a test does to it on the disk).
# Says "ready" when it serves. Then each line of input is obeyed and answered by "ok": stop and cont (freeze and thaw),
# kill (as by a crash), start, set key=value (before the next start). It ends, with all it started, when its input does.
#
# Version 3 needs a portmapper: rpcbind runs in namespaces of its own, so that several servers live side by side, and
# clients are told the ports. With portmapper=here it can be asked, by whoever is in the same network namespace.
set -euo pipefail

if [ "${BERTH_NFS_INSIDE:-}" != 1 ]; then
    export BERTH_NFS_INSIDE=1
    exec unshare --mount --pid --fork --kill-child --mount-proc -- "$0" "$@"
fi

state=$1 export=$2 port=$3 mount_port=$4
shift 4
pseudo=/export minor=0,1,2 protocols=3,4 access=RW squash=None secure=false grace=0 cache=0 portmapper=hidden
set_key() {
    case $1 in
        pseudo=* | minor=* | protocols=* | access=* | squash=* | secure=* | grace=* | cache=* | portmapper=*) printf -v "${1%%=*}" %s "${1#*=}" ;;
        *) echo "unknown: $1" >&2; exit 2 ;;
    esac
}
for pair in "$@"; do set_key "$pair"; done

mkdir -p "$state/recovery" "$export"
# What other tests have mounted just now is not to be kept from ending by a copy in this namespace.
while read -r _ _ _ _ at _; do
    case $at/ in
        "$export"/*) ;;
        "${TMPDIR:-/tmp}"/?*) umount -l "$at" 2>/dev/null || true ;;
    esac
done < <(tac /proc/self/mountinfo)
mount -t tmpfs none /run
mkdir -p /run/ganesha /run/rpcbind /run/sendsigs.omit.d
case $portmapper in
    hidden) unshare --net -- rpcbind -f -w >"$state/rpcbind.log" 2>&1 & ;;
    here) rpcbind -f -w >"$state/rpcbind.log" 2>&1 & ;;
esac
until [ -S /run/rpcbind.sock ]; do sleep 0.02; done

configure() {
    cat >"$state/ganesha.conf" <<CONF
NFS_CORE_PARAM {
    Protocols = $protocols;
    NFS_Port = $port;
    MNT_Port = $mount_port;
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
}
NFSV4 {
    Minor_Versions = $minor;
    Only_Numeric_Owners = true;
    RecoveryRoot = "$state/recovery";
    Lease_Lifetime = 20;
    Grace_Period = $(( grace > 0 ? grace : 20 ));
    Graceless = $([ "$grace" = 0 ] && echo true || echo false);
}
NFS_KRB5 { Active_krb5 = false; }
EXPORT_DEFAULTS { SecType = sys; }
EXPORT {
    Export_Id = 1;
    Path = "$export";
    Pseudo = "$pseudo";
    Protocols = $protocols;
    Access_Type = $access;
    Squash = $squash;
    PrivilegedPort = $secure;
    Attr_Expiration_Time = $cache;
    FSAL { Name = VFS; }
}
LOG { Default_Log_Level = EVENT; }
CONF
}

epoch=$(date +%s)
start() {
    configure
    # Clients tell a restarted server by the time of its start, in seconds.
    epoch=$((epoch + 1))
    ganesha.nfsd -F -E "$epoch" -f "$state/ganesha.conf" -L "$state/ganesha.log" -p "$state/ganesha.pid" >>"$state/out.log" 2>&1 &
    server=$!
    local tries=0
    until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
        kill -0 "$server" 2>/dev/null || { tail -n 20 "$state/ganesha.log" >&2; exit 1; }
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || { echo "it does not listen" >&2; exit 1; }
        sleep 0.05
    done
}

# A signal is sent to a process, and its threads stop one by one.
until_stopped() {
    while grep -hs '^State:' "/proc/$server/task"/*/status | grep -qv 'T (stopped)'; do sleep 0.01; done
}

start
echo ready
while read -r command argument; do
    case $command in
        stop) kill -STOP "$server"; until_stopped ;;
        cont) kill -CONT "$server" ;;
        kill) kill -KILL "$server"; wait "$server" 2>/dev/null || true ;;
        start) start ;;
        set) set_key "$argument" ;;
        *) echo "unknown: $command" >&2; exit 2 ;;
    esac
    echo ok
done

#!/bin/sh
# mount(8) for a machine whose kernel has no NFS client: `mount -t nfs [-o OPTIONS] SERVER:/SHARE DIR` goes through FUSE, and
# everything else is as usual.
PATH=${PATH#*:}
if [ "$1 $2" != "-t nfs" ]; then exec mount "$@"; fi
shift 2
options=
if [ "$1" = -o ]; then options=$2; shift 2; fi
document="{\"server\":\"${1%%:*}\",\"share\":\"${1#*:}\""
if [ -n "$options" ]; then document=$document",\"mountOptions\":\"$options\""; fi
exec "$(dirname "$0")/../.fuse/k8s~nfs/nfs" mount "$2" "$document}"

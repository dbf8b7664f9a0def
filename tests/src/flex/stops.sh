#!/bin/sh
# Runs .script beside it, as a driver; then it stops, if .stop names the call, until it is killed. Tools in .bin come first.
here=$(cd "$(dirname "$0")" && pwd)
PATH=$here/.bin:$PATH
case $1 in mount) if mountpoint -q "$2"; then echo "TWICE $2" >> "$here/.calls"; fi ;; esac
reply=$(bash "$here/.script" "$@")
code=$?
printf '%s\n' "$1" >> "$here/.calls"
if [ "$(cat "$here/.stop" 2>/dev/null)" = "$1" ]; then
    touch "$here/.stopped"
    while :; do sleep 0.1; done
fi
printf '%s\n' "$reply"
exit "$code"

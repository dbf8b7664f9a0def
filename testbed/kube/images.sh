#!/usr/bin/env bash
# Makes the node's images from local files and imports them; nothing is pulled.
#   pause    the static binary of mods/pause
#   busybox  Debian's busybox-static
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT

image() { # name, root folder, config: an archive as docker saves it
  local name=$1 root=$2 conf=$3 d=$tmp/image
  if ctrk images ls -q | grep -qxF "$name"; then return; fi
  mkdir "$d"
  tar -C "$root" --numeric-owner --owner=0 --group=0 --sort=name --mtime=@0 -cf "$d/layer.tar" .
  local diff; diff=$(sha256sum <"$d/layer.tar" | cut -d' ' -f1)
  echo "{\"architecture\":\"$ARCH\",\"os\":\"linux\",\"config\":$conf,\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:$diff\"]}}" >"$d/config.json"
  echo "[{\"Config\":\"config.json\",\"RepoTags\":[\"$name\"],\"Layers\":[\"layer.tar\"]}]" >"$d/manifest.json"
  tar -C "$d" -cf "$tmp/image.tar" manifest.json config.json layer.tar
  ctrk images import "$tmp/image.tar" >/dev/null
  rm -rf "$d" "$tmp/image.tar"
  echo "image  $name"
}
ARCH=$("$GO" env GOARCH)

mkdir "$tmp/pause"
cp "$KUBE_BIN/pause" "$tmp/pause/"
image registry.k8s.io/pause:3.10 "$tmp/pause" '{"Entrypoint":["/pause"]}'

root=$tmp/busybox
mkdir -p "$root"/{bin,etc,root,proc,sys,dev,run}; mkdir -m 1777 "$root/tmp"
cp "${BUSYBOX_BIN:-/bin/busybox}" "$root/bin/busybox"
for applet in $("$root/bin/busybox" --list); do [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"; done
echo root:x:0:0:root:/root:/bin/sh >"$root/etc/passwd"; echo root:x:0: >"$root/etc/group"
image docker.io/library/busybox:latest "$root" '{"Env":["PATH=/bin"],"Cmd":["sh"]}'

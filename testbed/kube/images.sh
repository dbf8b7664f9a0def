#!/usr/bin/env bash
# Makes the node's images from local files and imports them; nothing is pulled.
#   pause    the static binary of mods/pause
#   busybox  Debian's busybox-static
#   e2e      (argument) what Kubernetes' e2e suite runs: agnhost with busybox, GNU's dd, and names for the two above
#   berth    (argument) the images of deploy/, from $BERTH_BIN and this machine's tools, and Berth under the names of the sidecars
#            that the suite's mock driver runs; made anew each time
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/env.sh"
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT

image() { # root folder, config, names...: an archive as docker saves it
  local root=$1 conf=$2 d=$tmp/image have name new=; shift 2
  have=$(ctrk images ls -q)
  for name; do grep -qxF "$name" <<<"$have" || new=1; done
  [ -n "$new" ] || return 0
  mkdir "$d"
  tar -C "$root" --numeric-owner --owner=0 --group=0 --sort=name --mtime=@0 -cf "$d/layer.tar" .
  local diff; diff=$(sha256sum <"$d/layer.tar" | cut -d' ' -f1)
  echo "{\"architecture\":\"$ARCH\",\"os\":\"linux\",\"config\":$conf,\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:$diff\"]}}" >"$d/config.json"
  echo "[{\"Config\":\"config.json\",\"RepoTags\":[\"$1\"],\"Layers\":[\"layer.tar\"]}]" >"$d/manifest.json"
  tar -C "$d" -cf "$tmp/image.tar" manifest.json config.json layer.tar
  ctrk images import "$tmp/image.tar" >/dev/null
  for name in "${@:2}"; do ctrk images tag --force "$1" "$name" >/dev/null; done
  rm -rf "$d" "$tmp/image.tar"
  echo "image  $*"
}
from_host() { # root folder, directory below it, program...: this machine's, with their libraries
  local root=$1 dir=$2 program library; shift 2
  mkdir -p "$root/$dir"
  for program; do
    cp -L --remove-destination "$(PATH=$PATH:/usr/sbin:/sbin command -v "$program")" "$root/$dir/${program##*/}"
    for library in $(ldd "$root/$dir/${program##*/}" 2>/dev/null | grep -o '/[^ ]*'); do # a static one has none
      mkdir -p "$root${library%/*}"; cp -L "$library" "$root$library"
    done
  done
}
ARCH=$("$GO" env GOARCH)
SUITE=registry.k8s.io/e2e-test-images
PAUSE=registry.k8s.io/pause:3.10
BUSYBOX=docker.io/library/busybox:latest

mkdir "$tmp/pause"
cp "$KUBE_BIN/pause" "$tmp/pause/"
image "$tmp/pause" '{"Entrypoint":["/pause"]}' $PAUSE

root=$tmp/busybox
mkdir -p "$root"/{bin,etc,root,proc,sys,dev,run,mnt,usr/local/bin}; mkdir -m 1777 "$root/tmp"
cp "${BUSYBOX_BIN:-/bin/busybox}" "$root/bin/busybox"
for applet in $("$root/bin/busybox" --list); do [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"; done
ln -s bin "$root/sbin"; ln -s ../bin "$root/usr/bin"; ln -s ../bin "$root/usr/sbin"
echo root:x:0:0:root:/root:/bin/sh >"$root/etc/passwd"; echo root:x:0: >"$root/etc/group"
busybox_conf='{"Env":["PATH=/usr/local/bin:/bin"],"Cmd":["sh"]}'
image "$root" "$busybox_conf" $BUSYBOX

for what; do
  case $what in
    e2e)
      image "$tmp/pause" '{"Entrypoint":["/pause"]}' registry.k8s.io/pause:3.10.2
      image "$root" "$busybox_conf" $SUITE/busybox:1.37.0-1 $SUITE/busybox:1.36.1-1
      image "$root" '{"Env":["PATH=/usr/local/bin:/bin"],"Cmd":["sleep","1000000000"]}' $SUITE/nginx:1.15-4 $SUITE/nginx:1.27-0 # nothing asks it for pages
      cp -a "$root" "$tmp/gnu"
      from_host "$tmp/gnu" bin sh dd
      image "$tmp/gnu" "$busybox_conf" $SUITE/glibc-dns-testing:2.0.0
      cp -a "$root" "$tmp/agnhost"
      cp "$KUBE_BIN/agnhost" "$tmp/agnhost/agnhost"; ln -s agnhost "$tmp/agnhost/agnhost-2"; mkdir -m 1777 "$tmp/agnhost/uploads"
      # The suite runs "nsenter … -- sh -c …" for the host's sh, where busybox would run its own.
      cat >"$tmp/agnhost/usr/local/bin/nsenter" <<'NSENTER'
#!/bin/sh
for word; do shift; [ "$word" = sh ] && word=/bin/sh; set -- "$@" "$word"; done
exec /bin/busybox nsenter "$@"
NSENTER
      chmod +x "$tmp/agnhost/usr/local/bin/nsenter"
      image "$tmp/agnhost" '{"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],"Entrypoint":["/agnhost"],"Cmd":["pause"]}' $SUITE/agnhost:2.63.0 ;;
    berth)
      version=$("$BERTH_BIN" --version | cut -d' ' -f2)
      strip -o "$tmp/berth" "$BERTH_BIN"
      from_host "$tmp/plain" . "$tmp/berth"
      from_host "$tmp/tools" . "$tmp/berth"
      from_host "$tmp/tools" usr/sbin mkfs.ext4 e2fsck resize2fs mkfs.xfs mkfs.btrfs
      cp "$KUBE_BIN/hostpath" "$tmp/tools/"
      anew() { # root folder, entry point, name
        ctrk images rm "$3" >/dev/null 2>&1 || true
        image "$tmp/$1" "{\"Entrypoint\":[$2],\"Env\":[\"PATH=/usr/sbin\"]}" "$3"
      }
      anew plain '"/berth"' "docker.io/library/berth:$version"
      anew tools '"/berth"' "docker.io/library/berth-node:$version"
      # The versions that the manifests of the suite name.
      anew tools '"/hostpath"' registry.k8s.io/sig-storage/hostpathplugin:v1.17.1
      for name in csi-provisioner:v6.1.1 csi-attacher:v4.11.0 csi-resizer:v2.1.0 csi-snapshotter:v8.5.0 csi-node-driver-registrar:v2.16.0; do
        anew plain "\"/berth\",\"${name%:*}\"" "registry.k8s.io/sig-storage/$name"
      done ;;
    *) echo "images.sh: there is no $what" >&2; exit 2 ;;
  esac
done

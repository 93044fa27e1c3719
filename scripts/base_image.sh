#!/bin/sh
# Make the base image of our Dockerfile where no image can be pulled: a minimal Debian with Python, from the package
# mirror that this machine's apt is set up for, with this machine's CA certificates.
#
#   scripts/base_image.sh [TAG]     TAG: default python:3.11-slim-bookworm; nothing to do when it is there
#
# Needs root, debootstrap, tar and a docker daemon. SAFEDIST_REBUILD=1 makes it anew.
set -eu

tag="${1:-python:3.11-slim-bookworm}"
suite=bookworm
packages=python3,python3-venv,ca-certificates

if [ "${SAFEDIST_REBUILD:-0}" != 1 ] && docker image inspect "$tag" >/dev/null 2>&1; then
    echo "base_image.sh: $tag is there"
    exit 0
fi
[ "$(id -u)" = 0 ] || { echo "base_image.sh: debootstrap needs root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "base_image.sh: no debootstrap; Debian: apt-get install debootstrap" >&2; exit 1; }

# The mirror from which apt would fetch this suite's base packages.
mirror="$(apt-get indextargets --format '$(SITE)' "Codename: $suite" "Created-By: Packages" "Component: main" 2>/dev/null | head -n 1)"
[ -n "$mirror" ] || mirror="$(apt-get indextargets --format '$(SITE)' "Created-By: Packages" "Component: main" | head -n 1)"
[ -n "$mirror" ] || { echo "base_image.sh: apt knows no mirror; set up its sources first" >&2; exit 1; }

rootfs="$(mktemp -d "${TMPDIR:-/tmp}/safedist-base.XXXXXX")"
trap 'rm -rf "$rootfs"' EXIT
trap 'exit 130' INT TERM
chmod 0755 "$rootfs" # mktemp's 0700 would become the mode of the image's root directory

made() {
    debootstrap --variant=minbase --include="$packages" "$suite" "$rootfs" "$mirror" >"$rootfs.log" 2>&1
}
# Once more where a download failed; it goes on with what it has.
made || { sleep 10 && made; } || {
    echo "base_image.sh: debootstrap failed:" >&2
    tail -n 15 "$rootfs.log" >&2
    rm -f "$rootfs.log"
    exit 1
}
rm -f "$rootfs.log"
rm -rf "$rootfs/var/cache/apt/archives" "$rootfs/var/lib/apt/lists" "$rootfs/usr/share/doc" "$rootfs/usr/share/man"
mkdir -p "$rootfs/var/cache/apt/archives/partial" "$rootfs/var/lib/apt/lists/partial"
ln -sf python3 "$rootfs/usr/bin/python"
# A machine behind an inspecting proxy has its CA in this bundle; elsewhere it is Debian's own.
bundle=/etc/ssl/certs/ca-certificates.crt
[ ! -f "$bundle" ] || cp "$bundle" "$rootfs$bundle"

tar -C "$rootfs" --numeric-owner -c . | docker import --change 'CMD ["python3"]' - "$tag" >/dev/null
echo "base_image.sh: made $tag, $(docker image inspect --format '{{.Size}}' "$tag" | awk '{printf "%d MB", $1 / 1e6}')"

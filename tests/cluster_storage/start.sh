#!/usr/bin/env bash
# Export a folder by NFS and mount it in three network namespaces, a, b and (read-only) c: as root on Debian.
#     bash tests/cluster_storage/start.sh FOLDER        exports FOLDER/export, which exists, at FOLDER/nfs
#     nsenter --target $(cat FOLDER/a.pid) --net --mount COMMAND        runs something in one of them
#     bash tests/cluster_storage/start.sh FOLDER stop
# The server is nfs-ganesha and the client nfs_client.py: both run in user space, no kernel module is needed.
set -euo pipefail
FOLDER=$(cd "$1" && pwd)
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
SPACES="a b c"

stop() {
    for name in $SPACES; do
        [ ! -f "$FOLDER/$name.pid" ] || nsenter --target "$(cat "$FOLDER/$name.pid")" --mount \
            umount --lazy "$FOLDER/nfs" 2>/dev/null || true
    done
    for pid in "$FOLDER"/*.pid; do
        kill "$(cat "$pid")" 2>/dev/null || true
        rm -f "$pid"
    done
}
if [ "${2:-}" = stop ]; then
    stop
    exit
fi

if [ "$(command -v ganesha.nfsd rpcbind fusermount3 ip | wc -l)" -lt 4 ] || \
    ! ls /usr/lib/*/libnfs.so.13 >/dev/null 2>&1; then
    apt-get install --yes --no-install-recommends nfs-ganesha nfs-ganesha-vfs rpcbind libnfs13 fuse3 iproute2 \
        >"$FOLDER/apt.log" 2>&1
fi
[ -d "$FOLDER/packages" ] || "$PYTHON" -m pip install --quiet --target "$FOLDER/packages" mfusepy
if ! rpcinfo >/dev/null 2>&1; then
    setsid rpcbind -f >/dev/null 2>&1 &
    echo $! >"$FOLDER/rpcbind.pid"
    sleep 1
fi

cat >"$FOLDER/ganesha.conf" <<END
NFS_CORE_PARAM {
    Protocols = 3; NFS_Port = 22049; MNT_Port = 22050;
    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;
}
NFS_KRB5 { Active_krb5 = false; }
EXPORT {
    Export_Id = 1; Path = "$FOLDER/export"; Pseudo = "/export"; Protocols = 3; Transports = TCP;
    Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
    FSAL { Name = VFS; }
}
END
setsid ganesha.nfsd -F -f "$FOLDER/ganesha.conf" -L "$FOLDER/ganesha.log" -p "$FOLDER/ganesha.pid" \
    >/dev/null 2>&1 &
for _ in $(seq 120); do
    (: </dev/tcp/127.0.0.1/22050) 2>/dev/null && break
    sleep 1
done

mkdir -p "$FOLDER/nfs"
subnet=0
for name in $SPACES; do
    subnet=$((subnet + 1))
    setsid unshare --net --mount --propagation private sleep infinity >/dev/null 2>&1 &
    echo $! >"$FOLDER/$name.pid"
    sleep 0.5
    ip link add "mapet-$name" type veth peer name nfs netns "$(cat "$FOLDER/$name.pid")"
    ip address add "10.213.$subnet.1/24" dev "mapet-$name"
    ip link set "mapet-$name" up
    enter=(nsenter --target "$(cat "$FOLDER/$name.pid")" --net --mount)
    "${enter[@]}" ip address add "10.213.$subnet.2/24" dev nfs
    "${enter[@]}" ip link set nfs up
    # FUSE wants an empty folder; what the others see at this path may not be.
    "${enter[@]}" mount -t tmpfs none "$FOLDER/nfs"
    options=()
    [ "$name" != c ] || options=(--read-only)
    PYTHONPATH=$FOLDER/packages setsid "${enter[@]}" "$PYTHON" -W ignore "$HERE/nfs_client.py" \
        "nfs://10.213.$subnet.1$FOLDER/export?nfsport=22049&mountport=22050" "$FOLDER/nfs" "${options[@]}" \
        >"$FOLDER/client_$name.log" 2>&1 &
    for _ in $(seq 120); do
        "${enter[@]}" grep --quiet " $FOLDER/nfs fuse" /proc/mounts && continue 2
        sleep 0.5
    done
    echo "error: no mount after a minute; logs are in $FOLDER" >&2
    exit 1
done

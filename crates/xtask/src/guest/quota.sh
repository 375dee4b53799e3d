# Runs in the guest: uses up a user's quota of a file system through a mount of a share.

# Arguments: the file system, the command that makes it.
use_up() {
    kind=$1 make=$2
    truncate -s 400M "/tmp/$kind.img"
    $make "/tmp/$kind.img" || fail "cannot make $kind"
    mkdir -p "/mnt/$kind" "/run/$kind"
    mount -t "$kind" -o loop,usrquota "/tmp/$kind.img" "/mnt/$kind" || fail "cannot mount $kind"
    xfs_quota -f -x -c 'limit -u bhard=8m 4321' "/mnt/$kind" || fail "cannot limit a user of $kind"
    chmod 777 "/mnt/$kind"
    byway serve --share "s=/mnt/$kind,users=squash:4321" --listen "unix:///run/$kind.sock" >/run/ready 2>/run/server.log &
    server=$!
    wait_until grep -q '^ready' /run/ready
    byway mount "byway+unix:///s?socket=/run/$kind.sock" "/run/$kind" >/run/mounted 2>/run/mount.log &
    wait_until grep -q '^ready mount' /run/mounted

    /bin/dd if=/dev/zero of="/run/$kind/filled" bs=65536 count=1024 2>/run/dd.log && fail "$kind: no quota"
    grep -q 'Disk quota exceeded' /run/dd.log || { cat /run/dd.log; fail "$kind: another error"; }
    bytes=$(stat -c %s "/run/$kind/filled")
    { [ "$bytes" -gt 4194304 ] && [ "$bytes" -le 8388608 ]; } || fail "$kind: the error came after $bytes bytes"
    # With room there are writes again: as soon as the kernel has told the mount that it has forgotten the file.
    rm "/run/$kind/filled"
    wait_until /bin/dd if=/dev/zero "of=/run/$kind/again" bs=65536 count=16 conv=fsync
    byway umount "/run/$kind" || fail "cannot unmount"
    kill "$server"
    wait "$server"
    rm /run/ready /run/mounted
    umount "/mnt/$kind" || fail "cannot unmount $kind"
    echo "$kind: Disk quota exceeded after $bytes bytes"
}

use_up ext4 "mkfs.ext4 -q -F -O quota"
use_up xfs "mkfs.xfs -q"

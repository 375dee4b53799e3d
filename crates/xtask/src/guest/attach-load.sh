
# From here on: fio on file systems while the server is killed, and memory that is swapped to a device.
# Settings: kills_under_load.

# Writes that the device has completed.
writes() { awk '{print $5}' "/sys/block/${device#/dev/}/stat"; }
has_more_writes() { [ "$(writes)" -ge "$1" ]; }
swapped_out() { awk '/^pswpout/ {print $2}' /proc/vmstat; }
has_swapped() { [ "$(swapped_out)" -ge "$1" ]; }

kill_server() {
    kill -9 "$server"
    wait "$server" 2>/dev/null
    serve
}

# fio writes a file and checks what it reads, again and again until /run/more is gone.
fio_until_told() {
    while [ -e /run/more ]; do
        fio --name=verify --filename=/mnt/verify --rw=randwrite --bsrange=4k-64k --size=4m --direct=1 --ioengine=libaio \
            --iodepth=8 --fsync=32 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --verify_state_save=0 --thread \
            >/run/fio.log 2>&1 || return 1
    done
}

# A new file system on the large volume, fio on it while the server is killed, and a check: "works KIND FORCE CHECK...".
works() {
    kind=$1 force=$2
    shift 2
    device=$(byway attach byway://127.0.0.1:7000/large --as disk 2>/run/said) || fail "cannot attach: $(cat /run/said)"
    "mkfs.$kind" -q "$force" "$device" || fail "cannot make $kind"
    mount -t "$kind" "$device" /mnt || fail "cannot mount $kind"
    : >/run/more
    fio_until_told &
    worker=$!
    for kill in $(seq "$kills_under_load"); do
        wait_until has_more_writes $(($(writes) + 40))
        kill_server
    done
    rm /run/more
    wait "$worker" || { cat /run/fio.log; fail "fio on $kind"; }
    umount /mnt || fail "cannot unmount $kind"
    "$@" "$device" >/run/check.log 2>&1 || { cat /run/check.log; fail "$kind has errors"; }
    detach
    "$@" /run/large >/run/check.log 2>&1 || { cat /run/check.log; fail "$kind has errors in the store"; }
    echo "$kind is clean after $kills_under_load kills of the server under fio"
}

serve
works ext4 -F e2fsck -f -n
works xfs -f xfs_repair -n -f

# A program with twice the memory that it is to have: half of it is on the device while the server is killed. Beyond memory.high it is
# slowed down; beyond memory.max it would be killed while the device waits.
mkdir /run/cgroup
mount -t cgroup2 none /run/cgroup || fail "no cgroups"
echo +memory >/run/cgroup/cgroup.subtree_control
mkdir /run/cgroup/small
echo 32M >/run/cgroup/small/memory.high
attach
mkswap "$device" >/dev/null && swapon "$device" || fail "cannot swap to $device"
byway detach disk 2>/run/said && fail "detached while it is swap"
grep -q "is in use" /run/said || fail "said: $(cat /run/said)"
dd if=/dev/urandom of=/run/bytes bs=1M count=64 2>/dev/null
before=$(swapped_out)
(
    sh -c 'echo $$ >/run/cgroup/small/cgroup.procs; exec dd if=/run/bytes bs=64M count=1 iflag=fullblock 2>/dev/null' |
        cmp - /run/bytes
) &
program=$!
wait_until has_swapped $((before + 1024))
kill_server
wait "$program" || fail "memory has other contents after it was swapped"
swapoff "$device" || fail "cannot end the swap"
pages=$(($(swapped_out) - before))
[ "$pages" -ge 4096 ] || fail "only $pages pages were swapped"
detach
echo "$pages pages were swapped to a device whose server was killed"
kill "$server"
wait "$server"

# Runs in the guest: ext4 on the kernel's NBD client, with a server that is killed meanwhile.
# Settings: files, synced_before_kill.

serve() {
    : >/run/ready
    byway serve --volume v=/run/volume --nbd tcp://127.0.0.1:10809 >/run/ready 2>>/run/server.log &
    server=$!
    wait_until grep -q '^ready nbd' /run/ready
}

is_attached() { [ "$(cat /sys/block/nbd0/size)" -gt 0 ]; }
is_detached() { [ ! -e /sys/block/nbd0/pid ]; }

attach() {
    nbd-client 127.0.0.1 10809 -N v /dev/nbd0 || fail "cannot attach"
    wait_until is_attached
}

detach() {
    nbd-client -d /dev/nbd0 || fail "cannot detach"
    wait_until is_detached
}

check() {
    e2fsck -f -n /dev/nbd0 >/run/e2fsck.log 2>&1 || { cat /run/e2fsck.log; fail "e2fsck finds errors: $1"; }
    grep -q 'ERROR\|WARNING\|Fix' /run/e2fsck.log && { cat /run/e2fsck.log; fail "e2fsck complains: $1"; }
    echo "e2fsck clean: $1"
}

# Compares each recorded file: those that a finished sync covered.
compare() {
    (cd /mnt && sha256sum -c -s "/run/$1.sums") || fail "contents differ: $1"
    echo "contents right: $(wc -l <"/run/$1.sums") files, $1"
}

# Writes file number $2 named $1-$2 of 4 KiB to 1 MiB.
write_file() {
    blocks=$(($2 * 37 % 256 + 1))
    dd if=/dev/urandom of="/mnt/$1-$2" bs=4096 count="$blocks" conv=fsync 2>/dev/null
}

dd if=/dev/zero of=/run/volume bs=1 count=0 seek=128M 2>/dev/null
serve
attach
echo "attached: $(cat /sys/block/nbd0/size) sectors"
mkfs.ext4 -q -F /dev/nbd0 || fail "cannot format"
mount -t ext4 /dev/nbd0 /mnt || fail "cannot mount"
for number in $(seq "$files"); do
    write_file quiet "$number" || fail "cannot write"
done
(cd /mnt && sha256sum quiet-*) >/run/quiet.sums
umount /mnt || fail "cannot unmount"
check "after an undisturbed run"

# The page cache went with the mount; the device's own goes with the connection.
detach
attach
mount -t ext4 /dev/nbd0 /mnt || fail "cannot mount again"
compare quiet

# A writer records the files whose sync succeeded, and goes on until the device fails.
: >/run/synced.sums
(
    number=1
    while write_file synced "$number" && sync -f /mnt; do
        # The sum of what was written, before any failure can take it from the cache.
        (cd /mnt && sha256sum "synced-$number") >>/run/synced.sums || break
        number=$((number + 1))
        [ "$number" -le 1000 ] || break
    done
    : >/run/writer-ended
) &
has_synced() { [ "$(wc -l </run/synced.sums)" -ge "$synced_before_kill" ]; }
wait_until has_synced
[ ! -e /run/writer-ended ] || fail "the writer ended before the kill"
kill -9 "$server"
echo "killed the server after $(wc -l </run/synced.sums) synced files"
serve
# The kernel holds what was on its way until it is told to give up; then the writer's sync fails.
nbd-client -d /dev/nbd0 || fail "cannot give up the dead connection"
wait_until test -e /run/writer-ended
umount /mnt || fail "cannot unmount after the kill"
wait_until is_detached
attach
# Replays the journal; 1 means that it mended something, which a replay may count as.
e2fsck -p /dev/nbd0 >/run/e2fsck.log 2>&1
[ $? -le 1 ] || { cat /run/e2fsck.log; fail "e2fsck cannot mend"; }
check "after the kill"
mount -t ext4 /dev/nbd0 /mnt || fail "cannot mount after the kill"
compare quiet
compare synced
write_file late 1 || fail "cannot write after the kill"
umount /mnt || fail "cannot unmount at the end"
check "at the end"
detach
kill "$server"
wait "$server"

# Runs in the guest: ext4 on a volume that is attached by ublk, with its server and then its own process killed.
# Settings: kills, files_per_kill.

serve() {
    : >/run/ready
    byway serve --volume v=/run/volume --volume large=/run/large --listen tcp://127.0.0.1:7000 --http 127.0.0.1:9100 \
        >/run/ready 2>>/run/server.log &
    server=$!
    wait_until grep -q '^ready' /run/ready
}

# Attaches the volume as "disk", with further arguments; sets device.
attach() {
    device=$(byway attach byway://127.0.0.1:7000/v --as disk "$@" 2>/run/said) || {
        cat /run/said
        fail "cannot attach $*"
    }
    [ -b "$device" ] || fail "no block device: $device"
}

detach() { byway detach disk || fail "cannot detach"; }

check() {
    e2fsck -f -n "$1" >/run/e2fsck.log 2>&1 || { cat /run/e2fsck.log; fail "e2fsck finds errors in $1: $2"; }
    echo "e2fsck clean: $1 $2"
}

compare() { (cd /mnt && sha256sum -c -s /run/sums) || fail "contents differ: $1"; }

process() { sed 's/.*"pid":\([0-9]*\).*/\1/' /run/byway-attach/disk.json; }
allocated() { stat -c %b /run/volume; }
is_gone() { [ ! -e "$1" ]; }
has_written() { [ "$(wc -l </run/sums)" -ge "$1" ]; }

# Flushes of the volume that its server process has done.
flushes() { wget -q -O - http://127.0.0.1:9100/metrics | sed -n 's/^byway_volume_flushes_total{volume="v".*} //p'; }

has_died() { ! kill -0 "$1" 2>/dev/null; }

# Writes and syncs so many files of 4 KiB to 1 MiB, until one fails, and records their sums.
write_files() {
    for number in $(seq "$1"); do
        dd if=/dev/urandom of="/mnt/$number" bs=4096 count=$((number * 37 % 256 + 1)) conv=fsync 2>/dev/null || break
        (cd /mnt && sha256sum "$number") >>/run/sums
    done
}

ln -s /run/byway-attach/disk.log /run/copy.log
dd if=/dev/zero of=/run/volume bs=1 count=0 seek=128M 2>/dev/null
dd if=/dev/zero of=/run/large bs=1 count=0 seek=320M 2>/dev/null
serve
byway doctor | grep ublk | head -n 1

# Without an entry that tells of it no device begins.
mkdir -p /run/byway-attach
mount -t tmpfs -o size=16k tmpfs /run/byway-attach
dd if=/dev/zero of=/run/byway-attach/full bs=4k 2>/dev/null
byway attach byway://127.0.0.1:7000/v --as disk >/run/said 2>&1 && fail "attached without an entry"
is_gone /dev/ublkb0 && is_gone /dev/ublkc0 || fail "a device that nothing tells of"
umount /run/byway-attach
attach
[ "$device" = /dev/ublkb0 ] || fail "not ublk by itself: $device"
grep -q "server is on this machine" /run/said || fail "no warning that the server is here"
echo "attached: $device, $(cat /sys/block/ublkb0/size) sectors, fua $(cat /sys/block/ublkb0/queue/fua)"
byway attach --list | grep -q "^disk  /dev/ublkb0  .*process [0-9]" || fail "not in the list"
grep -q '^VmLck:[^0]*[1-9]' "/proc/$(process)/status" || fail "memory is not locked"

# Bytes that pass no cache, at once and in short pieces.
dd if=/dev/urandom of=/run/bytes bs=1M count=24 2>/dev/null
dd if=/run/bytes of="$device" bs=1M oflag=direct 2>/dev/null || fail "cannot write"
dd if="$device" bs=64K count=384 iflag=direct 2>/dev/null | cmp - /run/bytes || fail "not the bytes that were written"
cmp -n 25165824 /run/volume /run/bytes || fail "the store has other bytes"
before=$(allocated)
blkdiscard -o 0 -l 16777216 "$device" || fail "cannot discard"
[ "$(allocated)" -eq $((before - 32768)) ] || fail "space before the discard $before, after it $(allocated)"
dd if="$device" bs=1M count=16 iflag=direct 2>/dev/null | cmp -n 16777216 - /dev/zero || fail "no zeroes after a discard"
dd if="$device" bs=1M skip=16 count=8 iflag=direct 2>/dev/null >/run/rest
dd if=/run/bytes bs=1M skip=16 2>/dev/null | cmp - /run/rest || fail "the discard took too much"
echo "read, written and discarded"

mkfs.ext4 -q -F "$device" || fail "cannot format"
mount -t ext4 "$device" /mnt || fail "cannot mount"
byway detach disk 2>/run/said && fail "detached while mounted"
grep -q "is in use (mounted on /mnt)" /run/said || fail "said: $(cat /run/said)"
: >/run/sums
all=$(((kills + 1) * files_per_kill))
write_files "$all" &
writer=$!
for kill in $(seq "$kills"); do
    wait_until has_written $((kill * files_per_kill))
    kill -9 "$server"
    wait "$server" 2>/dev/null
    serve
done
wait "$writer"
[ "$(wc -l </run/sums)" -eq "$all" ] || fail "a write failed: $(wc -l </run/sums) of $all files"
echo "the server was killed $kills times under $all synced files"
umount /mnt || fail "cannot unmount"
check "$device" "after kills of the server"
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 "$device" /mnt || fail "cannot mount again"
compare "after kills of the server"
umount /mnt
detach
is_gone /dev/ublkb0 && is_gone /dev/ublkc0 || fail "something of the device stays"
check /run/volume "in the store"

# What was not synced is at the server after a detach.
attach
dd if=/run/bytes of="$device" bs=1M count=8 2>/dev/null
detach
cmp -n 8388608 /run/volume /run/bytes || fail "the detach did not write all"

# Its process is killed: a successor makes durable what the killed process had written. Only one that may write takes over.
attach
dd if=/run/bytes of="$device" bs=1M count=1 oflag=direct 2>/dev/null
first=$(process) before=$(flushes)
kill -9 "$first"
wait_until has_died "$first"
byway attach byway://127.0.0.1:7000/v --as disk --read-only 2>/run/said && fail "a read-only successor of a writable device"
grep -q "attach without --read-only" /run/said || fail "said: $(cat /run/said)"
[ "$(flushes)" -eq "$before" ] || fail "flushed by a read-only successor"
attach
[ "$(flushes)" -gt "$before" ] || fail "taken over without a flush"
detach

# Its process is killed under a writer: the next attach goes on with the device, and the writer gets no error.
attach
mkfs.ext4 -q -F "$device" && mount -t ext4 "$device" /mnt || fail "cannot mount for the takeover"
: >/run/sums
write_files "$files_per_kill" &
writer=$!
wait_until has_written 2
before=$device first=$(process)
kill -9 "$first"
wait_until has_died "$first"
byway attach --list | grep -q "its process has died, and requests wait" || fail "the list: $(byway attach --list)"
byway attach byway://127.0.0.1:7000/v --as disk --via loop 2>/run/said && fail "a loop device although the device waits"
grep -q "waits for a process" /run/said || fail "said: $(cat /run/said)"
attach
[ "$device" = "$before" ] && [ "$(process)" != "$first" ] || fail "not taken over: $device"
# The successor repeats to the next server what is not flushed.
kill -9 "$server"
wait "$server" 2>/dev/null
serve
wait "$writer"
[ "$(wc -l </run/sums)" -eq "$files_per_kill" ] || fail "a write failed over the takeover"
echo 3 >/proc/sys/vm/drop_caches
compare "after the takeover"
dd if=/run/bytes of=/mnt/late bs=1M count=1 conv=fsync 2>/dev/null || fail "cannot write after the takeover"
echo "a killed process has a successor"

# With another server process in between nothing tells what is missing: the device is not taken over, and its users get errors.
second=$(process)
kill -9 "$second"
wait_until has_died "$second"
kill -9 "$server"
wait "$server" 2>/dev/null
serve
byway attach byway://127.0.0.1:7000/v --as disk 2>/run/said && fail "taken over although the server has restarted"
grep -q "waits, and cannot go on: the server has restarted" /run/said || fail "said: $(cat /run/said)"
detach
dd if=/dev/zero of=/mnt/late bs=1M count=4 conv=fsync 2>/dev/null && fail "a device that is gone takes writes"
umount /mnt || fail "cannot unmount a device that is gone"
is_gone "$device" && is_gone "/dev/ublkc${device#/dev/ublkb}" || fail "something of the device stays after the deaths"
attach
# The journal is replayed; errors that the loss of the device caused may have been noted.
e2fsck -p "$device" >/run/e2fsck.log 2>&1
[ $? -le 1 ] || { cat /run/e2fsck.log; fail "e2fsck cannot mend"; }
check "$device" "after the deaths"
detach
echo "without all data nothing goes on"

# A read-only device, and the other way beside it.
attach --read-only
dd if=/dev/zero of="$device" bs=4096 count=1 oflag=direct 2>/dev/null && fail "a read-only device takes writes"
[ "$(cat "/sys/block/${device#/dev/}/ro")" = 1 ] || fail "not read-only"
detach
attach --via loop
case "$device" in /dev/loop*) ;; *) fail "not a loop device: $device" ;; esac
detach
kill "$server"
wait "$server"


# From here on: the kernel's NBD client with a proxy of byway in front of it, where there is no ublk.
rmmod ublk_drv || fail "cannot take ublk away"
serve
byway doctor | grep 'nbd module'
attach
case "$device" in /dev/nbd*) ;; *) fail "not nbd by itself: $device" ;; esac
echo "attached: $device, $(cat "/sys/block/${device#/dev/}/size") sectors, fua $(cat "/sys/block/${device#/dev/}/queue/fua")"
byway attach --list | grep -q "^disk  $device  .*process [0-9]" || fail "not in the list"
grep -q '^VmLck:[^0]*[1-9]' "/proc/$(process)/status" || fail "memory is not locked"
dd if=/run/bytes of="$device" bs=1M count=24 oflag=direct 2>/dev/null || fail "cannot write"
dd if="$device" bs=64K count=384 iflag=direct 2>/dev/null | cmp -n 25165824 - /run/bytes || fail "not the bytes that were written"
cmp -n 25165824 /run/volume /run/bytes || fail "the store has other bytes"
before=$(allocated)
blkdiscard -o 0 -l 16777216 "$device" || fail "cannot discard"
[ "$(allocated)" -eq $((before - 32768)) ] || fail "space before the discard $before, after it $(allocated)"

# The device has the volume's size when that has changed.
has_sectors() { [ "$(cat "/sys/block/${device#/dev/}/size")" = "$1" ]; }
dd if=/dev/zero of=/run/volume bs=1 count=0 seek=160M 2>/dev/null
kill_server
wait_until has_sectors 327680
detach
has_sectors 0 || fail "something of the device stays: $(cat "/sys/block/${device#/dev/}/size") sectors"
echo "read, written, discarded and resized"
works ext4 -F e2fsck -f -n
works xfs -f xfs_repair -n -f

# Its process is killed: users get errors, and nothing of the device stays after a detach.
attach
first=$(process)
kill -9 "$first"
wait_until has_died "$first"
dd if="$device" bs=4096 count=1 iflag=direct of=/dev/null 2>/dev/null && fail "a device without a process reads"
byway attach --list | grep -q "its process has died; byway detach" || fail "the list: $(byway attach --list)"
detach
has_sectors 0 || fail "something of the device stays after the death"
attach
first=$(process)
kill -9 "$first"
wait_until has_died "$first"
attach
detach
attach --read-only
dd if=/dev/zero of="$device" bs=4096 count=1 oflag=direct 2>/dev/null && fail "a read-only device takes writes"
detach
kill "$server"
wait "$server"

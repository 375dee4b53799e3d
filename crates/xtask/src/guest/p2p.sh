# Runs in the guest: staging in the memory of an NVMe controller, and what is said where there is none.
# Settings: disk_mib.

# The disk of the controller with that serial number.
disk() {
    for block in /sys/block/nvme*; do
        [ "$(tr -d ' ' <"$block/device/serial")" = "$1" ] && echo "/dev/${block##*/}"
    done
}

serve() {
    : >/run/ready
    byway serve --nbd tcp://127.0.0.1:10809 --listen tcp://127.0.0.1:4711 --listen shm:///run/shm \
        --http 127.0.0.1:4712 "$@" >/run/ready 2>>/run/server.log &
    server=$!
    wait_until wget -q -O /dev/null http://127.0.0.1:4712/healthz
}

end() {
    kill "$server"
    wait "$server" || fail "the server ended with status $?"
}

# The value of a metric; 0 where there is none.
metric() {
    value=$(wget -q -O - http://127.0.0.1:4712/metrics | grep -F "$1 ") || fail "no metric $1"
    echo "${value##* }"
}

# Bytes in device memory so far: read by the device, written by the device, sent and received by a CPU.
device_bytes() {
    for path in read:device write:device send:cpu receive:cpu; do
        metric "byway_device_memory_bytes_total{path=\"${path%:*}\",by=\"${path#*:}\"}"
    done | tr '\n' ' '
}

# Copies the volume by a command with the file at its end, and compares all of it.
compare() {
    rm -f /run/got
    "$@" /run/got 2>/run/said || { tail -n 1 /run/said; fail "cannot copy: $*"; }
    cmp /run/got /run/expected || fail "other bytes: $*"
}

# Starts a server that must refuse, with these words in what it says.
refused() {
    words=$1
    shift
    byway serve --nbd tcp://127.0.0.1:10809 "$@" >/run/refusal 2>&1 && fail "served: $*"
    grep -q "$words" /run/refusal || { cat /run/refusal; fail "no word of '$words': $*"; }
    echo "refused: $(tail -n 1 /run/refusal)"
}

with=$(disk with)
without=$(disk without)
[ -b "$with" ] && [ -b "$without" ] || fail "there are no two disks"
bytes=$((disk_mib << 20))

byway doctor | grep -A 1 '^device memory'
byway doctor | grep -q '^device memory *ok' || fail "doctor finds no device memory"

# The library by itself.
: >/run/volume
device_memory_check "$with" "$without" /run/volume || fail "device_memory_check ended with status $?"

# Requests that meet in the kernel by chance can still be merged, and qemu takes no command whose data is in its buffer and
# whose list of SGL descriptors is not: it judges by where the list is. Lists of pages it takes.
echo 0 >/sys/module/nvme/parameters/sgl_threshold

# The program: what it serves, to four clients, and what its counters say. At first with less in flight than the pool of
# one loop can hold.
few="--depth 2 --connections 1"
direct='byway_moved_bytes_total{path="read",by="direct"}'
dd if=/dev/urandom of=/run/expected bs=1M count="$disk_mib" 2>/dev/null
dd if=/run/expected of="$with" bs=1M conv=fsync 2>/dev/null || fail "cannot fill the disk"
serve --volume "v=$with,direct" --stage=device
compare byway copy $few nbd://127.0.0.1/v
[ "$(device_bytes)" = "$bytes 0 $bytes 0 " ] || fail "after a copy over NBD: $(device_bytes)"
compare byway copy $few byway://127.0.0.1/v
[ "$(device_bytes)" = "$((2 * bytes)) 0 $((2 * bytes)) 0 " ] || fail "after a copy over byway's wire: $(device_bytes)"
[ "$(metric "$direct")" = "$((2 * bytes))" ] || fail "not all was read direct"
compare byway copy 'byway+shm:///v?socket=/run/shm'
[ "$(device_bytes)" = "$((2 * bytes)) 0 $((2 * bytes)) 0 " ] || fail "what we copy ourselves was staged in the device"
echo "contents right: $disk_mib MiB over NBD, byway's wire and shared memory; counted: $(device_bytes)"
# More in flight than the pool holds: what finds no room there goes through main memory, and each byte is counted once.
before=$(metric "$direct")
compare byway copy --depth 64 nbd://127.0.0.1/v
[ $(($(metric "$direct") - before)) = "$bytes" ] || fail "not all was read direct, or some of it twice"
echo "contents right: with more in flight than the pool holds; counted: $(device_bytes)"
if [ -x /bin/nbdcopy ]; then
    compare nbdcopy --connections=2 --requests=32 --request-size=1048576 nbd://127.0.0.1/v
    echo "contents right: nbdcopy; counted: $(device_bytes)"
fi
dd if=/dev/urandom of=/run/expected bs=1M count="$disk_mib" 2>/dev/null
byway copy --overwrite /run/expected nbd://127.0.0.1/v 2>/run/said || fail "cannot copy to the volume"
echo "written; counted: $(device_bytes)"
case $(device_bytes) in *" 0 "*) fail "nothing was written out of device memory" ;; esac
end
echo 3 >/proc/sys/vm/drop_caches
cmp "$with" /run/expected || fail "other bytes on the disk"
echo "contents right: $disk_mib MiB written over NBD"

# Without io_uring, and a file on the disk instead of the disk.
mkfs.ext4 -q -F "$with" || fail "cannot format"
mount -t ext4 "$with" /mnt || fail "cannot mount"
dd if=/dev/urandom of=/run/expected bs=1M count=4 2>/dev/null
dd if=/run/expected of=/mnt/image bs=1M conv=fsync 2>/dev/null || fail "cannot write to the file system"
for io in uring epoll; do
    serve --volume v=/mnt/image,direct,stage=device --io "$io"
    compare byway copy nbd://127.0.0.1/v
    echo "contents right: a file on ext4, by $io; counted: $(device_bytes)"
    case $(device_bytes) in "0 "*) fail "nothing was read into device memory" ;; esac
    end
done
umount /mnt || fail "cannot unmount"

# Where there is no such memory, or no use for it.
dd if=/dev/zero of=/run/volume bs=1M count=1 2>/dev/null
refused 'no p2pmem: it takes an NVMe controller with a memory buffer (CMB)' --volume "v=$without,direct" --stage=device
refused 'lies on no single disk' --volume v=/run/volume,direct --stage=device
refused 'no volume is direct' --volume v=mem:1M --stage=device
serve --volume "v=$without,direct"
byway info nbd://127.0.0.1/v >/dev/null || fail "a disk without memory of its own is not served"
[ "$(device_bytes)" = "0 0 0 0 " ] || fail "staged in a device that nobody asked for"
end

# The controller is removed under a server: its volume answers errors, the server and its other volume go on.
function=$(basename "$(readlink -f "/sys/block/${with##*/}/device/device")")
serve --volume "v=$with,direct" --volume m=mem:1M --stage=device
# Again and again, until one fails: so one is under way when the controller goes.
(while byway copy --overwrite nbd://127.0.0.1/v /run/read-meanwhile; do :; done >/dev/null 2>/run/error-meanwhile) &
reader=$!
is_reading() { [ "$(metric 'byway_device_memory_bytes_total{path="read",by="device"}')" -gt "$1" ]; }
wait_until is_reading "$bytes"
echo 1 >"/sys/bus/pci/devices/$function/remove"
wait_until [ ! -e "$with" ]
wait "$reader"
echo "removed under a reader: $(tail -n 1 /run/error-meanwhile)"
byway copy nbd://127.0.0.1/v /run/got --overwrite 2>/run/error && fail "read a disk that is not there"
echo "removed before: $(tail -n 1 /run/error)"
byway info nbd://127.0.0.1/m >/dev/null || fail "the other volume is gone too"
end
byway doctor | grep -q '^device memory *missing' || fail "doctor finds memory that is not there"

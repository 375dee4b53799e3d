# Runs in the guest: writes numbered groups of blocks through byway until the power is cut.
# /job/groups holds all groups, one after another; group N goes to place N modulo places.
# Settings: groups, places, group_blocks, acknowledged_at_cut.

mount -t ext4 /dev/vda /mnt || fail "cannot mount"
# Written and synced beforehand, so that no allocation is pending that would make the file system
# push the file's data out by itself.
/bin/dd if=/dev/zero of=/mnt/disk.img bs=4096 count=$((places * group_blocks)) conv=fsync 2>/dev/null ||
    fail "cannot preallocate"
sync
# Nor must the kernel do so because the data is old: only a flush may make it durable.
echo 360000 >/proc/sys/vm/dirty_expire_centisecs
echo 0 >/proc/sys/vm/dirty_writeback_centisecs

byway serve --volume v=/mnt/disk.img --nbd unix:///run/s >/run/ready 2>/run/server.log &
wait_until grep -q '^ready nbd' /run/ready
nbd-client -unix /run/s -N v /dev/nbd0 || fail "cannot attach"
is_attached() { [ "$(cat /sys/block/nbd0/size)" -gt 0 ]; }
wait_until is_attached

# A group is acknowledged when dd ends: it ends after the flush that its fsync becomes.
(
    group=0
    while [ "$group" -lt "$groups" ]; do
        /bin/dd if=/job/groups of=/dev/nbd0 bs=4096 count="$group_blocks" skip=$((group * group_blocks)) \
            seek=$((group % places * group_blocks)) oflag=direct conv=notrunc,fsync 2>/run/dd.log ||
            { cat /run/dd.log; break; }
        echo "acknowledged $group"
        group=$((group + 1))
        echo "$group" >/run/count
    done
    echo "the writer ended before the power did"
) &
echo 0 >/run/count
# A read of the file while it is written may find it empty, which counts as nothing yet.
until [ "$(cat /run/count)" -ge "$acknowledged_at_cut" ] 2>/dev/null; do
    kill -0 $! 2>/dev/null || fail "no writer"
    usleep 1000
done
echo b >/proc/sysrq-trigger
# The reset is not instant.
sleep 60

# Runs in the guest: writes files and moves names through a mount of a share until the power is cut.
# File N has group N of /job/groups. Settings: files, file_bytes, names_at_cut, unmounts (1: nothing is synced but by the unmount, before the cut).

# The journal is written out for an fsync only, and not every 5 s.
mount -t ext4 -o commit=3600 /dev/vda /mnt || fail "cannot mount"
mkdir -p /mnt/share/files /mnt/share/moved /mnt/share/links /run/m
sync
# Nor must the kernel write data because it is old.
echo 360000 >/proc/sys/vm/dirty_expire_centisecs
echo 0 >/proc/sys/vm/dirty_writeback_centisecs

byway serve --share s=/mnt/share,users=squash:0 --listen unix:///run/s >/run/ready 2>/run/server.log &
wait_until grep -q '^ready' /run/ready
byway mount 'byway+unix:///s?socket=/run/s' /run/m >/run/mounted 2>/run/mount.log &
wait_until grep -q '^ready mount' /run/mounted
cd /run/m || fail "no mount"

cut_power() {
    echo b >/proc/sysrq-trigger
    # The reset is not instant.
    sleep 60
}
if [ "$unmounts" = 1 ]; then
    file=0
    while [ "$file" -lt "$files" ]; do
        { /bin/dd if=/job/groups of="files/$file" bs="$file_bytes" count=1 skip="$file" 2>/run/dd.log &&
            mv "files/$file" "moved/$file" && ln -s "target $file" "links/$file"; } || fail "cannot write"
        file=$((file + 1))
    done
    cd / || fail "no root"
    byway umount /run/m 2>/run/umount.log || { cat /run/umount.log; fail "cannot unmount"; }
    cut_power
fi

# dd and sync end after their fsync. busybox has a sync of its own, which would sync everything.
write_file() {
    /bin/dd if=/job/groups of=files/new bs="$file_bytes" count=1 skip="$1" conv=fsync 2>/run/dd.log &&
        mv files/new "files/$1" && /bin/sync files && echo "file $1"
}
move_name() {
    mv "files/$1" "moved/$1" && /bin/sync files moved && ln -s "target $1" "links/$1" && /bin/sync links && echo "name $1"
}
(
    file=0
    while [ "$file" -lt "$files" ] && write_file "$file"; do
        file=$((file + 1))
    done
    name=0
    while [ "$file" = "$files" ] && [ "$name" -lt "$files" ] && move_name "$name"; do
        name=$((name + 1))
        echo "$name" >/run/count
    done
    echo "the writer ended before the power did"
) &
echo 0 >/run/count
# A read of the file while it is written may find it empty, which counts as nothing yet.
until [ "$(cat /run/count)" -ge "$names_at_cut" ] 2>/dev/null; do
    kill -0 $! 2>/dev/null || fail "no writer"
    usleep 1000
done
cut_power

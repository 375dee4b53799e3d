# Runs in the guest after the power came back: says which files and names are lost.
# Settings: files, file_bytes; names, how many were acknowledged.

mount -t ext4 /dev/vda /mnt || fail "cannot mount"
dmesg | grep -q 'EXT4-fs (vda): recovery complete' || fail "no journal was replayed: was the power cut?"
echo "ext4 replayed its journal"
cd /mnt/share || fail "no share"
number=0
while [ "$number" -lt "$files" ]; do
    # The name under way at the cut may have been moved or not.
    place=moved/$number
    [ -e "$place" ] || place=files/$number
    /bin/dd if=/job/groups bs="$file_bytes" count=1 skip="$number" 2>/dev/null | cmp -s - "$place" ||
        echo "lost file $number"
    if [ "$number" -lt "$names" ]; then
        { [ -e "moved/$number" ] && [ ! -e "files/$number" ] && [ "$(readlink "links/$number")" = "target $number" ]; } ||
            echo "lost name $number"
    fi
    number=$((number + 1))
done
echo "looked at all files and names"
cd /
umount /mnt
e2fsck -f -n /dev/vda >/run/e2fsck.log 2>&1 || { cat /run/e2fsck.log; fail "e2fsck finds errors"; }

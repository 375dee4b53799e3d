# A file system in a file of the folder.
truncate -s 32M image
mkfs.ext4 -q -F image
mkdir at
trap 'umount at' EXIT
mount -o loop image at
for n in $(seq 40); do head -c "$((n * 5000))" /dev/zero | tr '\0' "$((n % 10))" > "at/$n"; done
umount at
fsck.ext4 -f -n image > /dev/null 2>&1
mount -o loop,ro image at
cat at/[0-9]* | sha256sum

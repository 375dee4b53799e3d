#!/bin/busybox sh
# The first process of a guest that runs systemd: makes the root, then becomes systemd.
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox --install -s /usr/bin
export PATH=/bin:/usr/bin
stty -F /dev/ttyS1 raw
# A mount of its own, because the root that the kernel unpacked cannot be moved, as units with ProtectSystem= want.
mount -t tmpfs tmpfs /mnt
cp -a /system/. /mnt
mkdir -p /mnt/bin /mnt/dev /mnt/job /mnt/proc /mnt/run /mnt/srv /mnt/sys /mnt/tmp /mnt/root /mnt/var/log
cp /bin/busybox /mnt/bin/busybox
cp /job/script /mnt/job/script
ln -sf dash /mnt/bin/sh
chmod 1777 /mnt/tmp
mount --move /dev /mnt/dev
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin switch_root /mnt /lib/systemd/systemd --unit=test.target --show-status=no --log-level=warning

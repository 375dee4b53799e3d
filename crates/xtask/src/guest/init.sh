#!/bin/busybox sh
# The guest's first process: makes a small system, runs /job/script, and tells its status on the
# second serial port. The first one is the console, of which the host shows all after the mark.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox --install -s /usr/bin
export PATH=/bin:/usr/bin HOME=/run LD_LIBRARY_PATH=/lib/x86_64-linux-gnu
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
ip link set lo up
stty -F /dev/ttyS1 raw
printf '\n@@guest@@\n'
status=0
while read -r module; do
    insmod "$module" || status=120
done </modules/order
if [ "$status" = 0 ]; then
    cd /run
    sh /job/script
    status=$?
fi
echo "status=$status" >/dev/ttyS1
# Without a sync, which would wait for ever where a device is stuck: scripts unmount what matters.
poweroff -f -n

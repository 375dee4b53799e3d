# Runs in both guests: OCFS2 on a volume that each has attached. Node 1 serves it, too. Settings: node, files, counts.
say() { echo "node $node: $*"; }
other=$((3 - node))

serve() {
    : >/run/ready
    byway serve --volume disk=/run/volume --listen "tcp://$1" --allow 127.0.0.1/32 --allow 10.9.0.0/24 --insecure >/run/ready 2>>/run/server.log &
    server=$!
    wait_until grep -q '^ready' /run/ready
}

kill_server() {
    kill -9 "$server"
    wait "$server" 2>/dev/null
}

attach() { device=$(byway attach --shared "byway://$1/disk" --as disk 2>/run/said); }

hostname "node$node"
ip addr add "10.9.0.$node/24" dev eth0
ip link set eth0 up
mkdir -p /etc/ocfs2
ln -s /proc/self/mounts /etc/mtab
mount -t configfs configfs /sys/kernel/config
{
    printf 'cluster:\n\tnode_count = 2\n\tname = byway\n\n'
    for number in 1 2; do
        printf 'node:\n\tip_port = 7777\n\tip_address = 10.9.0.%s\n\tnumber = %s\n\tname = node%s\n\tcluster = byway\n\n' $number $number $number
    done
} >/etc/ocfs2/cluster.conf
echo o2cb >/sys/fs/ocfs2/cluster_stack
echo /bin/ocfs2_hb_ctl >/proc/sys/fs/ocfs2/nm/hb_ctl_path
o2cb register-cluster byway || fail "cannot register the cluster"

# The other node finds the server when the volume is formatted.
if [ "$node" = 1 ]; then
    dd if=/dev/zero of=/run/volume bs=1 count=0 seek=256M 2>/dev/null
    serve 127.0.0.1:7000
    attach 127.0.0.1:7000 || fail "cannot attach: $(cat /run/said)"
    mkfs.ocfs2 -q --force -b 4096 -C 4096 -N 2 -J size=8M --cluster-stack=o2cb --cluster-name=byway "$device" </dev/null ||
        fail "cannot format"
    byway detach disk || fail "cannot detach"
    kill_server
    serve 10.9.0.1:7000
fi
wait_until attach 10.9.0.1:7000
mount.ocfs2 "$device" /mnt || fail "cannot mount"
say "has mounted OCFS2 on $device"

for number in $(seq "$files"); do
    dd if=/dev/urandom of="/mnt/$node-$number" bs=4096 count=$((number * 37 % 64 + 1)) conv=fsync 2>/dev/null || fail "cannot write"
    (cd /mnt && sha256sum "$node-$number") >>"/run/sums"
done
cp /run/sums "/mnt/sums-$node"
: >"/mnt/wrote-$node"
wait_until test -e "/mnt/wrote-$other"
(cd /mnt && sha256sum -c -s "sums-$other") || fail "the other node's files have other contents"
say "has read $(wc -l <"/mnt/sums-$other") files of node $other"

# Each adds to one number, under a lock of the cluster. The server is killed meanwhile.
add() { echo $(($(cat /mnt/count 2>/dev/null || echo 0) + 1)) >/mnt/count; }
for number in $(seq "$counts"); do
    { flock 9 && add; } 9>>/mnt/lock || fail "cannot count"
    if [ "$node" = 1 ] && [ $((number % (counts / 4))) = 0 ]; then
        kill_server
        serve 10.9.0.1:7000
    fi
done
: >"/mnt/counted-$node"
wait_until test -e "/mnt/counted-$other"
[ "$(cat /mnt/count)" = $((2 * counts)) ] || fail "both counted to $(cat /mnt/count), not to $((2 * counts))"
say "both have counted to $(cat /mnt/count)"
# Nobody is waited for in the file system any more.
: >"/mnt/left-$node"
wait_until test -e "/mnt/left-$other"
umount /mnt || fail "cannot unmount"
byway detach disk || fail "cannot detach"
if [ "$node" = 1 ]; then
    # The other node needs the server until its guest has ended.
    is_silent() { ! ping -c 1 -W 1 10.9.0.2; }
    wait_until is_silent
    attach 10.9.0.1:7000 || fail "cannot attach again: $(cat /run/said)"
    fsck.ocfs2 -f -n "$device" </dev/null >/run/fsck.log 2>&1 || { cat /run/fsck.log; fail "fsck.ocfs2 finds errors"; }
    byway detach disk
    say "fsck.ocfs2 finds no errors"
fi

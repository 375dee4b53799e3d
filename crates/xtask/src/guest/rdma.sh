# Runs in the guest: the RDMA provider's checks on soft-RoCE over a network device that goes nowhere, then byway over it.
# Settings: copied_before_kill.
fail() {
    echo "FAILED: $*"
    [ ! -e /run/server.log ] || { echo "--- server:"; tail -n 30 /run/server.log; }
    echo "--- kernel:"
    dmesg | tail -n 20
    exit 1
}

# Waits until a command succeeds, at most 60 s.
wait_until() {
    looks=0
    until "$@" >/dev/null 2>&1; do
        looks=$((looks + 1))
        [ "$looks" -lt 600 ] || fail "waited in vain for: $*"
        sleep 0.1
    done
}

# By their paths: busybox's shell prefers its own.
/bin/ip link add wire0 type dummy || fail "cannot add a network device"
/bin/ip link set wire0 up || fail "cannot start the network device"
/bin/ip addr add 10.1.1.1/24 dev wire0 || fail "cannot give it an address"
/bin/rdma link add rxe0 type rxe netdev wire0 || fail "cannot add an RDMA device"
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/usr/lib/x86_64-linux-gnu
rdma_check 10.1.1.1 || fail "rdma_check ended with status $?"

# byway over it: a volume in a file and one in memory.
node=byway+rdma://10.1.1.1
serve() {
    : >/run/ready
    RUST_LOG=info byway serve --volume file=/run/volume --volume memory=mem:24M --listen rdma://10.1.1.1 --frames 32M \
        --threads 1 --allow 10.1.1.0/24 --insecure --ctl /run/ctl >/run/ready 2>>/run/server.log &
    server=$!
    wait_until grep -q '^ready byway' /run/ready
}

same() {
    [ "$(sha256sum <"$1")" = "$(sha256sum <"$2")" ] || fail "$1 and $2 differ"
    echo "same: $1 and $2"
}

byway doctor | grep '^RDMA' || fail "the doctor says nothing of RDMA"
dd if=/dev/urandom of=/run/source bs=1M count=24 2>/dev/null
truncate -s 24M /run/volume
serve
byway ls "$node/" || fail "cannot list"
byway copy --verify /run/source "$node/memory" || fail "cannot copy into the memory volume"
byway copy --verify /run/source "byway://10.1.1.1/file?via=rdma" || fail "cannot copy into the file"
byway copy --verify "$node/memory" /run/back || fail "cannot copy out of the memory volume"
same /run/source /run/back
byway copy --verify --chunk 64K --depth 32 "$node/file" /run/again || fail "cannot copy out of the file"
same /run/source /run/again
byway copy --verify --overwrite --chunk 4K "$node/file" "$node/memory" || fail "cannot copy between volumes"
for how in "randread 4K" "randwrite 4K" "read 1M" "write 64K" "randrw 16K"; do
    byway bench volume "$node/memory" --rw ${how% *} --bs ${how#* } --seconds 1 || fail "bench $how"
done
byway ctl --socket /run/ctl status || fail "cannot ask the node"
kill "$server"
wait "$server" || fail "the server ended with status $?"
same /run/source /run/volume
echo "rdma.sh: PASSED"

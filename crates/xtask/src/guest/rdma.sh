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

BYWAY_RDMA_ADDRESS=10.1.1.1 conformance rdma --test-threads 1 2>&1 || fail "the fabric's conformance suite"
BYWAY_RDMA_ADDRESS=10.1.1.1 node rdma --test-threads 1 2>&1 || fail "the suite of nodes"

# byway over it: a volume in a file and one in memory.
node=byway+rdma://10.1.1.1
serve() {
    : >/run/ready
    RUST_LOG=info byway serve --volume file=/run/volume --volume memory=mem:24M --listen rdma://10.1.1.1 --frames 32M \
        --threads 2 --allow 10.1.1.0/24 --insecure --ctl /run/ctl --http 127.0.0.1:4712 \
        >/run/ready 2>>/run/server.log &
    server=$!
    wait_until grep -q '^ready byway' /run/ready
}

same() {
    [ "$(sha256sum <"$1")" = "$(sha256sum <"$2")" ] || fail "$1 and $2 differ"
    echo "same: $1 and $2"
}

# Copies; what is said meanwhile is told if it fails.
copy() {
    byway copy --verify "$@" >/run/copied 2>/run/copy.log || { tail -n 3 /run/copy.log; fail "copy $*"; }
    echo "copy $*: $(cat /run/copied)"
}

metric() { wget -q -O - http://127.0.0.1:4712/metrics | sed -n "s/^$1 //p"; }
nobody_is_there() { byway ctl --socket /run/ctl status | grep -q '^door byway: 0 connections'; }
# A session takes frames for its messages: with the last one all of them are back.
all_is_back() { [ "$(metric byway_frames_free_bytes)" = "$(metric byway_frames_bytes)" ]; }
has_come() { [ "$(($(stat -c %b /run/volume) * 512))" -ge "$copied_before_kill" ]; }

byway doctor | grep '^RDMA' || fail "the doctor says nothing of RDMA"
dd if=/dev/urandom of=/run/source bs=1M count=24 2>/dev/null
truncate -s 24M /run/volume
serve
byway ls "$node/" || fail "cannot list"
byway ls byway+rdma://10.1.1.1:9/ 2>/run/nobody && fail "somebody listens at port 9"
grep -i 'refused' /run/nobody || fail "nobody listens, which is told as: $(cat /run/nobody)"
copy /run/source "$node/memory"
copy /run/source "byway://10.1.1.1/file?via=rdma"
copy "$node/memory" /run/back
same /run/source /run/back
copy --chunk 64K --depth 32 "$node/file" /run/again
same /run/source /run/again
rm /run/back /run/again
copy --overwrite --chunk 16K "$node/file" "$node/memory"
for how in "randread 4K" "randwrite 4K" "read 1M" "write 64K" "randrw 16K"; do
    byway bench volume "$node/memory" --rw ${how% *} --bs ${how#* } --seconds 1 >/run/bench 2>&1 || {
        cat /run/bench
        fail "bench $how"
    }
    echo "bench $how: $(head -n 1 /run/bench)"
done
wait_until nobody_is_there
wait_until all_is_back
echo "all frames are back: $(metric byway_frames_bytes)"

# A client that dies leaves nothing behind.
byway copy --overwrite /run/source "$node/memory" >/dev/null 2>&1 &
client=$!
wait_until sh -c "byway ctl --socket /run/ctl status | grep -q '^door byway: [1-9]'"
kill -9 "$client"
wait_until nobody_is_there
wait_until all_is_back
echo "killed a client: all frames are back"

# A server that dies under a copy: the copy goes on with the next one.
kill "$server"
wait "$server" || fail "the server ended with status $?"
same /run/source /run/volume
rm /run/volume
truncate -s 24M /run/volume
serve
byway copy --verify /run/source "$node/file" >/run/copied 2>/run/copy.log &
client=$!
wait_until has_come
kill -9 "$server"
echo "killed the server after $(($(stat -c %b /run/volume) * 512)) bytes"
[ ! -s /run/copied ] || fail "the copy had ended before"
serve
wait "$client" || { tail -n 3 /run/copy.log; fail "the copy ended with status $?"; }
echo "the copy went on: $(cat /run/copied)"
same /run/source /run/volume
wait_until nobody_is_there
wait_until all_is_back
kill "$server"
wait "$server" || fail "the server ended with status $?"
grep -v 'INFO' /run/server.log | tail -n 5
echo "rdma.sh: PASSED"

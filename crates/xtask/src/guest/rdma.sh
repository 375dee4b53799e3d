# Runs in the guest: the RDMA provider's checks on soft-RoCE over a network device that goes nowhere, the suites of the fabric
# and the service, then byway over it.
# Settings: copied_before_kill; part, the number of the only one that runs, or 0 for all.

runs() { [ "$part" = 0 ] || [ "$part" = "$1" ]; }

# By their paths: busybox's shell prefers its own.
/bin/ip link add wire0 type dummy || fail "cannot add a network device"
/bin/ip link set wire0 up || fail "cannot start the network device"
/bin/ip addr add 10.1.1.1/24 dev wire0 || fail "cannot give it an address"
/bin/rdma link add rxe0 type rxe netdev wire0 || fail "cannot add an RDMA device"
# Another device: librdmacm lets go of a removed one when it lists them, and does not look at a list that is empty.
/bin/ip link add wire1 type dummy || fail "cannot add a second network device"
/bin/ip link set wire1 up || fail "cannot start the second network device"
/bin/rdma link add rxe1 type rxe netdev wire1 || fail "cannot add a second RDMA device"
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/usr/lib/x86_64-linux-gnu
export BYWAY_RDMA_ADDRESS=10.1.1.1 BYWAY_TEST_FOLDER=/run

if runs 1; then
    rdma_check 10.1.1.1 || fail "rdma_check ended with status $?"
fi
if runs 2; then
    conformance rdma --test-threads 1 2>&1 || fail "the fabric's conformance suite"
    node rdma --test-threads 1 2>&1 || fail "the suite of nodes"
    two_nodes rdma --test-threads 1 2>&1 || fail "the suite of calls between two nodes"
    three_nodes rdma --test-threads 1 2>&1 || fail "the suite of calls that are delegated"
fi
if runs 3; then
    # All wires: there is no shorter way to say which tests have RDMA among theirs.
    native --test-threads 1 2>&1 || fail "the service's suite native"
    loops over_rdma --test-threads 1 2>&1 || fail "the service's suite loops"
    tls over_rdma --test-threads 1 2>&1 || fail "the service's suite tls"
    hostile over_rdma --test-threads 1 2>&1 || fail "the service's suite hostile"
    library over_each_wire --test-threads 1 2>&1 || fail "the service's suite library"
fi

# byway over it: a volume in a file and one in memory.
node=byway+rdma://10.1.1.1
log=info,byway_fabric=debug
serve() {
    : >/run/ready
    RUST_LOG=$log byway serve --volume file=/run/volume --volume memory=mem:24M --listen rdma://10.1.1.1 --buffer-memory 32M \
        --threads 2 --allow 10.1.1.0/24 --insecure --control-socket /run/ctl --http 127.0.0.1:4712 \
        >/run/ready 2>>/run/server.log &
    server=$!
    wait_until grep -q '^ready byway' /run/ready
}

end_server() {
    kill "$server"
    wait "$server" || fail "the server ended with status $?"
}

same() {
    [ "$(sha256sum <"$1")" = "$(sha256sum <"$2")" ] || fail "$1 and $2 differ"
    echo "same: $1 and $2"
}

# The device's own counts. Packets that had to be sent again show as duplicate_request, out_of_seq_request, rcvd_seq_err,
# send_rnr_err or completer_retry_err; ack_deferred is how often the completer was scheduled.
counted() {
    for counter in /sys/class/infiniband/rxe0/ports/1/hw_counters/*; do
        case ${counter##*/} in
        lifespan | link_downed) ;;
        *) echo "${counter##*/} $(cat "$counter")" ;;
        esac
    done
}

# Tells what the device has counted since counted() was kept in a file, and which sessions have ended for another reason than
# that their work was done: transfers that were begun again show here.
tell_counted() {
    counted >/run/counted.after
    echo "counted:$(awk 'NR == FNR { before[$1] = $2; next } $2 != before[$1] { printf " %s %d", $1, $2 - before[$1] }' \
        "$1" /run/counted.after)"
    grep -h 'session ended' /run/copy.log | grep -v 'reason=closed'
}

# Copies; what is said meanwhile is told if it fails.
copy() {
    counted >/run/counted
    RUST_LOG=$log byway copy --verify "$@" >/run/copied 2>/run/copy.log || fail "copy $*"
    echo "copy $*: $(cat /run/copied)"
    tell_counted /run/counted
}

# A copy in the background, which goes on when something has happened to it on its way.
begin_copy() {
    RUST_LOG=$log byway copy --overwrite --verify /run/source "$node/file" >/run/copied 2>/run/copy.log &
    client=$!
}

end_copy() {
    wait "$client" || fail "the copy ended with status $?"
    echo "the copy went on: $(cat /run/copied)"
    same /run/source /run/volume
}

# The kernel waits, and takes no signal, until all who have the device open let go of it.
remove_device() {
    /bin/rdma link delete rxe0 &
    removing=$!
    wait_until is_removed
    echo "removed the device"
}
is_removed() { ! [ -e /proc/$removing/status ] || grep -q '^State:.Z' /proc/$removing/status; }

metric() { wget -q -O - http://127.0.0.1:4712/metrics | sed -n "s/^$1 //p"; }
nobody_is_there() { byway ctl --control-socket /run/ctl status | grep -q '^frontend byway: 0 connections'; }
somebody_is_there() { byway ctl --control-socket /run/ctl status | grep -q '^frontend byway: [1-9]'; }
# A session takes frames for its messages: with the last one all of them are back.
all_is_back() { [ "$(metric byway_buffer_memory_free_bytes)" = "$(metric byway_buffer_memory_bytes)" ]; }
nothing_is_left() {
    wait_until nobody_is_there
    wait_until all_is_back
    echo "$1: nobody is there, all frames are back: $(metric byway_buffer_memory_bytes)"
}
# The device does nothing for a second: not even what waits for its turn.
is_quiet() {
    counted >/run/before
    sleep 1
    counted | cmp -s - /run/before
}
has_come() { [ "$(($(stat -c %b /run/volume) * 512))" -ge "$copied_before_kill" ]; }
empty_volume() {
    rm -f /run/volume
    truncate -s 24M /run/volume
}

dd if=/dev/urandom of=/run/source bs=1M count=24 2>/dev/null

if runs 4; then
    byway doctor | grep '^RDMA' || fail "the doctor says nothing of RDMA"
    empty_volume
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
        byway bench volume "$node/memory" --rw ${how% *} --bs ${how#* } --seconds 1 --overwrite >/run/bench 2>&1 || {
            cat /run/bench
            fail "bench $how"
        }
        echo "bench $how: $(head -n 1 /run/bench)"
    done
    volume rdma://10.1.1.1:4711 memory || fail "the C example of a volume"
    nothing_is_left "after copies and benchmarks"
    end_server
    same /run/source /run/volume
fi

if runs 5; then
    empty_volume
    serve

    # A client that dies leaves nothing behind.
    byway copy --overwrite /run/source "$node/memory" >/dev/null 2>&1 &
    client=$!
    wait_until somebody_is_there
    kill -9 "$client"
    nothing_is_left "killed a client"

    # A server that dies under a copy: the copy goes on with the next one.
    begin_copy
    wait_until has_come
    kill -9 "$server"
    echo "killed the server after $(($(stat -c %b /run/volume) * 512)) bytes"
    [ ! -s /run/copied ] || fail "the copy had ended before"
    serve
    end_copy
    nothing_is_left "killed the server"

    # The device gets another address under a copy: connections that were made with the old one break, and the copy goes on by
    # new ones.
    empty_volume
    end_server
    serve
    counted >/run/counted
    begin_copy
    wait_until has_come
    /bin/ip link set wire0 address 02:00:00:00:00:01 || fail "cannot change the device's address"
    [ ! -s /run/copied ] || fail "the copy had ended before"
    end_copy
    tell_counted /run/counted
    [ "$(grep -c 'session ended' /run/copy.log)" -gt 1 ] || fail "no connection broke"
    nothing_is_left "changed the device's address"

    # A link that goes down under a copy: both ends notice and let go of everything. Without a way soft-RoCE's queue pairs fail
    # at once, also that of the connection manager, which stays so: with the link comes a new device.
    empty_volume
    end_server
    serve
    begin_copy
    wait_until has_come
    /bin/ip link set wire0 down || fail "cannot take the link down"
    [ ! -s /run/copied ] || fail "the copy had ended before"
    nothing_is_left "took the link down"
    grep -h 'session ended' /run/server.log | tail -n 1
    /bin/ip link set wire0 up || fail "cannot bring the link up"
    remove_device
    /bin/rdma link add rxe0 type rxe netdev wire0 || fail "cannot add the RDMA device after its link was down"
    end_copy
    nothing_is_left "brought the link up"

    # A client that is gone without a word while nothing is under way to it: the server's probe notices. It is stopped first, so
    # that it says nothing more, and killed when nothing gets through.
    empty_volume
    end_server
    serve
    begin_copy
    wait_until has_come
    kill -STOP "$client"
    wait_until is_quiet
    somebody_is_there || fail "the session of a stopped client ended"
    /bin/ip link set wire0 down || fail "cannot take the link down"
    kill -9 "$client"
    nothing_is_left "took the link to an idle client down"
    grep -h 'session ended' /run/server.log | tail -n 1
    /bin/ip link set wire0 up || fail "cannot bring the link up"
    end_server
    remove_device
    /bin/rdma link add rxe0 type rxe netdev wire0 || fail "cannot add the RDMA device after its link was down"
    serve

    # The device is removed under a copy, and comes back.
    empty_volume
    end_server
    serve
    begin_copy
    wait_until has_come
    remove_device
    [ ! -s /run/copied ] || fail "the copy had ended before"
    nothing_is_left "removed the device"
    grep -h 'was removed' /run/server.log | tail -n 2
    grep -h 'session ended' /run/copy.log | tail -n 1
    /bin/rdma link add rxe0 type rxe netdev wire0 || fail "cannot add the RDMA device again"
    end_copy
    nothing_is_left "added the device again"

    # Who may not lock so much memory is told what to raise, at either end.
    printf 'nobody:x:65534:65534::/run:/bin/sh\n' >/etc/passwd
    chmod 666 /dev/infiniband/*
    mkdir -m 777 /run/limited
    su nobody -c "ulimit -l 64; HOME=/run/limited byway ls $node/" >/run/limited/list 2>&1 && fail "listed without memory"
    grep 'memory lock limit (ulimit -l' /run/limited/list || fail "a client without memory is told: $(cat /run/limited/list)"
    su nobody -c "ulimit -l 64; exec byway serve --volume memory=mem:1M --listen rdma://10.1.1.1:4713 --buffer-memory 8M \
        --allow 10.1.1.0/24 --insecure" >/run/limited/ready 2>/run/limited/log &
    limited=$!
    wait_until grep -q '^ready byway' /run/limited/ready
    byway ls byway+rdma://10.1.1.1:4713/ >/run/limited/list 2>&1 && fail "served without memory"
    grep 'memory lock limit (ulimit -l' /run/limited/log || fail "a server without memory says: $(cat /run/limited/log)"
    kill "$limited"
    wait "$limited" || fail "the server without memory ended with status $?"
    byway ls "$node/" >/dev/null || fail "the other server does not serve any more"
    nothing_is_left "refused memory"
    end_server
    grep -h 'WARN\|ERROR' /run/server.log | tail -n 5
fi

if runs 6; then
    # Processes that share memory, on two hosts that are this one: the command that starts them leaves the host's name out.
    printf '#!/bin/sh\nshift\nexec "$@"\n' >/run/here
    chmod +x /run/here
    for consistency in sc rc; do
        TMPDIR=/run byway dsm run -n 4 --hosts rdma://10.1.1.1:7000,rdma://10.1.1.1:7100 --rsh /run/here --memory 64M \
            --keep-alive 60 --consistency $consistency -- sor 64 4 >/run/job 2>&1 || fail "a job with $consistency: $(cat /run/job)"
        grep 'grid of 64 x 64 right' /run/job || fail "a job with $consistency: $(cat /run/job)"
    done
fi
echo "rdma.sh: PASSED"

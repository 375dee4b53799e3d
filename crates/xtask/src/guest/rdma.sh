# Runs in the guest: the RDMA provider's checks on soft-RoCE over a network device that goes nowhere.
fail() {
    echo "FAILED: $*"
    dmesg | tail -n 20
    exit 1
}

# By their paths: busybox's shell prefers its own.
/bin/ip link add wire0 type dummy || fail "cannot add a network device"
/bin/ip link set wire0 up || fail "cannot start the network device"
/bin/ip addr add 10.1.1.1/24 dev wire0 || fail "cannot give it an address"
/bin/rdma link add rxe0 type rxe netdev wire0 || fail "cannot add an RDMA device"
LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/usr/lib/x86_64-linux-gnu rdma_check 10.1.1.1 || fail "rdma_check ended with status $?"

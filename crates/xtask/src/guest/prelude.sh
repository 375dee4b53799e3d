# What all scripts of guests have: it stands before each.
# Ends the script with what is said, and what byway and the kernel have said.
fail() {
    echo "FAILED: $*"
    for log in server copy mount; do
        [ ! -e "/run/$log.log" ] || { echo "--- $log:"; tail -n 100 "/run/$log.log"; }
    done
    echo "--- kernel:"
    dmesg | grep -v drop_caches | tail -n 20
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

# Runs in the guest, beside systemd: the node as a service, from its first start to its last stop.

# The service's own words, where the prelude looks for logs.
note_log() { journalctl --no-pager --output=cat --unit=byway >/run/server.log 2>&1; }
must() { "$@" || { note_log; systemctl --no-pager status byway; fail "$*"; }; }
must_not() { if "$@"; then note_log; fail "this was to fail: $*"; fi; }
says() { note_log; grep -q "$1" /run/server.log || fail "the log does not say: $1"; }
property() { systemctl show --value --property="$1" byway; }
status_of() { sed -n "s/^$1:[[:space:]]*//p" "/proc/$(property MainPID)/status"; }
as_stranger() { setpriv --reuid=2000 --regid=2000 "$@"; }

systemctl --version | head -n 1
systemd-sysusers || fail "byway.sysusers is refused"
grep -q '^byway:' /etc/passwd || fail "byway.sysusers makes no user"
systemd-analyze --man=no verify /usr/lib/systemd/system/byway.service || fail "systemd-analyze verify"

truncate -s 16M /srv/scratch.img /srv/more.img
chmod 600 /srv/scratch.img /srv/more.img
sed -i 's|^#\(.*unix:///run/byway/nbd.sock\)|\1|' /etc/byway/byway.toml
grep -q '^ .*mode=0660,group=disk' /etc/byway/byway.toml || fail "the sample has no socket of a group"

must systemctl start byway
[ "$(property Type)" = notify ] || fail "the unit is of type $(property Type)"
[ "$(property ActiveState)" = active ] || fail "not active: $(property ActiveState)"
says 'landlock=Full'
says 'event loops.*uring'
[ "$(status_of Seccomp)" = 2 ] || fail "no seccomp filter"
[ "$(status_of NoNewPrivs)" = 1 ] || fail "it may gain privileges"
[ "$(status_of Uid | cut -f 1)" = "$(id -u byway)" ] || fail "it has not become byway: $(status_of Uid)"
[ "$(status_of CapEff)" = 0000000000000000 ] || fail "it has kept capabilities: $(status_of CapEff)"
echo "started: $(property StatusText)"

dd if=/dev/urandom of=/run/image bs=1M count=16 2>/dev/null
must byway copy --overwrite --verify /run/image byway://127.0.0.1/scratch
must cmp /run/image /srv/scratch.img
must byway copy --verify nbd://127.0.0.1/scratch /run/out
must cmp /run/image /run/out
# Read once more, from memory now: mapped, with mincore.
rm /run/out
must byway copy byway://127.0.0.1/scratch /run/out
must cmp /run/image /run/out
echo "copied by both wires"

socket=/run/byway/nbd.sock
[ "$(stat -c '%a %U %G' $socket)" = "660 root disk" ] || fail "the socket is $(stat -c '%a %U %G' $socket)"
must as_stranger --groups=6 byway info "nbd+unix:///scratch?socket=$socket"
must_not as_stranger --clear-groups byway info "nbd+unix:///scratch?socket=$socket"
echo "the socket is its group's"

sed -i 's|^volumes = \[|&"more=/srv/more.img",|' /etc/byway/byway.toml
must systemctl reload byway
byway ls byway://127.0.0.1 | grep -q more || fail "the volume that a reload added is not listed"
sed 's|^volumes = \[|&"broken=/srv/missing.img",|' /etc/byway/byway.toml >/run/broken.toml
cp /etc/byway/byway.toml /run/good.toml
cp /run/broken.toml /etc/byway/byway.toml
must_not systemctl reload byway
cp /run/good.toml /etc/byway/byway.toml
[ "$(property ActiveState)" = active ] || fail "a refused reload ended the node"
must byway info byway://127.0.0.1/more
echo "reloaded: $(property StatusText)"

before=$(property MainPID)
kill -9 "$before"
restarted() { [ "$(property ActiveState)" = active ] && [ "$(property MainPID)" != "$before" ]; }
wait_until restarted
must byway info byway://127.0.0.1/scratch
echo "restarted after a kill"

must systemctl stop byway
[ "$(property ActiveState) $(property Result)" = "inactive success" ] || fail "stopped: $(property ActiveState) $(property Result)"
[ ! -e /run/byway ] || fail "left behind: $(ls /run/byway)"
echo "stopped"

# NBD by a socket that systemd opens: the first client starts the node.
must systemctl start byway-nbd.socket
must byway info "nbd+unix:///scratch?socket=/run/byway-nbd.sock"
[ "$(property ActiveState)" = active ] || fail "the socket has not started the node"
must systemctl stop byway-nbd.socket byway
note_log
! grep -q 'SECCOMP\|Bad system call' /run/server.log || fail "a system call was refused"

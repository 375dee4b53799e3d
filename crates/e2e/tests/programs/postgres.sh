# A database that is killed while it works has done each transaction whole or not at all; all its pages have their checksums.
PATH=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1):$PATH
export PGHOST=$SOCKETS PGUSER=user PGDATABASE=postgres
initdb -D data -A trust -U user --no-instructions -k > /dev/null
server=none
start() {
    # It does not start as long as a child of a killed server lives.
    until pg_isready -q; do
        if ! kill -0 "$server" 2> /dev/null; then
            postgres -D data -c listen_addresses= -c unix_socket_directories="$SOCKETS" -c shared_buffers=16MB 2>> log &
            server=$!
        fi
        sleep 0.1
    done
}
trap 'kill "$server"' EXIT
start
pgbench -i -q 2> /dev/null
pgbench -c 4 -t 1000000 > /dev/null 2>&1 &
bench=$!
until [ "$(psql -At -c 'select count(*) >= 300 from pgbench_history')" = t ]; do sleep 0.1; done
kill -9 "$server"
# Both end with an error.
if wait "$server"; then exit 1; fi
if wait "$bench"; then exit 1; fi
start
psql -At <<'SQL'
select count(*) > 0, sum(delta) = (select sum(abalance) from pgbench_accounts),
    sum(delta) = (select sum(tbalance) from pgbench_tellers) from pgbench_history;
checkpoint;
SQL
kill "$server"
wait "$server"
trap - EXIT
pg_checksums -c -D data | grep Bad

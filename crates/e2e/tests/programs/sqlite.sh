# Three processes write at once, in each of the ways in which sqlite keeps a journal.
for mode in delete truncate persist wal; do
    sqlite3 "$mode.db" "pragma journal_mode=$mode; create table t(n integer primary key, who)"
    writers=()
    for who in 1 2 3; do
        (for _ in $(seq $((MANY / 2))); do
            sqlite3 -cmd '.timeout 60000' "$mode.db" \
                "begin immediate; insert into t(who) values($who); insert into t(who) values(-$who); commit"
        done) &
        writers+=($!)
    done
    for writer in "${writers[@]}"; do wait "$writer"; done
    sqlite3 "$mode.db" 'pragma integrity_check; select who, count(*) from t group by who; pragma wal_checkpoint(truncate)'
done

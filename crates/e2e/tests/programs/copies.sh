# A tree with links, holes, times, extended attributes and ACLs, copied by cp, rsync and tar.
mkdir tree
for d in $(seq "$MANY"); do
    mkdir -p "tree/$d/e"
    for n in $(seq "$MANY"); do echo "$d $n" > "tree/$d/$n"; done
    ln -s ../1 "tree/$d/e/link"
    ln "tree/$d/1" "tree/$d/e/hard"
done
mkfifo tree/fifo
head -c 3000000 /dev/zero | tr '\0' x > tree/large
truncate -s 10000000 tree/holes
printf y >> tree/holes
chmod 640 tree/1/2
setfattr -n user.color -v red tree/1/3
setfacl -m u:1234:rw tree/1/4
setfacl -d -m g:77:rx tree/2
# The default ACL of a folder counts instead of the umask.
(umask 077; mkdir tree/2/private tree/3/private; touch tree/2/new tree/3/new)
find tree -exec touch -h -d '2001-02-03 04:05:06.789 UTC' {} +

cp -a tree cp
rsync -aHAXS tree/ rsync/
tar cf all.tar --acls --xattrs tree
mkdir tar
tar xf all.tar -C tar --acls --xattrs
# rsync names whatever differs.
for copy in cp rsync tar/tree; do
    rsync -aHAXn --delete --checksum --itemize-changes tree/ "$copy/"
    getfattr -d "$copy/1/3"
    getfacl -c "$copy/1/4" "$copy/2"
    find "$copy" -printf '%P %y %m %n %l\n' | sort
    find "$copy" ! -type d -printf '%P %s %T@\n' | sort
done
test "$(stat -c %b rsync/holes)" -lt 100
ls -lR --time-style=full-iso tree | grep -v '^total'

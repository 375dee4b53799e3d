# vim writes a new file and renames it, or keeps the old one's inode; with a backup beside it.
printf 'one\ntwo\n' > text
chmod 640 text
setfattr -n user.color -v red text
for copy in no yes auto; do
    vim -N -es -u NONE -i NONE -c "set backup backupskip= backupdir=. backupcopy=$copy backupext=.$copy" \
        -c '%s/two/two two/' -c wq text < /dev/null
    stat -c '%n %a %s' text "text.$copy"
    getfattr -d text
    cat text "text.$copy"
done
ls -A

# A watcher of a folder is told of changes that are made through the same mount.
mkdir watched
inotifywait -q -m --format '%e %f' watched > events &
watcher=$!
trap 'kill "$watcher"' EXIT
until [ -s events ]; do touch watched/probe; sleep 0.01; done
echo text > watched/file
mv watched/file watched/moved
rm watched/moved
touch watched/last
until grep -q 'CREATE last' events; do sleep 0.01; done
grep -v -e probe -e last events

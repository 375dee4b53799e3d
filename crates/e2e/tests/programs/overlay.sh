# overlayfs with the folder below, and what is changed in memory.
mkdir -p lower/folder/inner at memory
echo low > lower/changed
echo low > lower/removed
trap 'umount at; umount memory' EXIT
mount -t tmpfs tmpfs memory
mkdir memory/upper memory/work
mount -t overlay -o "lowerdir=$PWD/lower,upperdir=$PWD/memory/upper,workdir=$PWD/memory/work" overlay at
echo more >> at/changed
rm at/removed
mv at/folder/inner at/moved
(cd at; find . -printf '%P %y %m\n' | sort)
cat at/changed lower/changed
(cd lower; find . -printf '%P %y %m\n' | sort)

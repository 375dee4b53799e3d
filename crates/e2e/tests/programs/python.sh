# A virtual environment, modules with their compiled files, and a file mapped twice.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
python3 -m venv --without-pip environment
mkdir package
echo 'def five(): return 5' > package/module.py
environment/bin/python -c 'import sys, package.module; print(sys.prefix == sys.base_prefix, package.module.five())'
ls package/__pycache__
environment/bin/python - <<'SCRIPT'
import mmap, os
file = os.open('mapped', os.O_RDWR | os.O_CREAT)
os.truncate(file, 100000)
one, two = mmap.mmap(file, 100000), mmap.mmap(os.open('mapped', os.O_RDWR), 100000)
one[5000:5005] = b'hello'
print(two[5000:5005])
one.flush()
print(os.pread(file, 5, 5000))
os.pwrite(file, b'J', 5000)
print(one[5000:5005], two[5000:5005])
private = mmap.mmap(file, 100000, flags=mmap.MAP_PRIVATE)
private[0:3] = b'abc'
print(os.pread(file, 3, 0))
os.ftruncate(file, 4096)
print(os.fstat(file).st_size, os.path.getsize('mapped'))
SCRIPT

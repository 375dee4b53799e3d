# Programs, scripts and libraries are run from the folder that they were built in. A running program is not written to.
cp "$(command -v sleep)" sleeper
./sleeper 100 &
sleeper=$!
trap 'kill "$sleeper"' EXIT
until [ "$(readlink "/proc/$sleeper/exe")" = "$PWD/sleeper" ]; do sleep 0.01; done
if echo text 2>/dev/null > sleeper; then echo 'a running program was opened for writing'; exit 1; fi
printf '#!/bin/sh\necho script $1\n' > script
chmod +x script
./script one
echo 'int seven(void) { return 7; }' > seven.c
echo 'int seven(void); int main(void) { return seven() == 7 ? 0 : 1; }' > main.c
cc -shared -fPIC seven.c -o libseven.so
cc main.c -o main -L. -lseven -Wl,-rpath,.
./main

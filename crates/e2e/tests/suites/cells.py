# Reads and changes cells of a file, each under a lock of its bytes, and checks that no cell is torn or older than the lock allows.
# Prints how many changes it has made. Arguments: file, number of cells, seed, rounds.
import fcntl, os, random, struct, sys

path, (cells, seed, rounds) = sys.argv[1], map(int, sys.argv[2:])
LEN = 5000  # Cells do not begin at pages.
chance = random.Random(seed)
seen = [0] * cells
made = 0


def cell(number, changes):
    return (struct.pack('<QQ', changes, number) * (LEN // 16 + 1))[:LEN]


for _ in range(rounds):
    count = chance.randint(1, 3)
    first = chance.randrange(cells - count)
    is_change = chance.random() < 0.5
    # Opened each time: a mount with leases keeps data while no program has the file open for writing.
    file = os.open(path, os.O_RDWR if is_change else os.O_RDONLY)
    fcntl.lockf(file, fcntl.LOCK_EX if is_change else fcntl.LOCK_SH, count * LEN, first * LEN)
    data = os.pread(file, count * LEN, first * LEN)
    for at in range(count):
        own, number = data[at * LEN : (at + 1) * LEN], first + at
        changes = struct.unpack('<Q', own[:8])[0]
        assert own == cell(number, changes), f'cell {number} is torn at {changes} changes'
        assert changes >= seen[number], f'cell {number} has {changes} changes after {seen[number]}'
        if is_change:
            changes += 1
            os.pwrite(file, cell(number, changes), number * LEN)
            made += 1
        seen[number] = changes
    fcntl.lockf(file, fcntl.LOCK_UN, count * LEN, first * LEN)
    os.close(file)
print(made)

# Maps a file of numbers and reads it again and again. None of its numbers may go back: each write makes all of them higher. A line on
# standard input has the last number that was written: all become this one. Prints a line when it begins, then how often it looked, and how
# many states it saw.
import mmap, select, struct, sys, time

with open(sys.argv[1], 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
words = struct.Struct(f'<{len(mapped) // 8}Q')
seen, last, limit = words.unpack(mapped[:words.size]), None, None
looks = states = 1
print('looking', flush=True)
while last is None or any(number != last for number in seen):
    now = words.unpack(mapped[:words.size])
    looks += 1
    if now != seen:
        back = [(old, new) for old, new in zip(seen, now) if new < old]
        assert not back, f'numbers went back: {back[:5]}'
        seen, states = now, states + 1
    if last is not None:
        assert time.monotonic() < limit, f'{min(seen)} to {max(seen)} in place of {last}, which was the last to be written'
        time.sleep(0.01)
    elif select.select([sys.stdin], [], [], 0)[0]:
        last, limit = int(sys.stdin.readline()), time.monotonic() + 60
print(looks, states)

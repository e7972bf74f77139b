// Makes transfers of a part of a file fail; it is preloaded (LD_PRELOAD) and controlled through ctypes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

enum { kShort = -1 };  // instead of an errno: the transfer is incomplete

typedef ssize_t (*Call)(int, void*, size_t, off_t);

static atomic_int writes = -1;  // the direction that is counted (1: writes); -1: none
static atomic_long begins, ends, first, times, code;
static atomic_long seen;  // transfers of that direction in [begins, ends)

// Begins faults: of the transfers in [begin, end) of the file, `count` ones fail, beginning with number `from`.
void fault(int direction, long begin, long end, long from, long count, long fault_code) {
  begins = begin;
  ends = end;
  first = from;
  times = count;
  code = fault_code;
  seen = 0;
  writes = direction;
}

// Ends faults, and returns the number of transfers since they began.
long end_of_faults(void) {
  writes = -1;
  return seen;
}

static ssize_t transfer(const char* name, int direction, int file, void* memory, size_t bytes, off_t offset) {
  const Call call = (Call)dlsym(RTLD_NEXT, name);
  if (direction == writes && begins <= offset && offset < ends) {
    const long number = seen++ - first;
    if (0 <= number && number < times) {
      if (code != kShort) {
        errno = (int)code;
        return -1;
      }
      const ssize_t done = call(file, memory, bytes, offset);
      return done > 5000 ? 5000 : done > 0 ? done - 1 : done;  // ends inside a page
    }
  }
  return call(file, memory, bytes, offset);
}

ssize_t pread(int file, void* memory, size_t bytes, off_t offset) {
  return transfer("pread", 0, file, memory, bytes, offset);
}

ssize_t pwrite(int file, const void* memory, size_t bytes, off_t offset) {
  return transfer("pwrite", 1, file, (void*)memory, bytes, offset);
}

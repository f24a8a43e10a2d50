// Preloaded: the wall clock of a process is off by the seconds that a file begins with (int64).
//
// MK_TEST_CLOCK names the file, which may change at any time. CLOCK_MONOTONIC is as it was.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t* shift_s;

__attribute__((constructor)) static void map_shift(void) {
  const char* path = getenv("MK_TEST_CLOCK");
  const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) shift_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  const int error = (int)syscall(SYS_clock_gettime, clock, now);
  const int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (error == 0 && is_wall && shift_s) now->tv_sec += *shift_s;
  return error;
}

int gettimeofday(struct timeval* now, void* zone) {
  const int error = (int)syscall(SYS_gettimeofday, now, zone);
  if (error == 0 && shift_s) now->tv_sec += *shift_s;
  return error;
}

time_t time(time_t* result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

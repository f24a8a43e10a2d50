// A loop of memcpy, run after run: what kv_moves.py compares with, on the CPU.
//
// Row i of `rows` says where a run goes and where it is. kv_moves.py compiles this when it runs.

#include <stdint.h>
#include <string.h>

void memcpy_loop(const int64_t (*rows)[2], int64_t num_rows, int64_t run_bytes) {
  for (int64_t i = 0; i < num_rows; ++i) {
    memcpy((void*)(intptr_t)rows[i][0], (const void*)(intptr_t)rows[i][1], (size_t)run_bytes);
  }
}

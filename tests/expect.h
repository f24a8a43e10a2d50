#pragma once

#include <cstdio>

inline int& failures() {
  static int count = 0;
  return count;
}

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      ++failures();                                                        \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                      \
  } while (false)
